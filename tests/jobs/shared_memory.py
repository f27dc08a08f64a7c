"""Jobs over symmetric memory: its reuse, errors and limits."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import attention
from attention.kernels import KERNELS, Call, Kernel
from attention.masks.band import CAUSAL, FULL
from runner.launch.rank import Rank
from tests.jobs.reference import drawn, exact, give_kernel, refusal, rel, spoil
from tests.support.cases import Case, compute, wrong


def _whole(me: Rank, tokens: int = 16, head_dim: int = 16, seed: int = 0, batch: int = 1) -> list[torch.Tensor]:
    """q, k and v of so many tokens a rank, the same on every rank."""
    return drawn(me, *[(batch, tokens * me.world, 4, head_dim)] * 3, seed=seed)


def _out(fn: Any, qkv: Any, **how: Any) -> torch.Tensor:
    """The global out of a call of global tensors."""
    return fn.unshard(fn(*map(fn.shard, qkv), **how))


def many_calls(me: Rank, name: str, calls: int, transport: str, kernel: str = "auto") -> dict[str, Any]:
    """Forward and backward over changing shapes, with a new function every hundred calls: the largest error of some of
    them, the symmetric memory after a tenth of the calls, at least ten, and at the end, the GPU memory allocated at both times, and
    the memory files left open. A given kernel runs in its own dtype."""
    from attention.transports import held_bytes

    errors, held, allocated = [], [], []
    dtype, head_dim = (torch.float32, 16) if kernel == "auto" else (torch.bfloat16, 64)
    for i in range(calls):
        if i % 100 == 0:
            fn = attention.make(name, kernel=kernel, transport=transport)
        q, k, v = (x.to(dtype).requires_grad_() for x in _whole(me, 8 * (1 + i % 5), head_dim, i, 1 + i % 2))
        out = _out(fn, (q, k, v), causal=True)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        if i % 50 == 0 or i % 37 == 36:  # of every shape
            reference = exact(q, k, v, CAUSAL)
            errors += [rel(out, reference), 0.0 if gradients[0].isfinite().all() else 1.0]
        if i in (max(10, calls // 10) - 1, calls - 1):  # ten calls have every shape
            held.append(held_bytes())
            q = k = v = out = gradients = reference = None
            gc.collect()
            allocated.append(torch.cuda.memory_allocated() if me.device.type == "cuda" else 0)
    left = memory_files()
    return {"error": max(me.gather(max(errors))), "held": held, "allocated": allocated, "files": left}


def after_an_exception(me: Rank, name: str, transport: str, before: str | None = None) -> float:
    """The error of a call after calls whose kernel raised half-way on every rank, forward and backward. `before`: a
    variant that is called in between, and clears what they left."""
    fn = attention.make(name, transport=transport)
    q, k, v = _whole(me)
    local = [fn.shard(x).requires_grad_() for x in (q, k, v)]
    fn(*local, causal=True)
    kernel = fn.plan(*local, causal=True).kernel

    class Failing:
        align = 1

        def forward(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("half-way")

        backward = attend = gradients = forward

    for _ in range(3):
        whole = fn(*local, causal=True)
        give_kernel(fn, Failing())
        for fails in (lambda: fn(*local, causal=True), whole.sum().backward):
            assert "half-way" in refusal(fails)
        give_kernel(fn, kernel)
    reference = exact(q, k, v, CAUSAL)
    errors = []
    if before is not None:
        other = attention.make(before, transport=transport)
        filling = other.transport(me.device).pool.filling
        assert filling
        errors.append(rel(_out(other, (q, k, v), causal=True), reference))
        assert not filling
    errors.append(rel(fn.unshard(fn(*local, causal=True)), reference))
    return max(me.gather(max(errors)))


def local_kv_apart(
    me: Rank, name: str, options: dict[str, Any], kernel: str, packed: bool = False, dtype: str = "bf16"
) -> list[str | None]:
    """What is wrong with calls whose backward treats the local KV apart (or the last group of heads last) or starts with them. The
    local calls are delayed, or the others, and free memory is filled with NaN."""
    from attention.executors import work

    cuda = me.device.type == "cuda"
    fn, local = attention.make(name, kernel=kernel, transport="symm", **options), KERNELS[kernel]
    tokens = (512 if cuda else 64) * me.world
    lengths = (tokens // 4, tokens // 4, tokens // 2) if packed else None
    # the calls on one's own keys, which have an edge of the mask, or the others
    state: dict[str, bool | None] = {"late": None}

    def backward(*tensors: torch.Tensor, **how: Any) -> Any:
        call = next(x for x in tensors if isinstance(x, Call))
        if cuda and state["late"] == (not call.mask.full):
            torch.cuda._sleep(4_000_000)
        grads = original(*tensors, **how)
        spoil(me.device)
        return grads

    def background() -> Any:
        nonlocal entered
        entered += 1
        return type(priority).background(priority)

    said, entered = [], 0
    option, one, two = ("head_parts", 1, 2) if fn.variant.executor == "ring" else ("heads_k_stride", None, 2)
    priority = fn.transport(me.device).priority_stream
    original, threshold = local.backward, work.APART
    ways: list[tuple[int, dict[str, Any], bool | None]] = [(0, {option: one}, None)]
    ways += [(apart, how, late) for apart, how in ((threshold, {}), (0, {option: two})) for late in (None, True, False)]
    try:
        local.backward, priority.background = backward, background  # type: ignore[method-assign]
        for turn, (apart, more, state["late"]) in enumerate(ways):
            work.APART, before = apart, entered
            case = Case(
                name,
                me.world,
                tokens,
                8,
                4,
                64 if cuda else 16,
                0,
                {**options, **more},
                "symm",
                kernel,
                dtype,
                lengths=lengths,
            )
            results = compute(case, device=me.device)
            said += me.gather(wrong(case, results) if turn % me.world == me.rank else None)
            assert any(me.gather(entered > before)) == (apart > 0), "the local KV was to be apart"
    finally:
        del local.backward, priority.background
        work.APART = threshold
    return said


def after_a_release(me: Rank) -> list[str | None]:
    """By rank, what is wrong with a call after symmetric memory was released."""
    from attention.transports import held_bytes, release

    case = Case("zigzag", me.world, 16 * me.world, 4, 4, 16, 0, transport="symm")
    compute(case)
    assert held_bytes() > 0
    me.barrier()
    release()
    assert held_bytes() == 0
    me.barrier()
    return me.gather(wrong(case, compute(case)))


def left_waiting(me: Rank, doing: str, which: str, limit_s: float) -> list[dict[str, Any]]:
    """By rank, what a call over `symm` raises and after how many seconds, and the same of the next call. Rank 1 takes
    part in one forward or backward (`which`) and then raises half-way, hangs, or calls something else (`doing`)."""
    group = dist.new_group(list(range(me.world)), timeout=timedelta(seconds=100))
    how: dict[str, Any] = {"group": group, "transport": "symm", "agreement": False}
    fn = attention.make("zigzag", **how)
    other = attention.make("ulysses", **how)
    x = [torch.randn(1, 8, 4, 16, device=me.device).requires_grad_(which == "backward") for _ in range(3)]
    out: list[torch.Tensor] = []

    def prepare() -> None:
        out[:] = [fn(*x, causal=True)] if which == "backward" else []

    def call() -> None:
        if which == "backward":
            torch.autograd.grad(out[0].sum(), x, retain_graph=True)
        else:
            fn(*x, causal=True)

    def mistaken() -> None:
        if doing == "raises":
            give_kernel(fn, Kernel())
            with suppress(NotImplementedError):
                call()
        elif doing == "calls_another":
            other(*x)

    def until_told(run: Callable[[], None], times: int = 3) -> tuple[str, float]:
        start = time.perf_counter()
        told = refusal(lambda: [run() for _ in range(times)])  # the first may still find all that it needs
        return told, time.perf_counter() - start

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
    """The messages of the ranks when their first calls need different amounts of memory."""
    group = dist.new_group(list(range(me.world)))
    fn = attention.make("ring", group=group, transport="symm", agreement=False)
    x = torch.randn(1, 8 if me.rank else 4096, 4, 16, device=me.device)
    return me.gather(refusal(lambda: fn(x, x, x)))


def without_shared_memory(me: Rank, failing: int) -> dict[str, Any]:
    """A function made while one rank can open no further file: the note of each rank's transport, the error of a call
    over the transport that replaces it, and the notes of a group made later, when all ranks can open files."""
    groups = [dist.new_group(list(range(me.world))) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    # an agreement would write to the world's store, which is a file
    fns = [attention.make("zigzag", group=group, transport="symm", agreement=False) for group in groups]
    q, k, v = _whole(me)
    local = [fns[0].shard(x) for x in (q, k, v)]
    reference = exact(q, k, v, CAUSAL)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if me.rank == failing:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        note = fns[0].plan(*local, causal=True).transport.note
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    errors = [rel(fn.unshard(fn(*local, causal=True)), reference) for fn in fns]
    return {
        "notes": me.gather(note),
        "later": me.gather(fns[1].plan(*local, causal=True).transport.note),
        "error": max(me.gather(max(errors))),
    }


def memory_files() -> int:
    """The number of this library's memory files that this process has open."""
    from attention.transports.fabric import MEMORY_FILE

    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(f"/memfd:{MEMORY_FILE}" in link for link in links)


def outgrown(me: Rank, failing: int) -> dict[str, Any]:
    """A call whose shared memory cannot grow on one rank: the message of every rank, the error of the next call and the
    number of files left open."""
    before = memory_files()
    group = dist.new_group(list(range(me.world)))
    dist.barrier(group)
    # an agreement would write to the world's store, which is a file, too
    fn = attention.make("ring", group=group, transport="symm", agreement=False)
    small, large = (_whole(me, tokens, 64) for tokens in (8, 1024))
    fn(*(fn.shard(x) for x in small))
    local = [fn.shard(x) for x in large]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if me.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    message = refusal(lambda: fn(*local))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out = fn.unshard(fn(*local))
    reference = exact(*large, FULL)
    me.barrier()
    return {
        "messages": me.gather(message),
        "error": max(me.gather(rel(out, reference))),
        "files": max(me.gather(memory_files() - before)),
    }
