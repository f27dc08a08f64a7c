"""torchtitan's inner attention over a function of this library: any variant, packed documents, windows and sinks. It is a module of
packed tensors, whose metadata stay global, and whose tokens are sharded by a permutation of the whole batch.

    torchrun --nproc-per-node 2 examples/inner_attention.py

Suffixes of tensors: T tokens of this rank, H heads, K head dim of queries and keys, V head dim of values, D hidden size."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attention


class VarlenMetadata(NamedTuple):
    """What torchtitan gives its attention of packed documents: cumulative lengths over the tokens of all ranks."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class InnerAttention(nn.Module):
    """Attention of this rank's queries over the keys and values of all ranks. sinks: a learned logit a head, `[H]`, or None."""

    def __init__(
        self, fn: attention.ContextParallel, window_size: tuple[int, int] = (-1, 0), sinks: Tensor | None = None
    ):
        super().__init__()
        self.fn, self.window_size, self.sinks = fn, window_size, sinks

    def permutation(self, tokens: int) -> Tensor:
        """The order `[1, tokens]` in which the whole batch is cut into equal parts, one a rank, in place of a load balancer's."""
        shards = self.fn.layout.shards((0, tokens), self.fn.world)
        return torch.tensor([[token for shard in shards for positions in shard for token in positions]])

    @staticmethod
    def prepare_cp_metadata(attention_metadata: VarlenMetadata, *, permutation: Tensor | None) -> VarlenMetadata:
        """Metadata stay global. permutation: of `permutation()`, which the function knows."""
        return attention_metadata

    def forward(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        *,
        attention_metadata: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Returns out `[T, H, V]`. Raises ValueError for what does not go together."""
        if out_transform is not None:
            raise ValueError("out_transform: the LSE has no gradient; give sinks to InnerAttention, which applies them")
        if q_THK.shape[1] != k_THK.shape[1] and not enable_gqa:
            raise ValueError(f"{q_THK.shape[1]} heads of q, {k_THK.shape[1]} of k: give enable_gqa=True")
        left, right = self.window_size
        return self.fn(
            q_THK, k_THK, v_THV, causal=right == 0, window=(left, -1 if right == 0 else right), scale=scale, sinks=self.sinks,
            cu_seqlens=attention_metadata.cu_seq_q,
        )  # fmt: skip


class Block(nn.Module):
    """Projections around an inner attention, with sinks."""

    def __init__(self, fn: attention.ContextParallel, hidden: int = 64, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.heads = (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(hidden, sum(self.heads) * (hidden // heads))
        self.out = nn.Linear(hidden, hidden)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.inner = InnerAttention(fn, window_size=(48, 0), sinks=self.sinks)

    def forward(self, x_TD: Tensor, attention_metadata: VarlenMetadata) -> Tensor:
        q_THK, k_THK, v_THV = self.qkv(x_TD).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 1)
        out_THV = self.inner(q_THK, k_THK, v_THV, attention_metadata=attention_metadata, enable_gqa=True)
        return self.out(out_THV.flatten(1))


def train(fn: attention.ContextParallel, whole: Tensor, metadata: VarlenMetadata) -> list[Tensor]:
    """This rank's share of a loss over all tokens and of its gradients."""
    torch.manual_seed(0)  # the same parameters on every rank
    block = Block(fn)
    permutation = block.inner.permutation(len(whole))
    metadata = block.inner.prepare_cp_metadata(metadata, permutation=permutation)
    mine = permutation[0].chunk(fn.world)[fn.rank]
    loss = block(whole[mine], metadata).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in block.parameters())]


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    fn = attention.make("llama3")  # documents of any length
    torch.manual_seed(1)
    whole, lengths = torch.randn(256, 64), torch.tensor([0, 100, 137, 256])
    metadata = VarlenMetadata(lengths, lengths, 119, 119)
    mine, alone = train(fn, whole, metadata), train(attention.make("dense", group=None), whole, metadata)
    for x in mine if fn.world > 1 else ():
        dist.all_reduce(x)
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(mine, alone, strict=True)]
    if fn.rank == 0:
        print(
            f"{fn.world} ranks: the loss differs by {errors[0]:.1e}, gradients by {max(errors[1:]):.1e} of one rank's"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
