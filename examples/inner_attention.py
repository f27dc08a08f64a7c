"""An inner attention as a module, for a model that takes any: q, k, v are `[B, H, S, D]`, as in torchtitan and in
F.scaled_dot_product_attention, whose place it takes. The same output and gradients as that on one rank.

    torchrun --nproc-per-node 2 examples/inner_attention.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import attention


class InnerAttention(nn.Module):
    """Causal attention of this rank's queries `[B, H, s, D]` over the keys and values `[B, Hk, s, D]` of all ranks.

    The model's inputs, labels and positions go through `shard` of the same function."""

    def __init__(self, fn: attention.ContextParallel, window: int | None = None):
        super().__init__()
        self.fn = fn
        self.window = (-1 if window is None else window - 1, -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, s, ., D]
        return self.fn(q, k, v, causal=True, window=self.window, scale=scale).transpose(1, 2)


class Block(nn.Module):
    """Projections around an inner attention. x: `[B, s, C]`."""

    def __init__(self, inner: nn.Module, hidden: int = 64, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.inner, self.heads = inner, (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(hidden, sum(self.heads) * (hidden // heads))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class OneRank(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    fn = attention.make("zigzag")
    torch.manual_seed(0)  # the same on every rank
    x = torch.randn(2, 256, 64)
    alone = Block(OneRank())
    sharded = Block(InnerAttention(fn))
    sharded.load_state_dict(alone.state_dict())

    out = sharded(fn.shard(x.unsqueeze(2)).squeeze(2))
    out.square().sum().backward()
    exact = alone(x)
    exact.square().sum().backward()
    whole = fn.unshard(out.unsqueeze(2)).squeeze(2)
    gradients = [p.grad for p in sharded.parameters()]
    for x in gradients if fn.world > 1 else ():
        dist.all_reduce(x)
    errors = [(a - p.grad).norm() / p.grad.norm() for a, p in zip(gradients, alone.parameters(), strict=True)]
    if fn.rank == 0:
        print(f"{fn.world} ranks: out differs by {(whole - exact).abs().max():.1e}, gradients by {max(errors):.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
