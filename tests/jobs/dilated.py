"""Dilated attention in a world against its dense definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attention
from runner.launch.rank import Rank
from tests.support.cases import DTYPES
from tests.support.dilated import reference

OPTIONS = ("segments", "rates", "mixing", "weights", "pattern_cache", "memory_pool")
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")


def compare(me: Rank | None, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case the largest errors of out, lse and the gradients, relative to the largest value or to 1, the scale of the
    inputs. me: None without a world."""
    return [_compare(me, case) for case in cases]


def _compare(me: Rank | None, case: dict[str, Any]) -> dict[str, float]:
    options = {name: case[name] for name in OPTIONS if name in case}
    fn = attention.make(case["name"], kernel=case["kernel"], **options)
    tokens, batch, (heads, kv_heads) = case["tokens"], case.get("batch", 1), case.get("heads", (4, 2))
    dims, causal, cu = case.get("dims", (8, 8)), case.get("causal", True), case.get("cu_seqlens")
    generator = torch.Generator().manual_seed(tokens + heads)
    shapes = (heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]), (heads, dims[1])
    dtype, device = DTYPES[case.get("dtype", "fp64")], me.device if me else torch.device(case.get("device", "cpu"))
    q, k, v, dout = (torch.randn(batch, tokens, *s, generator=generator).to(device, dtype) for s in shapes)
    sinks = torch.randn(heads, generator=generator).to(device, dtype) if case.get("sinks") else None
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    about = {name: case.get(name) for name in ("segments", "rates", "mixing", "weights", "softcap", "cu_seqlens")}
    out, lse = reference(*exact[:3], causal=causal, sinks=None if sinks is None else exact[3], **about)
    expected = (out, lse, *torch.autograd.grad(out, exact, dout.double()))
    how = {"causal": causal, "softcap": case.get("softcap")}
    results = _ours(me, fn, (q, k, v, dout), sinks, cu, how)
    return {name: _error(x, y) for name, x, y in zip(RESULTS, results, expected, strict=False)}


def _ours(
    me: Rank | None, fn: Any, whole: tuple[Tensor, ...], sinks: Tensor | None, cu: list[int] | None, how: dict[str, Any]
) -> list[Tensor]:
    """The `RESULTS` of all ranks; what does not divide is padded."""
    whole = tuple(x[0] if cu else x for x in whole)
    pad, added = fn.variant.padding(fn.options, tuple(cu or (0, whole[0].shape[-3])), fn.world) > 0, 0
    parts = []
    for x in whole:
        part, added = fn.shard(x, cu, pad=True) if pad else (fn.shard(x, cu), 0)
        parts.append(part)
    inputs = [x.requires_grad_() for x in parts[:3]]
    if sinks is not None:
        how["sinks"] = sinks.clone().requires_grad_()
        inputs.append(how["sinks"])
    for _ in range(2):  # the second with what the first kept
        out, lse = fn(*inputs[:3], cu_seqlens=cu, padding=added, return_lse=True, **how)
    dq, dk, dv, *dsinks = torch.autograd.grad(out, inputs, parts[3])
    rows = lse.transpose(-1, -2).unsqueeze(-1).contiguous()
    out, rows, dq, dk, dv = (fn.unshard(x, cu, added) for x in (out, rows, dq, dk, dv))
    results = [x.unsqueeze(0) if cu else x for x in (out, rows, dq, dk, dv)]
    results[1] = results[1].squeeze(-1).transpose(-1, -2)
    if dsinks and me is not None and not fn.layout.replicated:  # a rank has the part of its queries
        dsinks = [torch.tensor(me.gather(dsinks[0].tolist()), dtype=torch.float64).sum(0).to(dsinks[0])]
    return [*results, *dsinks]


