"""An inner attention as a module, for a model that takes any, as torchtitan's do: q, k, v are `[B, S, H, D]`, or `[T, H, D]` of
a packed batch, whose documents are the attention masks. The same output and gradients as those on one rank.

    torchrun --nproc-per-node 2 examples/inner_attention.py"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attention


@dataclass(frozen=True)
class Packed:
    """Attention masks of a packed batch: the cumulative lengths of its documents, over the tokens of all ranks."""

    cu_seqlens: tuple[int, ...]

    @staticmethod
    def of(positions: Tensor) -> "Packed":
        """positions: `[T]`, global; a document begins where they restart at 0."""
        return Packed((*(positions == 0).nonzero().flatten().tolist(), len(positions)))


class InnerAttention(nn.Module):
    """Causal attention of this rank's queries over the keys and values of all ranks.

    The model's inputs, labels and positions go through `shard` of the same function, those of a packed batch with its
    `cu_seqlens`."""

    def __init__(self, fn: attention.ContextParallel, window: int | None = None):
        super().__init__()
        self.fn = fn
        self.window = (-1 if window is None else window - 1, -1)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Packed | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q: `[B, s, H, D]`, or `[t, H, D]` with `attention_masks`; k, v: with Hk heads, fewer than H with `enable_gqa` only. out:
        as q. Raises ValueError for what does not go together."""
        if attention_masks is not None and not isinstance(attention_masks, Packed):
            raise ValueError(
                f"attention_masks is a {type(attention_masks).__name__}: give Packed.of(positions), or None"
            )
        if (attention_masks is None) != (q.dim() == 4):
            raise ValueError(f"q has shape {list(q.shape)}: [B, S, H, D] has no attention_masks, [T, H, D] needs them")
        if q.shape[-2] != k.shape[-2] and not enable_gqa:
            raise ValueError(f"{q.shape[-2]} heads of q, {k.shape[-2]} of k: give enable_gqa=True")
        lengths = None if attention_masks is None else attention_masks.cu_seqlens
        return self.fn(q, k, v, causal=True, window=self.window, scale=scale, cu_seqlens=lengths)


class Block(nn.Module):
    """Projections around an inner attention. x: `[B, s, C]`, or `[t, C]` of a packed batch."""

    def __init__(self, inner: nn.Module, hidden: int = 64, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.inner, self.heads = inner, (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(hidden, sum(self.heads) * (hidden // heads))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, attention_masks: Packed | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, -2)
        return self.out(self.inner(q, k, v, attention_masks=attention_masks, enable_gqa=True).flatten(-2))


def compare(fn: attention.ContextParallel, x: Tensor, masks: Packed | None) -> tuple[float, float]:
    """The largest differences of out and of gradients (relative) from those of one rank. x: global."""
    alone, sharded = (Block(InnerAttention(each)) for each in (attention.make("dense"), fn))
    sharded.load_state_dict(alone.state_dict())
    lengths = None if masks is None else masks.cu_seqlens
    out = sharded(fn.shard(x.unsqueeze(-2), lengths).squeeze(-2), masks)
    out.square().sum().backward()
    exact = alone(x, masks)
    exact.square().sum().backward()
    gradients = [p.grad for p in sharded.parameters()]
    for gradient in gradients if fn.world > 1 else ():
        dist.all_reduce(gradient)
    errors = [(a - p.grad).norm() / p.grad.norm() for a, p in zip(gradients, alone.parameters(), strict=True)]
    whole = fn.unshard(out.unsqueeze(-2), lengths).squeeze(-2)
    return float((whole - exact).abs().max()), float(max(errors))


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    fn = attention.make("llama3")  # documents of any length
    torch.manual_seed(0)  # the same on every rank
    positions = torch.cat([torch.arange(n) for n in (100, 37, 119)])  # of three documents
    for name, x, masks in (
        ("batch", torch.randn(2, 256, 64), None),
        ("packed", torch.randn(256, 64), Packed.of(positions)),
    ):
        out, gradients = compare(fn, x, masks)
        if fn.rank == 0:
            print(f"{fn.world} ranks, {name}: out differs by {out:.1e}, gradients by {gradients:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
