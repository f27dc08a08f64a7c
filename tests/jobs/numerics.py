"""Jobs that compare a call with fp64, or with another way to make the same call."""

from __future__ import annotations

from typing import Any

import torch

import attention
from attention.kernels import KERNELS
from attention.kernels.interface import Call
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.launch.rank import Rank
from tests.jobs.reference import DTYPES, by_kernel, call_of, inputs, rel
from tests.support.strides import STRIDES


def compare(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
    transport: str = "auto",
) -> list[dict[str, Any]]:
    """For each case, the relative L2 errors of out, dq, dk and dv against fp64, and those of one local call of the same
    kernel."""
    fn = attention.make(name, kernel=kernel, transport=transport, **options)
    found = []
    for case in cases:
        packs = case.get("packs")
        how = {"causal": case["causal"], "window": tuple(case.get("window", (-1, -1)))}
        how |= {"cu_seqlens": packs, "scale": case.get("scale")}
        *whole, dout = inputs(case, dtype, me.device)
        shards = [fn.shard(x, packs).requires_grad_() for x in whole]
        out, lse = fn(*shards, **how, return_lse=True)
        gradients = torch.autograd.grad(out, shards, fn.shard(dout, packs))
        plan = fn.plan(*shards, **how)
        ours = [fn.unshard(x, packs) for x in (out, *gradients)]
        ours_lse = fn.unshard(lse.transpose(-1, -2).unsqueeze(-1).contiguous(), packs).squeeze(-1).transpose(-1, -2)
        if me.rank:  # has the same: what rank 0 found is what comes back
            continue
        exact, exact_lse = by_kernel("math", case, dtype, torch.float64, me.device)
        alone, _ = by_kernel(plan.kernel.name, case, dtype, DTYPES[dtype], me.device)
        found.append({
            "case": case,
            "errors": [rel(a, b) for a, b in zip(ours, exact, strict=True)],
            "local": [rel(a, b) for a, b in zip(alone, exact, strict=True)],
            "kernel": plan.kernel.name,
            "lse": float((ours_lse.double() - exact_lse).abs().max()),
        })  # fmt: skip
    return found


def decode(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
    transport: str = "auto",
) -> list[dict[str, Any]]:
    """For each decode, the relative L2 error of out and the largest error of lse on any rank, the error of one local
    call, the counted bytes, the recorded phases and the number of keys on each rank."""
    from attention.profiling import Recorder, recording

    fn = attention.make(name, kernel=kernel, transport=transport, **options)
    found = []
    for number, case in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        shapes = ((case["queries"], case["heads"]), (case["keys"], case["kv_heads"]), (case["keys"], case["kv_heads"]))
        q, k, v = (
            torch.randn(case["batch"], tokens, heads, case["head_dim"], generator=generator).to(
                me.device, DTYPES[dtype]
            )
            for tokens, heads in shapes
        )
        scale = case.get("scale")
        how = {"kv_tokens": case["keys"], "scale": scale}
        how |= {"causal": case.get("causal", False), "window": tuple(case.get("window", (-1, -1)))}
        call = call_of(Band.of(how["causal"], how["window"]), None, case["head_dim"], me.device, scale)
        exact, exact_lse = KERNELS["math"].forward(q.double(), k.double(), v.double(), call)
        local = (fn.shard(q, role="q"), fn.shard(k, role="kv"), fn.shard(v, role="kv"))
        plan = fn.plan(*local, **how)
        plan.transport.bytes_received.clear()
        with recording(Recorder(me.device)) as recorder:
            out, lse = fn(*local, **how, return_lse=True)
        me.synchronize()
        alone = plan.kernel.forward(q, k, v, call)[0]
        lse_error = worst_lse(lse, exact_lse)
        found.append({
            "case": case,
            "error": max(me.gather(rel(out, exact))),
            "lse": max(me.gather(lse_error)),
            "local": rel(alone, exact),
            "bytes": me.gather(dict(plan.transport.bytes_received)),
            "phases": sorted({span.name for span in recorder.spans}),
            "held": me.gather(local[1].shape[1]),
            "storage": me.gather(local[1].untyped_storage().nbytes() // local[1].element_size()),
        })  # fmt: skip
    return found


def round_trip(me: Rank, name: str, packs: list[int] | None, tokens: int) -> bool:
    """Whether unshard(shard(x)) == x, and whether its gradient is right."""
    fn = attention.make(name)
    shape = (tokens, 3, 4) if packs else (2, tokens, 3, 4)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=me.device).view(shape)
    local = fn.shard(x, packs).requires_grad_()
    back = fn.unshard(local, packs)
    (gradient,) = torch.autograd.grad(back, local, x)
    return bool(torch.equal(back, x) and torch.equal(gradient, local))