def _error(x: Tensor, expected: Tensor) -> float:
    x, expected = x.detach(), expected.detach()
    if not torch.equal(x == -torch.inf, expected == -torch.inf):
        return float("inf")
    x, expected = (y.masked_fill(y == -torch.inf, 0).double() for y in (x, expected))
    return float((x - expected).abs().max() / expected.abs().max().clamp(min=1))


def received(me: Rank, options: dict[str, Any], tokens: int, transport: str) -> list[dict[str, int]]:
    """The bytes that each rank receives in a forward and backward."""
    fn = attention.make("ring_dilated", transport=transport, **options)
    inputs = [fn.shard(torch.randn(1, tokens, 4, 8)).requires_grad_() for _ in range(3)]
    bytes_received = fn.plan(*inputs, causal=True).transport.bytes_received
    bytes_received.clear()
    fn(*inputs, causal=True).sum().backward()
    me.synchronize()
    return me.gather(dict(bytes_received))


def checked(me: Rank, experiment: dict[str, Any], wrong: list[dict[str, Any]]) -> list[list[Any]]:
    """Whether the correctness check passes, and the largest ratio to the errors of a local call: of the experiment, and of
    functions with these other options in its place."""
    from runner.check import gate
    from runner.config.experiment import Experiment
    from runner.measure.attention_work import AttentionWork
    from runner.measure.workload import build

    spec = Experiment.from_plain(experiment)
    outcomes = []
    for options in ({}, *wrong):
        work = AttentionWork(me, spec, build(replace(spec, options=spec.options | options)))
        fields = gate.check(me, spec, work).fields
        outcomes.append([fields["passed"], max(x["ratio_to_local"] for x in fields["tensors"].values())])
    return outcomes


def module(me: Rank, tokens: int, options: dict[str, Any]) -> list[float]:
    """The largest differences of out and of the gradients of x and all parameters between `ring_dilated` in this world and
    `dilated_improved` on one rank."""
    from attention.models import DilatedMultihead

    found = []
    for variant in ("ring_dilated", "dilated_improved"):
        torch.manual_seed(0)
        made = DilatedMultihead(32, 4, variant=variant, dtype=torch.float64, kernel="math", **options)
        whole, dout = torch.randn(2, 1, tokens, 1, 32, dtype=torch.float64)
        x, given = (made.attend.shard(y).squeeze(2) for y in (whole, dout))
        out = made(x.requires_grad_(), causal=True)
        dx, *of_parameters = torch.autograd.grad(out, [x, *made.parameters()], given)
        sums = [sum(me.gather(grad)) for grad in of_parameters] if variant == "ring_dilated" else of_parameters
        found.append([*(made.attend.unshard(y.unsqueeze(2)).squeeze(2) for y in (out, dx)), *sums])
    return [float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True)]


def checked_module(me: Rank, experiment: dict[str, Any]) -> list[str | None]:
    """Why the check of a module's run fails: as it is, after the timing, and with each of three faults."""
    from runner.check import gate
    from runner.config.experiment import Experiment
    from runner.measure.attention_work import ModuleWork

    spec = Experiment.from_plain(experiment)
    work = ModuleWork(me, spec)
    checked = gate.check(me, spec, work)
    for which in work.passes:
        work.run(which)
    found = [checked.fields["why"], gate.check_timed(me, work, work, checked)["why"]]
    module, call = work.module, work.call

    def without_norm() -> torch.Tensor:
        q, k, v = module.qkv(work.x).unflatten(-1, (-1, module.head_dim)).split(module.parts, -2)
        inner = module.attend(q, k, v, causal=spec.workload.causal).flatten(-2)
        return module.out(inner + 0 * module.norm(inner))

    def gradient_too_large() -> torch.Tensor:
        return call() + 0.02 * (work.x - work.x.detach())  # adds 0.02 dout to dx

    def of_other_tokens() -> torch.Tensor:
        return call().roll(1, 1)

    for fault in (without_norm, gradient_too_large, of_other_tokens):
        work.call = fault
        found.append(gate.check(me, spec, work).fields["why"])
    return found
