"""Jobs that the tests run inside real worlds."""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import logging
import math
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

import attention
from attention.kernels import KERNELS, Absent, Call
from attention.masks.band import Mask
from attention.variants.registry import VARIANTS
from runner.config.schema import Experiment, UnsupportedHere
from runner.launch.rank import Rank, memory_limit
from runner.measure import ceilings, correctness, job
from runner.measure.workload import AttentionWork, build

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KNOWN = 64  # calls whose results are kept


def rel(x: torch.Tensor, reference: torch.Tensor) -> float:
    """inf for NaN, which `max` would pass over."""
    found = float((x.detach().double() - reference.double()).norm() / reference.double().norm())
    return math.inf if math.isnan(found) else found


def compare(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
    transport: str = "auto",
) -> list[dict[str, Any]]:
    """For each case, the relative L2 errors of out, dq, dk, dv against fp64, and those of one local call of the same
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


def inputs(case: dict[str, Any], dtype: str, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and dout of a case, the same wherever the case is computed."""
    lead = (case["tokens"],) if case.get("packs") else (case.get("batch", 2), case["tokens"])
    heads = (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
    generator = torch.Generator().manual_seed(crc32(json.dumps(case, sort_keys=True).encode()))
    return [torch.randn(*lead, h, case["head_dim"], generator=generator).to(device, DTYPES[dtype]) for h in heads]


_known: dict[tuple[Any, ...], Any] = {}


def by_kernel(
    name: str, case: dict[str, Any], dtype: str, computed_in: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(out, dq, dk, dv) and lse of a kernel's call on the whole inputs of a case. Kept: every variant has the same cases,
    and the reference takes longer than they do."""
    key = (name, json.dumps(case, sort_keys=True), dtype, computed_in, device)
    if key not in _known:
        if len(_known) == KNOWN:
            _known.pop(next(iter(_known)))
        q, k, v, dout = (x.to(computed_in) for x in inputs(case, dtype, device))
        mask = Mask.of(case["causal"], tuple(case.get("window", (-1, -1))))
        call = _call(mask, case.get("packs"), case["head_dim"], device, case.get("scale"))
        kernel = KERNELS[name]
        out, lse = kernel.forward(q, k, v, call)
        _known[key] = (out, *kernel.backward(dout, q, k, v, out, lse, call)), lse
    return _known[key]


def _call(mask: Mask, packs: list[int] | None, dim: int, device: torch.device, scale: float | None = None) -> Call:
    scale = dim**-0.5 if scale is None else scale
    if packs is None:
        return Call(scale, mask)
    lengths = [b - a for a, b in pairwise(packs)]
    return Call.of_packed(scale, mask, lengths, lengths, device)


def decode(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
    transport: str = "auto",
) -> list[dict[str, Any]]:
    """For each case, the relative L2 error of out and the largest of lse on any rank, that of one local call, the bytes
    counted, the phases seen and how many keys each rank holds."""
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
        call = _call(Mask(), None, case["head_dim"], me.device, scale)
        exact, exact_lse = KERNELS["math"].forward(q.double(), k.double(), v.double(), call)
        local = (fn.shard(q, role="q"), fn.shard(k, role="kv"), fn.shard(v, role="kv"))
        plan = fn.plan(*local, kv_tokens=case["keys"], scale=scale)
        plan.transport.bytes_received.clear()
        with recording(Recorder(me.device)) as recorder:
            out, lse = fn(*local, kv_tokens=case["keys"], scale=scale, return_lse=True)
        me.synchronize()
        alone = plan.kernel.forward(q, k, v, call)[0]
        lse_error = float((lse.double() - exact_lse).abs().max())
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
    """unshard(shard(x)) == x, and the gradient of it is what it should be."""
    fn = attention.make(name)
    shape = (tokens, 3, 4) if packs else (2, tokens, 3, 4)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=me.device).view(shape)
    local = fn.shard(x, packs).requires_grad_()
    back = fn.unshard(local, packs)
    (gradient,) = torch.autograd.grad(back, local, x)
    return bool(torch.equal(back, x) and torch.equal(gradient, local))


def checkpointed(me: Rank, name: str) -> float:
    """Largest difference of the gradients with and without activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    fn = attention.make(name)
    torch.manual_seed(0)
    q, k, v = (fn.shard(torch.randn(1, 8 * me.world, 4, 16)).requires_grad_() for _ in range(3))
    plain = torch.autograd.grad(fn(q, k, v, causal=True).square().sum(), (q, k, v))
    out = checkpoint(lambda *x: fn(*x, causal=True), q, k, v, use_reentrant=False)
    again = torch.autograd.grad(out.square().sum(), (q, k, v))
    return max(float((a - b).abs().max()) for a, b in zip(plain, again, strict=True))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


def without_a_gradient(me: Rank, name: str) -> float:
    """Rank 0's out comes back without a gradient, the others' with one: the largest difference of any rank's gradients from
    those with zeros there."""
    fn = attention.make(name)
    torch.manual_seed(0)
    shards = [fn.shard(torch.randn(1, 8 * me.world, 4, 16)).requires_grad_() for _ in range(3)]
    given = float(me.rank > 0)
    expected = torch.autograd.grad((given * fn(*shards, causal=True)).sum(), shards)
    out = fn(*shards, causal=True)
    found = torch.autograd.grad((out if me.rank else _NoGradient.apply(out)).sum(), shards)
    worst = torch.stack([(a - b).abs().max() for a, b in zip(found, expected, strict=True)]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    assert float(expected[1].abs().max()) > 0  # a rank's keys have a gradient from the others' queries
    return float(worst)


def subgroup(me: Rank, name: str) -> float:
    """The function inside a process group of the even (or odd) ranks only: the largest error."""
    return _error_inside(me, name, _alternate(me.world)[me.rank % 2], me.rank % 2)


def mesh(me: Rank, name: str) -> list[float]:
    """The function inside each dimension of a 2-d DeviceMesh, the groups of one being neighbouring ranks and those of the
    other ranks that lie apart: the largest error in each."""
    grid = _grid(me.world)
    place = dict(zip(MESH, grid.get_coordinate() or (), strict=True))
    return [_error_inside(me, name, grid[inside].get_group(), place[other]) for inside, other in (MESH, MESH[::-1])]


MESH = ("outer", "inner")


@cache
def _alternate(world: int) -> list[Any]:
    return [dist.new_group(list(range(i, world, 2))) for i in range(2)]


@cache
def _grid(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=MESH)


def _error_inside(me: Rank, name: str, group: Any, number: int) -> float:
    """The largest error on any rank of out and gradients, or of a decode's out and lse, where every group has inputs of its
    own."""
    fn = attention.make(name, group=group)
    generator = torch.Generator().manual_seed(number)
    q, k, v, dout = (torch.randn(1, 16 * fn.world, h, 16, generator=generator) for h in (4, 2, 2, 4))
    if fn.variant.decode:
        q = q[:, :3]
        found = fn(q, *(fn.shard(x, role="kv") for x in (k, v)), return_lse=True)
        exact = KERNELS["math"].forward(q.double(), k.double(), v.double(), _call(Mask(), None, 16, me.device))
    else:
        shards = [fn.shard(x).requires_grad_() for x in (q, k, v)]
        out = fn(*shards, causal=True)
        found = [fn.unshard(x) for x in (out, *torch.autograd.grad(out, shards, fn.shard(dout)))]
        call, (q, k, v, dout) = _call(Mask.of(True), None, 16, me.device), (x.double() for x in (q, k, v, dout))
        result = KERNELS["math"].forward(q, k, v, call)
        exact = result[0], *KERNELS["math"].backward(dout, q, k, v, *result, call)
    return max(me.gather(max(rel(x, y) for x, y in zip(found, exact, strict=True))))


def compiled(me: Rank, name: str, backend: str = "eager", inside: bool = False) -> dict[str, Any]:
    """A model around the function, eager and compiled on rank 0, where it is called twice: the largest difference of out and
    gradients, the operations of each graph that it was compiled to, and what was warned of. `inside`: the model itself shards
    and unshards."""
    fn = attention.make(name)
    how = {} if fn.variant.decode else {"causal": True}
    graphs: list[list[str]] = []
    said: list[str] = []

    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fn(q * 2, k.tanh(), v, **how).relu() + 1

    def through(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = fn.shard(q * 2, role="q"), fn.shard(k.tanh(), role="kv"), fn.shard(v, role="kv")
        return fn.unshard(fn(q, k, v, **how)).relu() + 1

    def compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch.manual_seed(0)
    whole = (torch.randn(1, 8 * me.world, 4, 16) for _ in range(3))
    xs = [x if inside else fn.shard(x, role=role) for x, role in zip(whole, ("q", "kv", "kv"), strict=True)]
    model, trained = through if inside else around, not fn.variant.decode
    xs = [x.requires_grad_(trained) for x in xs]
    again = model
    if me.rank == 0:
        torch.compiler.reset()
        again = torch.compile(model, backend=compile)
    found = []
    with warnings.catch_warnings(record=True) as warned, _logged("torch", said):
        warnings.simplefilter("always")
        for run in (model, again, again):
            out = run(*xs)
            found.append((out, *(torch.autograd.grad(out.square().sum(), xs) if trained else ())))
    said += [str(each.message) for each in warned]
    eager, *others = found
    return {
        "error": max(float((a - b).detach().abs().max()) for each in others for a, b in zip(eager, each, strict=True)),
        "graphs": graphs,
        "said": said,
    }


@contextmanager
def _logged(name: str, into: list[str]) -> Iterator[None]:
    """What a logger and those below it warn of."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    handler = Listening(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(name).removeHandler(handler)


def counted(
    me: Rank,
    name: str,
    options: dict[str, Any],
    causal: bool,
    window: list[int],
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    transport: str = "auto",
    packs: list[int] | None = None,
) -> list[dict[str, Any]]:
    """Bytes that the transport counted into each rank, forward and backward."""
    fn = attention.make(name, transport=transport, **options)
    lead = (tokens,) if packs else (batch, tokens)
    q, k, v = (fn.shard(torch.randn(*lead, h, 16), packs).requires_grad_() for h in (heads, kv_heads, kv_heads))
    mask: dict[str, Any] = {"causal": causal, "window": tuple(window), "cu_seqlens": packs}
    counter = fn.plan(q, k, v, **mask).transport.bytes_received
    counter.clear()
    out = fn(q, k, v, **mask)
    forward = dict(counter)
    counter.clear()
    out.sum().backward()
    return me.gather({"forward": forward, "backward": dict(counter)})


def counted_of_runs(me: Rank, experiments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each experiment the transport, whether it pulls, and the bytes that it counted into each rank, by pass."""
    found = []
    for plain in experiments:
        spec = Experiment.from_plain(plain)
        work = AttentionWork(me, spec, build(spec))
        transport, received = work.plan.transport, {}
        for which in work.passes:
            transport.bytes_received.clear()
            work.run(which)
            received[which] = dict(transport.bytes_received)
        found.append({"name": transport.name, "pulls": transport.pulls, "received": me.gather(received)})
    return found


def variables(me: Rank, names: list[str]) -> list[list[str | None]]:
    return me.gather([os.environ.get(name) for name in names])


def run_of(me: Rank, experiment: dict[str, Any]) -> dict[str, Any]:
    """A run as the program does it, what every rank says of the settings, and how it is on the others."""
    found = job.run(me, experiment, None)
    found["everyone"] = me.gather([found["experiment"]["options"], found["chosen"]])
    return found


def with_false_ceilings(me: Rank, experiment: dict[str, Any], cache: str) -> dict[str, Any]:
    """What a run says of limits after an earlier world kept ceilings that are a thousandth of what this machine does."""
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), cache
    try:
        dtype = experiment["workload"]["dtype"]
        ceilings._known.clear()  # what an earlier job of this world found
        true = ceilings.ceilings(me, dtype)
        if me.rank == 0:
            (path,) = ceilings.cache_folder().glob("ceilings-*.json")
            kept = json.loads(path.read_text())
            path.write_text(json.dumps(kept | {name: kept[name] / 1000 for name in ceilings.RATES}))
        ceilings._known.clear()
        ceilings._again.clear()
        me.barrier()
        found = job.run(me, experiment, None)
        again = job.run(me, experiment, None)
        ceilings._again.clear()
        with memory_limit(me, 0.01):
            ceilings.again(me, dtype)
    finally:
        ceilings._known.clear()
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    kept = json.loads(path.read_text()) if me.rank == 0 else None
    return {
        "true": true,
        "again": sorted(ceilings._again),
        "kept": kept,
        "runs": [{key: x[key] for key in ("ceilings", "metrics")} for x in (found, again)],
    }


def by_trial(
    me: Rank, slowed: str | None = None, broken: tuple[str, ...] = (), graphs: bool | str = False, **given: Any
) -> list[dict[str, Any]]:
    """What auto takes by trial on each rank, where executors may be slow, or fail before they exchange anything."""
    executors = attention.executors.EXECUTORS
    before = dict(executors)

    def slow(*args: Any) -> Any:
        time.sleep(0.25)
        return before[slowed].forward(*args)

    def fail(*args: Any) -> Any:
        raise attention.UnsupportedCall("broken here")

    for name, forward in [(slowed, slow)] * (slowed is not None) + [(name, fail) for name in broken]:
        executors[name] = type("Other", (), {"forward": staticmethod(forward), "backward": before[name].backward})
    random = torch.get_rng_state() if me.device.type == "cpu" else torch.cuda.get_rng_state()
    try:
        with torch.no_grad():
            fn = attention.make("auto", graphs=graphs, device=me.device, **given)
    finally:
        executors.update(before)
    assert fn.choice is not None
    after = torch.get_rng_state() if me.device.type == "cpu" else torch.cuda.get_rng_state()
    return me.gather({"variant": fn.variant.name, "random": bool(torch.equal(random, after)), **fn.choice.plain()})


def phase_names(me: Rank, name: str) -> list[str]:
    from attention.profiling import Recorder, recording

    fn = attention.make(name)
    q, k, v = (fn.shard(torch.randn(1, 16 * me.world, 4, 16)).requires_grad_() for _ in range(3))
    with recording(Recorder(me.device)) as recorder:
        fn(q, k, v, causal=True).sum().backward()
    return sorted({span.name for span in recorder.spans})


def echo(me: Rank, value: Any) -> list[Any]:
    return me.gather(value)


def pids(me: Rank) -> list[int]:
    return me.gather(os.getpid())


def parents(me: Rank) -> list[int]:
    return me.gather(os.getppid())


def starts_a_process(me: Rank, how: str) -> list[int | None]:
    process = multiprocessing.get_context(how).Process(target=sys.exit, args=(7,))
    process.start()
    process.join(20)
    code = process.exitcode
    process.kill()
    return me.gather(code)


def refuse(me: Rank) -> None:
    raise UnsupportedHere("not here")


def fail_on(me: Rank, rank: int) -> None:
    me.say("working")
    if me.rank == rank:
        raise RuntimeError("the disk of this rank fell over")
    me.barrier()


def stop(me: Rank, rank: int) -> None:
    me.say("working")
    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    me.barrier()


def hold_a_named_semaphore(me: Rank) -> list[str]:
    """Its file, on every rank: only multiprocessing's tracker removes it if the rank is killed."""
    import multiprocessing

    semaphore = multiprocessing.get_context("spawn").Semaphore()
    _held.append(semaphore)
    return me.gather(f"/dev/shm/sem.{semaphore._semlock.name[1:]}")


_held: list[Any] = []


def sleep_on(me: Rank, rank: int, seconds: float, stack_after_s: float | None = None) -> None:
    """stack_after_s: how long that rank takes to write its stack, as on a busy machine."""

    def late(*_: Any) -> None:
        assert stack_after_s is not None
        time.sleep(stack_after_s)
        faulthandler.dump_traceback(all_threads=True)

    me.say("working")
    if me.rank == rank:
        if stack_after_s is not None:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, late)
        time.sleep(seconds)
    me.barrier()


def hoard(me: Rank, gigabytes: float) -> None:
    from runner.launch.rank import memory_limit

    me.say("working")
    with memory_limit(me, gigabytes):
        kept = [torch.ones(1 << 28, dtype=torch.uint8) for _ in range(int(4 * gigabytes) + 4)]
        me.gather(len(kept))


def finish(me: Rank, fault: str) -> int:
    """Ends without another collective."""
    me.fault = fault
    me.say("finish")
    return me.rank


def meet(me: Rank, fault: str) -> None:
    torch.set_num_threads(8)  # which have yet to start
    me.fault = fault
    me.say("timing")
    me.synchronize()
    me.gather(me.rank)


def many_calls(me: Rank, name: str, calls: int, transport: str, kernel: str = "auto") -> dict[str, Any]:
    """Forward and backward over changing shapes, a new function every hundred calls: the largest error of some of them,
    the symmetric memory held after a tenth of the calls and at the end, on a GPU what is allocated then, and files in memory left
    open. With a kernel that is given, in its dtype."""
    from attention.transports import held_bytes

    errors, held, allocated = [], [], []
    dtype, head_dim = (torch.float32, 16) if kernel == "auto" else (torch.bfloat16, 64)
    for i in range(calls):
        if i % 100 == 0:
            fn = attention.make(name, kernel=kernel, transport=transport)
        tokens, heads = 8 * me.world * (1 + i % 5), 4
        generator = torch.Generator().manual_seed(i)
        q, k, v = (
            torch.randn(1 + i % 2, tokens, heads, head_dim, generator=generator).to(me.device, dtype).requires_grad_()
            for _ in range(3)
        )
        out = fn.unshard(fn(*(fn.shard(x) for x in (q, k, v)), causal=True))
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        if i % 50 == 0 or i % 37 == 36:  # of every shape
            exact = KERNELS["math"].forward(
                q.double(), k.double(), v.double(), _call(Mask.of(True), None, head_dim, me.device)
            )
            errors += [rel(out, exact[0]), 0.0 if gradients[0].isfinite().all() else 1.0]
        if i in (calls // 10 - 1, calls - 1):
            held.append(held_bytes())
            q = k = v = out = gradients = exact = None
            gc.collect()
            allocated.append(torch.cuda.memory_allocated() if me.device.type == "cuda" else 0)
    left = _memory_files()
    return {"error": max(me.gather(max(errors))), "held": held, "allocated": allocated, "files": left}


def two_groups(me: Rank, transport: str) -> float:
    """Two functions over two groups that each rank is in, called in turn: the largest error."""
    rows = [dist.new_group(list(range(i, me.world, 2))) for i in range(2)]
    columns = [dist.new_group([i, i + 1]) for i in range(0, me.world, 2)]
    fns = [
        attention.make("zigzag", group=rows[me.rank % 2], transport=transport),
        attention.make("zigzag_llama3", group=columns[me.rank // 2], transport=transport),
    ]
    errors = []
    for i in range(6):
        outs = []
        for fn in fns:
            generator = torch.Generator().manual_seed(i)
            q, k, v = (torch.randn(1, 16 * fn.world, 4, 16, generator=generator).to(me.device) for _ in range(3))
            outs.append((fn, fn(*(fn.shard(x) for x in (q, k, v)), causal=True)))
            exact = KERNELS["math"].forward(
                q.double(), k.double(), v.double(), _call(Mask.of(True), None, 16, me.device)
            )
        errors += [rel(fn.unshard(out), exact[0]) for fn, out in outs]
    return max(me.gather(max(errors)))


def after_an_exception(me: Rank, name: str, transport: str, before: str | None = None) -> float:
    """The error of a call that follows ones in which the kernel of every rank raised half-way, forward and backward; behind one of
    the variant `before`, if one is given, which leaves nothing of them."""
    fn = attention.make(name, transport=transport)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16 * me.world, 4, 16, generator=generator).to(me.device) for _ in range(3))
    local = [fn.shard(x).requires_grad_() for x in (q, k, v)]
    fn(*local, causal=True)
    kernel = fn.plan(*local, causal=True).kernel

    class Failing:
        align = 1

        def forward(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("half-way")

        backward = forward

    for _ in range(3):
        whole = fn(*local, causal=True)
        for plan in fn.plans.values():
            object.__setattr__(plan, "kernel", Failing())
        for fails in (lambda: fn(*local, causal=True), whole.sum().backward):
            try:
                fails()
            except RuntimeError as error:
                assert "half-way" in str(error)
        for plan in fn.plans.values():
            object.__setattr__(plan, "kernel", kernel)
    exact, _ = KERNELS["math"].forward(q.double(), k.double(), v.double(), _call(Mask.of(True), None, 16, me.device))
    errors = []
    if before is not None:
        other = attention.make(before, transport=transport)
        lanes = other._transport(me.device).pool.lanes.values()
        assert any(lane.filling for lane in lanes)
        errors.append(rel(other.unshard(other(*(other.shard(x) for x in (q, k, v)), causal=True)), exact))
        assert not any(lane.filling for lane in lanes)
    errors.append(rel(fn.unshard(fn(*local, causal=True)), exact))
    return max(me.gather(max(errors)))


def bitwise(me: Rank, name: str, kernel: str, transport: str) -> bool:
    """Whether out and gradients are the same bits in every one of five calls, with deterministic=True."""
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


def own_apart(
    me: Rank, name: str, options: dict[str, Any], kernel: str, packed: bool = False, dtype: str = "bfloat16"
) -> float:
    """The largest difference that a backward with a rank's own keys apart, or of the last group of heads last, has to one with
    them first, be the calls on the own keys late or the others, with NaN in all memory that is free."""
    from attention.geometry import costs

    def make(**more: Any) -> Any:
        return attention.make(name, kernel=kernel, transport="symm", **{**options, **more})

    fn = make()
    cuda = me.device.type == "cuda"
    local = KERNELS[kernel]
    tokens, head_dim = (512 if cuda else 64) * me.world, 64 if cuda else 16
    packs = [0, tokens // 4, tokens // 2, tokens] if packed else None
    state: dict[str, bool | None] = {
        "late": None
    }  # the calls on one's own keys, which have an edge of the mask, or the others

    def backward(*tensors: torch.Tensor, **how: Any) -> Any:
        call = next(x for x in tensors if isinstance(x, Call))
        if cuda and state["late"] == (not call.mask.full):
            torch.cuda._sleep(4_000_000)
        grads = original(*tensors, **how)
        _spoil(me.device)
        return grads

    def behind() -> Any:
        nonlocal behinds
        behinds += 1
        return type(front).behind(front)

    differences, behinds = [], 0
    at_once, halves = (
        ({"head_parts": 1}, {"head_parts": 2})
        if fn.variant.exchange == "ring"
        else ({"heads_k_stride": None}, {"heads_k_stride": 2})
    )
    front = fn._transport(me.device).front
    original, threshold = local.backward, costs.APART
    try:
        local.backward, front.behind = backward, behind  # type: ignore[method-assign]
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            shapes = [(*(() if packed else (1,)), tokens, heads, head_dim) for heads in (8, 4, 4, 8)]
            q, k, v, dout = (
                fn.shard(torch.randn(shape, generator=generator).to(me.device, getattr(torch, dtype)), packs)
                for shape in shapes
            )
            expected: list[torch.Tensor] = []
            ways = [(threshold, {}, late) for late in (None, True, False)] + [
                (0, halves, late) for late in (None, True, False)
            ]
            for apart, more, late in [(0, at_once, None), *ways]:
                costs.APART, state["late"] = apart, late
                fn = make(**more)  # which its plans are decided for once
                given, before = [x.clone().requires_grad_() for x in (q, k, v)], behinds
                found = torch.autograd.grad(fn(*given, causal=True, cu_seqlens=packs), given, dout)
                _spoil(me.device)
                assert any(me.gather(behinds > before)) == (apart > 0), "the own keys were to be apart"
                if not expected:
                    expected = [x.clone() for x in found]
                differences += [rel(a, b) for a, b in zip(found, expected, strict=True)]
    finally:
        del local.backward, front.behind
        costs.APART = threshold
    return max(me.gather(max(differences)))


def _spoil(device: torch.device) -> None:
    """NaN in memory that is free."""
    for size in (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22):
        torch.full((size,), torch.nan, device=device)


def _unplayed(fn: Any, *tensors: torch.Tensor, **given: Any) -> None:
    fn.plan(*tensors, **given).__dict__["playable"] = False


def _tapes(fn: Any) -> tuple[list[bool], list[Any]]:
    """Whether there is a tape, of each plan's passes that were to be played by name; and why recordings gave none."""
    from attention.runtime.launch_trace import Tape

    found: dict[tuple[Any, ...], bool] = {}
    why = []
    for number, plan in enumerate(fn.plans.values()):
        for (name, *_), x in plan.launches.tapes.items():
            found[number, name] = found.get((number, name), False) or isinstance(x, Tape)
            if x and not isinstance(x, Tape):
                why.append((number, name, x))
    return list(found.values()), why


def played(
    me: Rank, name: str, options: dict[str, Any], running: int | None, packed: bool, kv_heads: int
) -> dict[str, Any]:
    """Training and calls without gradients, of two shapes (or packs, one of many sequences), of contiguous tensors and of parts of
    one, on two streams, by a function whose passes are played (but on the rank `running`) and by one whose passes are run, in turn,
    with NaN in all memory that is free: the largest difference of an out, of a gradient, and the tapes of each rank."""
    plain, fn = (attention.make(name, kernel="flash4", transport="symm", **options) for _ in range(2))
    side = torch.cuda.Stream()
    outs, gradients = [0.0], [0.0]
    for i in range(108):  # most forms thrice at least, the first two times of which are run
        generator = torch.Generator().manual_seed(i)
        n = (256 if i % 6 == 5 else 512) * me.world
        given: dict[str, Any] = {}
        if packed:
            lengths = [2 * me.world] * 512 if i % 6 == 5 else [n // 4, n // 2, n // 4]
            given["cu_seqlens"] = (0, *accumulate(lengths))
            n = sum(lengths)
        whole, dout = (
            torch.randn(1, n, h, 64, generator=generator).to(me.device, torch.bfloat16) for h in (8 + 2 * kv_heads, 8)
        )
        if packed:
            whole, dout = whole[0], dout[0]
        local, dout = fn.shard(whole, **given), fn.shard(dout, **given)
        given["causal"] = True
        results = []
        for each in (plain, fn):
            leaf = local.clone().requires_grad_()
            parts = list(leaf.split((8, kv_heads, kv_heads), -2))
            if i % 5 > 1:
                parts = [x.contiguous() for x in parts]
            if each is plain or me.rank == running:
                _unplayed(each, *parts, **given)
                with torch.no_grad():
                    _unplayed(each, *parts, **given)
            stream = side if i % 8 > 5 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            _spoil(me.device)
            with torch.cuda.stream(stream):
                if i % 4 == 3:
                    with torch.no_grad():
                        found = [each(*parts, **given)]
                else:
                    out = each(*parts, **given)
                    _spoil(me.device)
                    found = [out, *torch.autograd.grad(out, [leaf], dout)]
                _spoil(me.device)
            torch.cuda.current_stream().wait_stream(stream)
            results.append([x.detach().clone() for x in found])
            side.wait_stream(torch.cuda.current_stream())  # the results' memory is that stream's
        differences = [rel(x, wanted) for wanted, x in zip(*results, strict=True)]
        outs.append(differences[0])
        gradients += differences[1:]
    differences = [max(me.gather(max(x))) for x in (outs, gradients)]
    return {"out": differences[0], "gradient": differences[1], "tapes": me.gather(_tapes(fn))}


def played_after_an_exception(me: Rank, name: str) -> float:
    """The largest difference that a played pass has to the first, behind passes that ended on rank 1 for want of memory."""
    fn = attention.make(name, kernel="flash4", transport="symm")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 512 * me.world, h, 64, generator=generator) for h in (8, 4, 4, 8)]
    q, k, v, dout = (fn.shard(x.to(me.device, torch.bfloat16)) for x in whole)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    allocate = torch.empty_strided

    def failing(after: int) -> Any:
        def empty_strided(*args: Any, **options: Any) -> torch.Tensor:
            nonlocal after
            after -= 1
            if after < 0:
                raise torch.OutOfMemoryError("half-way")
            return allocate(*args, **options)

        return empty_strided

    differences = []
    expected: list[torch.Tensor] = []
    for after in (None, None, None, None, 0, 2, 1, None, 3):
        for backward in (False, True) if after is not None else ():
            out = fn(*inputs, causal=True) if backward else None
            if me.rank == 1:
                torch.empty_strided = failing(after)
            try:
                found = fn(*inputs, causal=True) if out is None else torch.autograd.grad(out, inputs, dout)
            except torch.OutOfMemoryError:
                found = None
            finally:
                torch.empty_strided = allocate
            assert (found is None) == (me.rank == 1), "it was to end half-way, on rank 1"
        out = fn(*inputs, causal=True)
        found = [out, *torch.autograd.grad(out, inputs, dout)]
        expected = expected or [x.clone() for x in found]
        differences += [rel(x, wanted) for wanted, x in zip(expected, found, strict=True)]
    tapes, _ = _tapes(fn)
    assert tapes and all(tapes)
    return max(me.gather(max(differences)))


def after_a_broken_capture(me: Rank, name: str) -> float:
    """The largest difference that launched passes have to the first, behind a backward whose capture the kernel broke on every rank,
    with the room for an offer taken."""
    launched, captured = (
        attention.make(name, kernel="flash2", transport="symm", graphs=graphs) for graphs in (False, True)
    )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 512 * me.world, h, 64, generator=generator) for h in (8, 4, 4, 8)]
    q, k, v, dout = (launched.shard(x.to(me.device, torch.bfloat16)) for x in whole)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def passes(fn: attention.ContextParallel) -> list[torch.Tensor]:
        out = fn(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    expected = [x.clone() for x in passes(launched)]
    kernel = launched.plan(*inputs, causal=True).kernel

    class Breaking:
        align = 1

        name = kernel.name

        def forward(self, *args: Any, **options: Any) -> Any:
            return kernel.forward(*args, **options)

        def backward(self, *args: Any, **options: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("half-way in a capture")
            return kernel.backward(*args, **options)

    differences = []
    for _ in range(2):
        found = passes(captured)
        for plan in captured.plans.values():
            object.__setattr__(plan, "kernel", Breaking())
        try:
            found = passes(captured)  # is right as it is run, and then captured
        except attention.UnsupportedCall as error:
            assert "half-way in a capture" in str(error)
        else:
            raise AssertionError("the backward was to be captured")
        left = [lane.filling for lane in launched._transport(me.device).pool.lanes.values() if lane.filling]
        assert left and all(each.captured for each in left), "no offer's room was taken"
        for _ in range(3):
            found = passes(launched)
            differences += [rel(x, wanted) for wanted, x in zip(expected, found, strict=True)]
        assert not any(lane.filling for lane in launched._transport(me.device).pool.lanes.values())
        captured = attention.make(name, kernel="flash2", transport="symm", graphs=True)
    return max(me.gather(max(differences)))


def after_a_release(me: Rank, transport: str) -> float:
    """The error of a living function's call after the symmetric memory was given back."""
    from attention.transports import held_bytes, release

    fn = attention.make("zigzag", transport=transport)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16 * me.world, 4, 16, generator=generator).to(me.device) for _ in range(3))
    local = [fn.shard(x) for x in (q, k, v)]
    fn(*local, causal=True)
    assert held_bytes() > 0
    me.barrier()
    release()
    assert held_bytes() == 0
    me.barrier()
    out = fn.unshard(fn(*local, causal=True))
    exact, _ = KERNELS["math"].forward(q.double(), k.double(), v.double(), _call(Mask.of(True), None, 16, me.device))
    return max(me.gather(rel(out, exact)))


def replayed(me: Rank, name: str, transport: str) -> float:
    """Calls of a function and replays of a CUDA graph of it, in turn and behind other work: the largest error of either."""
    decode = name == "tree"
    fn = attention.make(name, transport=transport, kernel="auto" if decode else "flash2")
    generator = torch.Generator().manual_seed(0)
    lengths = (3 if decode else 512 * me.world, 512 * me.world, 512 * me.world)
    q, k, v = (torch.randn(1, n, 4, 64, generator=generator).to(me.device, torch.bfloat16) for n in lengths)
    local = [fn.shard(x, role=role) for x, role in zip((q, k, v), ("q", "kv", "kv"), strict=True)]
    mask = Mask.of(not decode)
    wanteds = []
    for sign in (1, -1):  # of the queries that each other call and replay has
        exact, _ = KERNELS["math"].forward(sign * q.double(), k.double(), v.double(), _call(mask, None, 64, me.device))
        wanteds.append(exact if decode else fn.shard(exact))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn(*local, causal=not decode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = fn(*local, causal=not decode)
    busy = torch.randn(8192, 8192, device=me.device)
    errors = []
    for i in range(12):
        if i % 3 == me.rank % 3:
            busy = (busy @ busy).clamp_(-1, 1)
        graph.replay()
        if i % 2:
            errors.append(rel(fn(*local, causal=not decode), wanteds[i // 2 % 2]))
        errors.append(rel(captured, wanteds[i // 2 % 2]))
        if i % 2:
            torch.cuda.synchronize()
            local[0].neg_()
    return max(me.gather(max(errors)))


def replayed_passes(me: Rank, name: str, kernel: str) -> dict[str, Any]:
    """Training of two layers, with activation checkpoints, without gradients, in inference mode, of two shapes and from strided
    tensors, by a function that replays graphs and by one that doesn't, in turn, with the symmetric memory given back in
    between: the largest relative difference of any out or gradient, how many graphs there are at the end, and how many tapes of
    passes that were launched beside them."""
    from torch.utils.checkpoint import checkpoint

    from attention.runtime.launch_trace import Tape
    from attention.transports import release

    plain, replayed = (attention.make(name, transport="symm", kernel=kernel, graphs=graphs) for graphs in (False, True))
    differences = []
    for i in range(24):
        generator = torch.Generator().manual_seed(i)
        n = (256 if i % 5 == 4 else 512) * me.world
        layers = [torch.randn(1, n, 8, 64, generator=generator).to(me.device, torch.bfloat16) for _ in range(2)]
        layers = [plain.shard(x) for x in layers]
        results = []
        for fn in (plain, replayed):
            leaves = [x.clone().requires_grad_() for x in layers]
            inputs = [x.split((4, 2, 2), 2) for x in leaves]
            if i % 4 == 2:
                with torch.inference_mode(i % 8 == 2), torch.no_grad():
                    results.append([fn(*x, causal=True).clone() for x in inputs])
                continue
            if i % 4 == 3:
                outs = [checkpoint(fn, *x, causal=True, use_reentrant=False) for x in inputs]
            else:
                outs = [fn(*x, causal=True) for x in inputs]
            loss = sum((out * out.detach()).sum() for out in outs)
            results.append([*outs, *torch.autograd.grad(loss, leaves)])
        differences += [rel(x, wanted) for wanted, x in zip(*results, strict=True)]
        if i == 8:
            me.barrier()
            release()
            me.barrier()
    graphs = sum(graph is not None for graph in replayed.replays.graphs.values())
    every = [each for plan in plain.plans.values() for each in plan.launches.tapes.items()]
    beside = sum(isinstance(x, Tape) and state[1] for (_, state, *_), x in every)
    return {"difference": max(me.gather(max(differences))), "graphs": graphs, "tapes": beside}


def left_waiting(me: Rank, doing: str, which: str, limit_s: float) -> list[dict[str, Any]]:
    """By rank, what its calls over `symm` raise and after how many seconds, and the same of the call behind that, where rank 1 takes
    part in a forward, backward or decode (`which`) once, and then `doing`: raises half-way, hangs, or calls something else."""
    group = dist.new_group(list(range(me.world)), timeout=timedelta(seconds=100))
    fn = attention.make("ring_decode" if which == "decode" else "zigzag", group=group, transport="symm")
    other = attention.make("ulysses", group=group, transport="symm")
    x = [torch.randn(1, 8, 4, 16, device=me.device).requires_grad_(which == "backward") for _ in range(3)]
    out: list[torch.Tensor] = []

    def prepare() -> None:
        out[:] = [fn(*x, causal=True)] if which == "backward" else []

    def call() -> None:
        if which == "backward":
            torch.autograd.grad(out[0].sum(), x, retain_graph=True)
        else:
            fn(*x, causal=which == "forward")

    def mistaken() -> None:
        if doing == "raises":
            for plan in fn.plans.values():
                object.__setattr__(plan, "kernel", Absent("absent", "", "gone half-way"))
            with suppress(attention.UnsupportedCall):
                call()
        elif doing == "calls_another":
            other(*x)

    def until_told(run: Callable[[], None], times: int = 3) -> tuple[str, float]:
        start = time.perf_counter()
        try:
            for _ in range(times):  # the first may still find all that it needs
                run()
        except RuntimeError as error:
            return str(error), time.perf_counter() - start
        return "", time.perf_counter() - start

    prepare()
    call()
    other(*x)
    prepare()
    me.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)
    first = until_told(call) if me.rank != 1 else until_told(mistaken, 3 if doing == "calls_another" else 1)
    again = until_told(call) if me.rank != 1 else ("", 0.0)
    return me.gather({"first": first, "again": again})


def growing_apart(me: Rank) -> list[str]:
    """What each rank is told where their first calls want different amounts of memory."""
    group = dist.new_group(list(range(me.world)))
    fn = attention.make("ring", group=group, transport="symm")
    x = [torch.randn(1, 8 if me.rank else 4096, 4, 16, device=me.device) for _ in range(3)]
    try:
        fn(*x)
    except RuntimeError as error:
        return me.gather(str(error))
    return me.gather("")


def without_shared_memory(me: Rank, failing: int) -> dict[str, Any]:
    """A function made while one rank can open no further file: what each rank says of its transport, the error of its call
    over a transport that stands in, and that of a group made later, whose ranks can all open files again."""
    groups = [dist.new_group(list(range(me.world))) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    fns = [attention.make("zigzag", group=group, transport="symm") for group in groups]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16 * me.world, 4, 16, generator=generator) for _ in range(3))
    local = [fns[0].shard(x) for x in (q, k, v)]
    exact, _ = KERNELS["math"].forward(q.double(), k.double(), v.double(), _call(Mask.of(True), None, 16, me.device))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if me.rank == failing:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        note = fns[0].plan(*local, causal=True).transport.note
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    errors = [rel(fn.unshard(fn(*local, causal=True)), exact) for fn in fns]
    return {
        "notes": me.gather(note),
        "later": me.gather(fns[1].plan(*local, causal=True).transport.note),
        "error": max(me.gather(max(errors))),
    }


def _memory_files() -> int:
    """How many files in memory of ours this process has open."""
    from attention.transports.fabric import MEMORY_FILE

    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(f"/memfd:{MEMORY_FILE}" in link for link in links)


def outgrown(me: Rank, failing: int) -> dict[str, Any]:
    """A call whose shared memory cannot grow on one rank: what every rank raises, the error of the next call and the files
    left behind."""
    before = _memory_files()
    group = dist.new_group(list(range(me.world)))
    dist.barrier(group)
    fn = attention.make("ring", group=group, transport="symm")
    generator = torch.Generator().manual_seed(0)
    small, large = (torch.randn(3, 1, n * me.world, 4, 64, generator=generator) for n in (8, 1024))
    fn(*(fn.shard(x) for x in small))
    local = [fn.shard(x) for x in large]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = "nothing"
    if me.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        fn(*local)
    except RuntimeError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out = fn.unshard(fn(*local))
    exact, _ = KERNELS["math"].forward(*large.double(), _call(Mask(), None, 64, me.device))
    me.barrier()
    return {
        "said": me.gather(said),
        "error": max(me.gather(rel(out, exact))),
        "files": max(me.gather(_memory_files() - before)),
    }


def growing(me: Rank, name: str, options: dict[str, Any], transport: str, most: int) -> dict[str, Any]:
    """A decode whose keys grow by one at a time: the largest error of out and lse, the plans kept, the schedules built for
    them, and the lengths at which a plan is not what its schedule says."""
    from attention.executors.plan import plan_steps
    from attention.geometry.schedules import steps

    fn = attention.make(name, transport=transport, **options)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 32, generator=generator).to(me.device) for n, h in ((2, 4), (most, 2), (most, 2)))
    call = _call(Mask(), None, 32, me.device)

    def local(n: int) -> list[torch.Tensor]:
        return [q, *(fn.shard(x[:, :n], role="kv") for x in (k, v))]

    steps.cache_clear()
    errors = []
    for n in range(1, most + 1):
        out, lse = fn(*local(n), kv_tokens=n, return_lse=True)
        exact, exact_lse = KERNELS["math"].forward(q.double(), k[:, :n].double(), v[:, :n].double(), call)
        errors += [rel(out, exact), rel(lse, exact_lse)]
    built, kept = steps.misses, len(fn.plans)
    wrong = []
    for n in (*range(1, most + 1), *range(most, 0, -1)):
        plan = fn.plan(*local(n), kv_tokens=n)
        problem = fn.variant.problem((0, n), me.world, Mask(), fn.options, 2)
        said = plan_steps(problem, me.rank, plan.scale, False, False, me.device)
        if plan.problem != problem or list(map(_without_calls, plan.steps)) != list(map(_without_calls, said)):
            wrong.append(n)
    return {"error": max(me.gather(max(errors))), "kept": kept, "built": built, "wrong": me.gather(wrong)}


def _without_calls(step: Any) -> tuple[Any, ...]:
    """A step but for the identity of its kernel calls."""
    calls = [(each.q, each.k, each.call.scale, each.call.mask) for each in step.calls]
    return step.owner, step.keys, step.n_keys, calls, step.route, step.most


def shared_reference(me: Rank, experiment: dict[str, Any], pieces: int) -> list[dict[str, Any]]:
    """The pieces that this rank compares of a reference which the ranks share, and how far each tensor lies from one that
    is computed alone."""
    spec = Experiment.from_plain(experiment)
    limit = 1e-12 if pieces == 1 else 1e9  # the least that can be checked, or everything
    backward = spec.mode == "forward_backward"
    mine, _, shared = correctness.pieces_of(spec.workload, me.world, me.rank, limit, backward)
    correctness._share_reference(me, spec, mine, shared, torch.float64)
    found: dict[str, Any] = {"shared": shared, "tokens": [], "errors": {}}
    for piece in mine:
        inputs = correctness.piece_inputs(spec.workload, piece, spec.seed, me.device, backward)
        alone = correctness._reference(inputs, spec, torch.float64)
        found["tokens"] += [[piece.batch, piece.head, token] for a, b in piece.rows or () for token in range(a, b)]
        shared = piece.reference
        assert shared is not None and shared.values.keys() == alone.values.keys()
        for kind, mine, whole in (("", shared.values, alone.values), (" squared scale", shared.squares, alone.squares)):
            found["errors"] |= {name + kind: rel(x, piece.mine(whole[name])) for name, x in mine.items()}
    return me.gather(found)


def trained_after_inference(me: Rank, name: str, transport: str) -> float:
    """The first call of a group under inference mode, then a training step: how far its output and gradients are from those
    of another group's, which never saw that mode."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 32 * me.world, 4, 64, generator=generator).to(me.device) for _ in range(3)]
    if me.device.type == "cuda":
        whole = [x.bfloat16() for x in whole]
    found = []
    for inferring in (True, False):
        fn = attention.make(name, group=dist.new_group(list(range(me.world))), transport=transport)
        q, k, v = (fn.shard(x) for x in whole)
        if inferring:
            with torch.inference_mode():
                fn(q, k, v, causal=True)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = fn(*inputs, causal=True)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)])
    return max(me.gather(max(rel(x, y) for x, y in zip(*found, strict=True))))


def checked_again(me: Rank, experiment: dict[str, Any]) -> list[list[Any]]:
    """Three checks of one workload, before the last of which rank 1 lost what it kept: whether each passed, its error, and how
    many references this rank computed for it."""
    spec = Experiment.from_plain(experiment)
    work = AttentionWork(me, spec, build(spec))
    plain, counted = correctness._reference, [0]

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return plain(*args)

    correctness._references.clear()
    correctness._reference = counting
    found = []
    try:
        for last in (False, False, True):
            if last and me.rank == 1:
                correctness._references.clear()
            counted[0] = 0
            checked = correctness.check(me, spec, work).found
            found.append([checked["passed"], checked["tensors"]["dk"]["rel_l2"], counted[0]])
    finally:
        correctness._reference = plain
    return me.gather(found)


def backward_here(me: Rank, experiment: dict[str, Any]) -> bool:
    """Whether a timed backward runs in the thread that asks for it."""
    spec = Experiment.from_plain(experiment)
    work = AttentionWork(me, spec, build(spec))
    threads: list[int] = []
    work.q.register_hook(lambda _: threads.append(threading.get_ident()))
    for which in work.passes:
        work.run(which)
    assert len(threads) == 1
    return threads == [threading.get_ident()]


def _self_attention(fn: Any, name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of a causal call, or of a decode (out, lse). tensors: q, k, v and dout, or none of it."""
    *qkv, dout = tensors
    if VARIANTS[name].decode:
        return list(fn(*qkv, return_lse=True))
    qkv = [x.detach().requires_grad_() for x in qkv]
    out, lse = fn(*qkv, causal=True, return_lse=True)
    return [out, lse, *torch.autograd.grad(out, qkv, dout)]


def in_strides(me: Rank, names: list[str], forms: list[str], transport: str) -> list[list[Any]]:
    """For each variant and way to lie in memory, the largest difference of its results from those of dense tensors of the
    same values."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "attention"))
    from tests.support.strides import STRIDES

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
    """unshard(shard(x)) == x of token ids, batches' and a packed batch's."""
    ids = torch.arange(2 * 16, device=me.device).view(2, 16)
    same = True
    for name in names:
        fn = attention.make(name, transport=transport)
        same &= bool(torch.equal(fn.unshard(fn.shard(ids)), ids))
        packs = [0, 4, 16]
        same &= bool(torch.equal(fn.unshard(fn.shard(ids[0], packs), packs), ids[0]))
    return all(me.gather(same))


def outside(me: Rank, kinds: list[str]) -> list[str]:
    """What `make` says on rank 1 of a group of rank 0 alone."""
    group = dist.new_group([0])
    said = []
    for name in kinds:
        given = {"tokens": 8, "heads": 2, "head_dim": 16} if name == "auto" else {}
        try:
            attention.make(name, group=group, **given)
        except ValueError as error:
            said.append(str(error))
    return me.gather(said)[1]


def second_derivatives(me: Rank, names: list[str]) -> list[list[Any]]:
    """For each variant, whether the first gradients are the same with create_graph=True, and how others are refused: of each
    input, and of what unshard gathers."""
    found = []
    for name in names:
        fn = attention.make(name, kernel="math")
        torch.manual_seed(0)
        qkv = [fn.shard(torch.randn(1, 8 * me.world, 4, 8)).requires_grad_() for _ in range(3)]
        first = torch.autograd.grad(fn(*qkv, causal=True).square().sum(), qkv)
        again = torch.autograd.grad(fn(*qkv, causal=True).square().sum(), qkv, create_graph=True)
        said = [_refusal(sum(x.square().sum() for x in again), x) for x in qkv]  # type: ignore[arg-type]
        if fn.layout.replicated:
            said.append("create_graph=True: unshard has no second derivative")
        else:
            (grad,) = torch.autograd.grad(fn.unshard(qkv[0]).sum() ** 3, qkv[0], create_graph=True)
            said.append(_refusal(grad.sum(), qkv[0]))
        found.append([name, all(map(torch.equal, first, again)), said])
    return found


def _refusal(loss: torch.Tensor, x: torch.Tensor) -> str:
    try:
        torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
    except attention.UnsupportedCall as error:
        return str(error).split(";")[0]
    return "not refused"


def copied(me: Rank, transport: str) -> dict[str, Any]:
    """Differences of what copies of a function give before and after its first call, what group a deep copy has, and how one
    over a given group refuses to be pickled."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 16, 4, 8) for _ in range(3)]
    group = dist.new_group(list(range(me.world)))
    errors, said = [], ""
    for given in (None, group):
        fn = attention.make("ring", group=given, transport=transport)
        layer = torch.nn.Module()
        layer.fn = fn  # type: ignore[assignment]
        qkv = [fn.shard(x).requires_grad_() for x in whole]
        others = [copy.deepcopy(layer).fn]
        expected = fn(*qkv, causal=True)
        others.append(copy.deepcopy(layer).fn)
        same_group = all(other.group is given for other in others)
        if given is None:
            others.append(pickle.loads(pickle.dumps(layer)).fn)
        else:
            try:
                pickle.dumps(layer)
            except pickle.PicklingError as error:
                said = str(error)
        for other in others:
            found = other(*qkv, causal=True)
            torch.autograd.grad(found, qkv, torch.ones_like(found))
            errors.append(float((found - expected).abs().max()))
    return {"errors": [max(x) for x in zip(*me.gather(errors), strict=True)], "same_group": same_group, "said": said}


def made_alone(me: Rank) -> list[str]:
    """What a call of a function says that was made where there was no process group."""
    fn = attention.make("ring")
    fn.alone = True
    x = torch.zeros(1, 8, 2, 8)
    try:
        fn(x, x, x)
    except ValueError as error:
        return me.gather(str(error))
    return me.gather("")
