"""Jobs for the adapters of peers."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from attention.kernels import KERNELS, Call
from attention.masks.band import Band
from runner.launch.rank import Rank
from runner.peers import PEERS, function
from tests.jobs.reference import rel
from tests.support import naive
from tests.support.cases import DTYPES


def compare(
    me: Rank, name: str, options: dict[str, Any], cases: list[dict[str, Any]], dtype: str = "fp32", kernel: str = "auto"
) -> list[dict[str, Any]]:
    """For each case, the relative L2 errors of out, dq, dk and dv against fp64, those of one local call of the same kernel, and
    the kernel's name. All forwards run before the first backward, as in a model of several layers."""
    fn = function.make(name, kernel=kernel, **options)
    forwards, compared = [], []
    for case in cases:
        packs, heads = case.get("packs"), (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
        lead = (case["tokens"],) if packs else (case.get("batch", 2), case["tokens"])
        generator = torch.Generator().manual_seed(sum(heads))
        whole = [torch.randn(*lead, h, case["head_dim"], generator=generator) for h in heads]
        whole = [x.to(me.device, DTYPES[dtype]) for x in whole]
        shards = [fn.shard(x, packs).requires_grad_() for x in whole[:3]]
        how = {"causal": case["causal"], "cu_seqlens": packs}
        forwards.append((case, whole, shards, fn(*shards, **how), fn.plan(*shards, **how)))
    for case, whole, shards, out, plan in forwards:
        packs, call = case.get("packs"), Call(case["head_dim"] ** -0.5, Band.of(case["causal"]))
        if packs:
            lengths = [b - a for a, b in pairwise(packs)]
            call = call.of_packed(call.mask, lengths, lengths, me.device)
        q, k, v, dout = whole
        gradients = torch.autograd.grad(out, shards, fn.shard(dout, packs))
        exact, _, *exact_gradients = naive.reference(*whole, call)
        local = KERNELS[case.get("local", plan.kernel.name)]
        alone, lse = local.forward(q, k, v, call)
        results = {
            "errors": [fn.unshard(x, packs) for x in (out, *gradients)],
            "local": [alone, *local.backward(dout, q, k, v, alone, lse, call)],
        }
        errors = {who: list(map(rel, xs, (exact, *exact_gradients))) for who, xs in results.items()}
        compared.append({**errors, "kernel": plan.kernel.name})
    return compared


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
