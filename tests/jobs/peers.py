"""Jobs for the adapters of peers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from attention.kernels import KERNELS, Call
from attention.masks.band import Band
from runner.launch.rank import Rank
from runner.peers import PEERS, function
from tests.jobs.reference import DTYPES, by_kernel, inputs, rel


def compare(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
) -> list[dict[str, Any]]:
    """For each case, the relative L2 errors of out, dq, dk and dv against fp64 (fp32 on a GPU), those of one local call
    of the same kernel, and the kernel's name. All forwards run before the first backward, as in a model of several
    layers."""
    fn = function.make(name, kernel=kernel, **options)
    exactly = torch.float32 if me.device.type == "cuda" else torch.float64
    forwards, found = [], []
    for case in cases:
        packs = case.get("packs")
        whole = inputs(case, dtype, me.device)
        shards = [fn.shard(x, packs).requires_grad_() for x in whole[:3]]
        how = {"causal": case["causal"], "cu_seqlens": packs}
        forwards.append((case, whole, shards, fn(*shards, **how), fn.plan(*shards, **how)))
    for case, whole, shards, out, plan in forwards:
        packs = case.get("packs")
        gradients = torch.autograd.grad(out, shards, fn.shard(whole[3], packs))
        exact, _ = by_kernel("math", case, dtype, exactly, me.device)
        alone, _ = by_kernel(case.get("local", plan.kernel.name), case, dtype, DTYPES[dtype], me.device)
        ours = [fn.unshard(x, packs) for x in (out, *gradients)]
        found.append({
            "case": case,
            "errors": [rel(a, b) for a, b in zip(ours, exact, strict=True)],
            "local": [rel(a, b) for a, b in zip(alone, exact, strict=True)],
            "kernel": plan.kernel.name,
        })  # fmt: skip
    return found


class _CudaOps:
    """aten's CUDA flash attention, which PyTorch's context_parallel calls, computed on a CPU by the math kernel."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention", self.forward, "CPU")
        self.library.impl("_scaled_dot_product_flash_attention_backward", self.backward, "CPU")

    @staticmethod
    def forward(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, debug: bool = False, scale: Any = None) -> Any:  # fmt: skip
        call = Call(scale, Band.of(causal))
        out, lse = KERNELS["math"].forward(*(x.transpose(1, 2) for x in (q, k, v)), call)
        state, unused = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        return out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)

    @staticmethod
    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
                 dropout: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None) -> Any:  # fmt: skip
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        gradients = KERNELS["math"].backward(dout, q, k, v, out, lse, Call(scale, Band.of(causal)))
        return tuple(x.transpose(1, 2) for x in gradients)


_cuda_ops: list[_CudaOps] = []


def compare_torch_cp(me: Rank, **arguments: Any) -> list[dict[str, Any]]:
    """`compare` for PyTorch's context_parallel. Only its CUDA kernel is replaced, since it has none for a CPU."""
    plain, package = F.scaled_dot_product_attention, PEERS["torch_cp"]

    def scaled_dot_product_attention(q: Any, k: Any, v: Any, is_causal: bool, scale: float, enable_gqa: bool) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]

    _cuda_ops[:] = _cuda_ops or [_CudaOps()]
    F.scaled_dot_product_attention = scaled_dot_product_attention
    PEERS["torch_cp"] = replace(package, cuda=False)
    try:
        return compare(me, "torch_cp", kernel="sdpa_flash", **arguments)
    finally:
        F.scaled_dot_product_attention, PEERS["torch_cp"] = plain, package


def kernels_seen(me: Rank, name: str) -> list[list[str]]:
    """The kernels of two forwards, then those of the second function's backward and of the first's."""
    seen: list[str] = []

    def watched(kernel: Any, what: str) -> Any:
        def call(*arguments: Any, **others: Any) -> Any:
            seen.append(kernel.name)
            return getattr(kernel, what)(*arguments, **others)

        return call

    x = torch.randn(1, 8 * me.world, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    found, outs = [], []
    for kernel in ("sdpa_flash", "math"):
        fn = function.make(name, kernel=kernel)
        shards = [fn.shard(x).requires_grad_() for _ in range(3)]
        plan = fn.plan(*shards, causal=True)
        spy = copy.copy(plan.kernel)
        spy.forward, spy.backward = watched(plan.kernel, "forward"), watched(plan.kernel, "backward")
        fn.plans.update({key: replace(plan, kernel=spy) for key in fn.plans})
        outs.append(fn(*shards, causal=True))
        found.append(sorted(set(seen)))
        seen.clear()
    for out in reversed(outs):
        out.float().sum().backward()
        found.append(sorted(set(seen)))
        seen.clear()
    return found


def lengths_read(me: Rank) -> int:
    """How often a second iteration of rfa_llama3 reads sequence lengths from the device."""
    from runner.peers import flash_functions

    fn = function.make("rfa_llama3")
    packs = [0, 3 * me.world, 8 * me.world]
    shards = [fn.shard(torch.randn(packs[-1], 4, 16), packs).requires_grad_() for _ in range(3)]
    fn(*shards, causal=True, cu_seqlens=packs).sum().backward()
    before = flash_functions.lengths.cache_info().misses
    fn(*shards, causal=True, cu_seqlens=packs).sum().backward()
    return flash_functions.lengths.cache_info().misses - before


def refused(me: Rank) -> dict[str, str]:
    """The messages for calls that packages cannot do, as if they were installed."""

    def text(
        name: str = "rfa_zigzag", dtype: Any = torch.bfloat16, batch: int = 1, how: Any = None, **call: Any
    ) -> str:
        lead = (8,) if "cu_seqlens" in call else (batch, 8)
        x, package = torch.zeros(*lead, 4, 16, dtype=dtype), PEERS[name]
        PEERS[name] = replace(package, needs=(), cuda=False)
        try:
            function.make(name, **(how or {}))(x, x, x, **{"causal": True, **call})
        except ValueError as error:
            return str(error)
        finally:
            PEERS[name] = package
        return "nothing"

    return {
        "fp32": text(dtype=torch.float32),
        "batch": text("rfa_llama3", batch=2),
        "lse": text(return_lse=True),
        "softcap": text(softcap=2.0),
        "padding": text(padding=3),
        "transport": text(how={"transport": "symm"}),
        "kernel": text("torch_cp", how={"kernel": "math"}),
        "pack": text(cu_seqlens=[0, 4, 8]),
    }