def bitwise(me: Rank, name: str, kernel: str, transport: str) -> bool:
    """Whether out and gradients have the same bits in five calls with deterministic=True."""
    fn = attention.make(name, kernel=kernel, transport=transport, deterministic=True)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if me.device.type == "cuda" else torch.float32
    shapes = ((8, 64), (2, 64), (2, 64))
    q, k, v = (
        fn.shard(torch.randn(1, 512 * me.world, *s, generator=generator).to(me.device, dtype)).requires_grad_()
        for s in shapes
    )
    first: list[torch.Tensor] = []
    same = True
    for _ in range(5):
        out = fn(q, k, v, causal=True)
        found = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
        first = first or found
        same &= all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    return all(me.gather(same))


def worst_lse(lse: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest absolute error; inf where only one of them is -inf."""
    return float((lse.double() - exact).masked_fill((lse == -torch.inf) & (exact == -torch.inf), 0).abs().max())


def growing(
    me: Rank, name: str, options: dict[str, Any], transport: str, most: int, window: tuple[int, int] = (-1, -1)
) -> dict[str, Any]:
    """A decode whose keys grow one by one: the largest error of out and lse, how many plans are kept, and the lengths at
    which a plan differs from its schedule."""
    from attention.executors.plan import plan_steps

    fn = attention.make(name, transport=transport, **options)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 32, generator=generator).to(me.device) for n, h in ((2, 4), (most, 2), (most, 2)))
    mask = Band.of(window=tuple(window))
    call = call_of(mask, None, 32, me.device)

    def local(n: int) -> list[torch.Tensor]:
        return [q, *(fn.shard(x[:, :n], role="kv") for x in (k, v))]

    errors = []
    for n in range(1, most + 1):
        out, lse = fn(*local(n), kv_tokens=n, window=window, return_lse=True)
        exact, exact_lse = KERNELS["math"].forward(q.double(), k[:, :n].double(), v[:, :n].double(), call)
        errors += [rel(out, exact), worst_lse(lse, exact_lse)]
    kept = len(fn.plans)
    wrong = []
    for n in (*range(1, most + 1), *range(most, 0, -1)):
        plan = fn.plan(*local(n), kv_tokens=n, window=window)
        problem = fn.variant.problem((0, n), me.world, mask, fn.options, 2)
        expected = plan_steps(problem, me.rank, Call(plan.scale), False, me.device)
        if plan.problem != problem or list(map(_without_calls, plan.steps)) != list(map(_without_calls, expected)):
            wrong.append(n)
    return {"error": max(me.gather(max(errors))), "kept": kept, "wrong": me.gather(wrong)}


def _without_calls(step: Any) -> tuple[Any, ...]:
    """What can be compared of a step: everything but its kernel call objects."""
    calls = [(each.q, each.k, each.call.scale, each.call.mask) for each in step.calls]
    return step.owner, step.keys, step.n_keys, calls, step.route, step.most


def _self_attention(fn: Any, name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of a causal call, or (out, lse) of a decode. tensors: q, k, v and dout."""
    *qkv, dout = tensors
    if VARIANTS[name].decode:
        return list(fn(*qkv, return_lse=True))
    qkv = [x.detach().requires_grad_() for x in qkv]
    out, lse = fn(*qkv, causal=True, return_lse=True)
    return [out, lse, *torch.autograd.grad(out, qkv, dout)]


def in_strides(me: Rank, names: list[str], forms: list[str], transport: str) -> list[list[Any]]:
    """For each variant and each way to lie in memory, the largest difference from the results of dense tensors."""
    found = []
    for name in names:
        fn = attention.make(name, transport=transport)
        for how in forms:
            torch.manual_seed(0)  # the queries of a decode are the same on every rank
            strided = [STRIDES[how](torch.randn(2, 16, h, 16)) for h in (4, 2, 2, 4)]
            dense = [x.clone(memory_format=torch.contiguous_format) for x in strided]
            ours = [_self_attention(fn, name, *xs) for xs in (strided, dense)]
            errors = [float((a.detach() - b.detach()).abs().max()) for a, b in zip(*ours, strict=True)]
            found.append([name, how, max(me.gather(max(errors)))])
    return found


def under_autocast(me: Rank, names: list[str]) -> list[list[Any]]:
    """Whether each variant gives the same bits under autocast."""
    found = []
    for name in names:
        fn = attention.make(name, kernel="math")
        torch.manual_seed(0)
        tensors = [torch.randn(2, 16, h, 16) for h in (4, 2, 2, 4)]
        plain = _self_attention(fn, name, *tensors)
        with torch.autocast("cpu", torch.bfloat16):
            cast = _self_attention(fn, name, *tensors)
        found.append([name, all(me.gather(all(map(torch.equal, plain, cast))))])
    return found


def ids_round_trip(me: Rank, names: list[str], transport: str) -> bool:
    """Whether unshard(shard(x)) == x for integer token ids, in a batch and packed."""
    ids = torch.arange(2 * 16, device=me.device).view(2, 16)
    same = True
    for name in names:
        fn = attention.make(name, transport=transport)
        same &= bool(torch.equal(fn.unshard(fn.shard(ids)), ids))
        packs = [0, 4, 16]
        same &= bool(torch.equal(fn.unshard(fn.shard(ids[0], packs), packs), ids[0]))
    return all(me.gather(same))
