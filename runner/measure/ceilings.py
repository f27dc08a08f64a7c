"""This machine's ceilings: the rate of a matrix product, the copy bandwidth within a device, and the bandwidth of an
all-gather. Disturbances can only make a measurement too low. So each is repeated until it is steady, the highest value is
kept in a file for this machine, and a run that exceeds it triggers a new measurement."""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner import environment
from runner.launch.rank import Rank
from runner.measure import ceilings_file
from runner.measure.attention_work import DTYPES
from runner.measure.ceilings_file import RATES
from runner.measure.stopwatch import between_marks, stopwatch

STEADY = 0.02  # a measurement ends with a round that is not faster by more than this share
MOST_ROUNDS = 6


@dataclass(frozen=True)
class Sizes:
    """rows: of the square matrices. copied: bytes of the copied tensor. sent: bytes that a rank sends."""

    rows: int
    copied: int
    sent: int
    repeats: int


SIZES = {"cuda": Sizes(8192, 1 << 30, 1 << 27, 5), "cpu": Sizes(768, 1 << 26, 1 << 22, 2)}

_known: dict[tuple[str, int], dict[str, Any]] = {}  # by dtype and world size, in this process
_again: set[tuple[str, int]] = set()  # measured again after a run exceeded them, which is done once


def ceilings(me: Rank, dtype: str) -> dict[str, Any]:
    """matmul_tflops (in `dtype`, one rank), copy_gb_s (read plus written), link_gb_s (received, in a world of several),
    measured_at (Unix time), and `source`: measured, cached, or cached and checked. On a GPU, cached values are checked
    once per world, in some ms, if there is memory for it. Collective."""
    key = dtype, me.world
    me.say("ceilings")
    if key not in _known:
        cached = me.agree(ceilings_file.read(_path(me, dtype)) if me.rank == 0 else None)
        if cached is None:
            _known[key] = _write(me, dtype, _measured(me, dtype) | {"source": "measured"})
        elif me.device.type == "cuda" and _fits(me):
            _known[key] = _write(me, dtype, highest(cached, _measured(me, dtype)) | {"source": "cached and checked"})
        else:
            _known[key] = cached | {"source": "cached"}
    return _known[key]


def again(me: Rank, dtype: str) -> dict[str, Any]:
    """The ceilings after a run that exceeded them: measured again, once per world, with the old ones as `before`; unchanged
    if there is no memory for it. Collective."""
    key = dtype, me.world
    before = ceilings(me, dtype)
    if key not in _again and _fits(me):
        _again.add(key)
        me.say("ceilings")
        found = highest(before, _measured(me, dtype)) | {"source": "measured again"}
        _known[key] = _write(me, dtype, found) | {"before": {name: before[name] for name in RATES if name in before}}
    return _known[key]


def highest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The higher of each rate of two measurements."""
    rates = {name: max(one[name], other[name]) for name in RATES if name in one}
    return {**rates, "measured_at": max(one["measured_at"], other["measured_at"])}


def _path(me: Rank, dtype: str) -> Path:
    facts = environment.host() | environment.of_torch(me.device.type)
    return ceilings_file.path(facts, me.world, dtype)


def _write(me: Rank, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    """Writes `found` to the cache and returns it."""
    if me.rank == 0:
        path = _path(me, dtype)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps({k: x for k, x in found.items() if k != "source"}))
            path.with_suffix(".tmp").replace(path)
        except OSError:
            pass  # a cache that cannot be written is measured again next time
    return found


def _measured(me: Rank, dtype: str) -> dict[str, Any]:
    """The ceilings of the slowest rank, measured now."""
    found = {"matmul_tflops": _matmul_tflops(me, me.agree(_fastest(me, DTYPES[dtype]))), "copy_gb_s": _copy_gb_s(me)}
    if me.world > 1:
        found["link_gb_s"] = _link_gb_s(me)
    return {**found, "measured_at": time.time()}


def _fits(me: Rank) -> bool:
    """Whether every rank has enough free memory to measure."""
    sizes = SIZES[me.device.type]
    try:
        torch.empty(2 * sizes.copied + (me.world + 1) * sizes.sent, dtype=torch.uint8, device=me.device)
        fits = True
    except (RuntimeError, MemoryError):
        fits = False
    return all(me.gather(fits))


def steady(rate: Callable[[], float]) -> float:
    """The highest rate of repeated rounds, until one is not faster by more than `STEADY`; at most `MOST_ROUNDS`."""
    best = rate()
    for _ in range(MOST_ROUNDS - 1):
        found = rate()
        if found <= best * (1 + STEADY):
            return max(best, found)
        best = found
    return best


def _fastest(me: Rank, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the matrix product: fp32 on a CPU where that is faster, since its kernels may compute in fp32."""
    if me.device.type == "cuda" or dtype in (torch.float32, torch.float64):
        return dtype

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(256, 256, dtype=dtype)
        a @ a
        return timeit.timeit(lambda: a @ a, number=1)

    return min((dtype, torch.float32), key=seconds)


def _rate(me: Rank, amount: float, run: Callable[[], object], inner: int) -> float:
    """`amount` per second of a call on the slowest rank, by the best of several marks around `inner` calls each."""
    watch = stopwatch(me, together=me.world > 1)

    def several() -> None:
        for _ in range(inner):
            run()

    def once() -> float:
        run()
        times = []
        for _ in range(SIZES[me.device.type].repeats):
            marks = between_marks(watch, several)
            watch.settle()
            times.append(watch.elapsed(*marks))
        return min(me.gather(amount * inner * 1e3 / min(times)))

    return steady(once)


def _matmul_tflops(me: Rank, dtype: torch.dtype) -> float:
    n = SIZES[me.device.type].rows
    a, b = (torch.randn(n, n, device=me.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _rate(me, 2 * n**3 / 1e12, lambda: torch.mm(a, b, out=out), 3)


def _copy_gb_s(me: Rank) -> float:
    n = SIZES[me.device.type].copied
    a = torch.ones(n, dtype=torch.uint8, device=me.device)
    b = torch.empty_like(a)
    return _rate(me, 2 * n / 1e9, lambda: b.copy_(a), 2)


def _link_gb_s(me: Rank) -> float:
    n = SIZES[me.device.type].sent
    mine = torch.ones(n, dtype=torch.uint8, device=me.device)
    everything = torch.empty(n * me.world, dtype=torch.uint8, device=me.device)
    return _rate(me, n * (me.world - 1) / 1e9, lambda: dist.all_gather_into_tensor(everything, mine), 2)
