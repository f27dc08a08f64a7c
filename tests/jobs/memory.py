"""The memory that a call holds in a world: every tensor that PyTorch makes is followed until it is freed."""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
from attention import masks
from attention.executors.plan import Plan
from attention.masks import Mask
from attention.reduction import grad_sum, parts
from attention.transports import symmetric
from attention.variants.registry import variant
from runner.launch.rank import Rank


class Live(TorchDispatchMode):
    """A dispatch mode that records the peak of the bytes of all live storages except `ignored`."""

    def __init__(self, ignored: set[int]):
        super().__init__()
        self.ignored, self.made, self.peak = ignored, list[weakref.ref[Tensor]](), 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler to keep it out of this mode: a second for each rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.made += map(weakref.ref, results)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if all(x.untyped_storage().data_ptr() in given for x in results):
            return out  # views and writes in place: nothing new is held
        alive = [x for ref in self.made if (x := ref()) is not None]
        self.made = [weakref.ref(x) for x in alive]
        held = {
            s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, alive) if s.data_ptr() not in self.ignored
        }
        self.peak = max(self.peak, sum(held.values()))
        return out


class Nothing:
    """A kernel that allocates its results, computes nothing and needs no scratch memory."""

    name, summary, align = "nothing", "", 1

    def takes_whole(self, q: Any, k: Any, call: Any) -> bool:
        return False

    def forward(self, q: Any, k: Any, v: Any, call: Any, into: Any = None) -> Any:
        return into or (torch.empty(q.shape, dtype=q.dtype), torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3])))

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Any, into: Any = None) -> Any:
        return into or tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))


def held(
    me: Rank,
    cases: list[tuple[str, dict[str, Any]]],
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    packs: list[int] | None = None,
) -> Any:
    """For each case, by rank, the peak bytes beside the inputs of a forward and of a training step."""
    eager = parts.merge_eager, grad_sum.sum_eager
    parts.merge_eager = grad_sum.sum_eager = lambda *_: None  # type: ignore[assignment]  # a GPU's kernels need no scratch
    try:
        return [
            me.gather([_held(case, tokens, heads, head_dim, packs, both) for both in (False, True)]) for case in cases
        ]
    finally:
        parts.merge_eager, grad_sum.sum_eager = eager


def _idle(plan: Plan) -> Plan:
    """The plan with a kernel that does nothing."""
    return replace(plan, kernel=Nothing())  # type: ignore[arg-type]


def _held(
    case: tuple[str, dict[str, Any]], tokens: int, heads: tuple[int, int], head_dim: int, packs: Any, backward: bool
) -> int:
    symmetric.release()
    name, options = case
    fn = attention.make(name, transport="symm", kernel="math", **options)
    q, kv = (torch.zeros(*(() if packs else (1,)), tokens, n, head_dim, dtype=torch.bfloat16) for n in heads)
    q, k, v, dout = (fn.shard(x, packs) for x in (q, kv, kv, q))
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    plan = fn.plan(*inputs, causal=True, cu_seqlens=packs)
    (key,) = fn.plans
    fn.plans[key] = replace(_idle(plan), parts=tuple((c, _idle(part)) for c, part in plan.parts))

    def step() -> None:
        out = fn(*inputs, causal=True, cu_seqlens=packs)
        if backward:
            torch.autograd.grad(out, inputs, dout)

    step()  # slots are made
    pools = [pool for by_device in symmetric._pools.values() for pool in by_device.values()]
    pools = [pool for pool in pools if isinstance(pool, symmetric.BufferPool)]
    mapped = [x for pool in pools for shared in pool.memory.values() for x in shared.by_rank]
    outside = {x.untyped_storage().data_ptr() for x in (*inputs, dout, *mapped)}
    live = Live(outside)
    with live:
        step()
    return live.peak + sum(pool.nbytes for pool in pools)


def under_masks(me: Rank, names: list[str], sizes: list[int]) -> dict[str, list[list[int]]]:
    """By variant and mask, for each rank and size the peak bytes beside the inputs of a forward and backward. The pairs of the
    masks grow linearly with the tokens."""
    made = {
        "documents": lambda n: masks.documents([256] * (n // 256)),
        "dca of tiles": lambda n: masks.dca(128, 16, 32, granularity="tile", causal=True),
        "block_sparse": lambda n: masks.block_sparse("local_window", causal=True),
    }
    return {
        f"{name} under {which}": me.gather([_peak(name, mask(n), n) for n in sizes])
        for name in names
        for which, mask in made.items()
    }


def _peak(name: str, mask: Mask, tokens: int) -> int:
    made_for = {"mask": mask} if "mask" in variant(name).options.from_call else {}
    fn = attention.make(name, **made_for)
    inputs = [fn.shard(torch.randn(1, tokens, heads, 16)).contiguous().requires_grad_() for heads in (2, 1, 1)]
    out = fn(*inputs, mask=mask)  # plans
    dout = torch.ones_like(out)
    with Live({x.untyped_storage().data_ptr() for x in (*inputs, out, dout)}) as live:
        torch.autograd.grad(fn(*inputs, mask=mask), inputs, dout)
    return live.peak


def resident(me: Rank, name: str, packs: int) -> list[float]:
    """The MiB of this process after every hundredth training step, each on a new packed batch; of rank 0."""
    order, fn, x = random.Random(0), attention.make(name), torch.randn(1024, 2, 16)
    found = []
    for step in range(1, packs + 1):
        cuts = {0, 1024, *(2 * me.world * order.randint(1, 255) for _ in range(32))}
        cu_seqlens = sorted(cuts)
        q, k, v = (fn.shard(x, cu_seqlens).requires_grad_() for _ in range(3))
        fn(q, k, v, causal=True, cu_seqlens=cu_seqlens).sum().backward()
        if step % 100 == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later is not held
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append(pages * resource.getpagesize() / 2**20)
    return found
