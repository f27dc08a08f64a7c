"""This machine's ceilings: the rate of a matrix product, the copy bandwidth within a device, and the bandwidth of an
all-gather. Disturbances can only make a measurement too low. So each is repeated until it is steady, the highest value is
kept in a file for this machine, and a run that exceeds it triggers a new measurement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from runner import environment
from runner.launch.files import write
from runner.launch.rank import Rank
from runner.measure import ceilings_file
from runner.measure.ceilings_file import RATES
from runner.measure.statistics import Fields
from runner.measure.stopwatch import Stopwatch
from runner.measure.workload import DTYPES

STEADY = 0.02  # a measurement ends with a round that is not faster by more than this share
MOST_ROUNDS = 6
AGAIN = "measured again"  # the `source` after a run that exceeded them, which is done once


@dataclass(frozen=True)
class Sizes:
    """rows: of the square matrices. copied: bytes of the copied tensor. sent: bytes that a rank sends."""

    rows: int
    copied: int
    sent: int
    repeats: int


SIZES = {"cuda": Sizes(8192, 1 << 30, 1 << 27, 5), "cpu": Sizes(768, 1 << 26, 1 << 22, 2)}

_known: dict[tuple[str, int], Fields] = {}  # by dtype and world size, in this process


def ceilings(me: Rank, dtype: str, exceeded: bool = False) -> Fields:
    """matmul_tflops (in `dtype`, one rank), copy_gb_s (read plus written), link_gb_s (received, in a world of several),
    measured_at (Unix time), and `source`: measured, or cached. exceeded: by a run. Then they are measured again, once per world; they
    are unchanged if there is no memory for it. Collective."""
    key = dtype, me.world
    me.say("ceilings")
    if key not in _known:
        cached = me.agree(ceilings_file.read(_path(me, dtype)) if me.rank == 0 else None)
        _known[key] = cached | {"source": "cached"} if cached else _measured(me, dtype) | {"source": "measured"}
    elif exceeded and _known[key]["source"] != AGAIN and _fits(me):
        before = {name: rate for name, rate in _known[key].items() if name in RATES}
        _known[key] = _measured(me, dtype, before) | {"source": AGAIN}
    return _known[key]


def _path(me: Rank, dtype: str) -> Path:
    return ceilings_file.path(environment.host() | environment.of_torch(me.device.type), me.world, dtype)


def _measured(me: Rank, dtype: str, least: Mapping[str, float] = {}) -> Fields:
    """The ceilings of the slowest rank, measured now, or the earlier ones where these are higher; also in the cache."""
    rates = {"matmul_tflops": _matmul_tflops(me, DTYPES[dtype]), "copy_gb_s": _copy_gb_s(me)}
    if me.world > 1:
        rates["link_gb_s"] = _link_gb_s(me)
    rates = {name: max(rate, least.get(name, 0.0)) for name, rate in rates.items()} | {"measured_at": time.time()}
    if me.rank == 0:
        path = _path(me, dtype)
        with suppress(OSError):  # a cache that cannot be written is measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, json.dumps(rates))
    return rates


def _fits(me: Rank) -> bool:
    """Whether every rank has enough free memory to measure."""
    sizes, fits = SIZES[me.device.type], False
    with suppress(RuntimeError, MemoryError):
        torch.empty(2 * sizes.copied + (me.world + 1) * sizes.sent, dtype=torch.uint8, device=me.device)
        fits = True
    return all(me.gather(fits))


def _rate(me: Rank, amount: float, run: Callable[[], object], calls: int) -> float:
    """`amount` per second of a call on the slowest rank, by the best of several marks around so many calls each: the highest of
    repeated rounds, until one is not faster by more than `STEADY`; at most `MOST_ROUNDS`."""
    watch, rates = Stopwatch(me), list[float]()

    def several() -> None:
        for _ in range(calls):
            run()

    while len(rates) < 2 or (len(rates) < MOST_ROUNDS and rates[-1] > max(rates[:-1]) * (1 + STEADY)):
        run()
        ms = min(watch.times_ms(several, SIZES[me.device.type].repeats))
        rates.append(min(me.gather(amount * calls * 1e3 / ms)))
    return max(rates)


def _matmul_tflops(me: Rank, dtype: torch.dtype) -> float:
    """In fp32 on a CPU where that is faster than a narrower dtype, since its kernels may compute in fp32."""
    n = SIZES[me.device.type].rows
    narrow_on_cpu = me.device.type == "cpu" and dtype.itemsize < 4
    rates = []
    for kind in (dtype, torch.float32) if narrow_on_cpu else (dtype,):
        a, b = torch.randn(2, n, n, device=me.device).to(kind)
        out = torch.empty_like(a)
        rates.append(_rate(me, 2 * n**3 / 1e12, partial(torch.mm, a, b, out=out), 3))
    return max(rates)


def _copy_gb_s(me: Rank) -> float:
    a, b = torch.ones(2, SIZES[me.device.type].copied, dtype=torch.uint8, device=me.device)
    return _rate(me, 2 * len(a) / 1e9, lambda: b.copy_(a), 2)


def _link_gb_s(me: Rank) -> float:
    mine = torch.ones(SIZES[me.device.type].sent, dtype=torch.uint8, device=me.device)
    everything = mine.repeat(me.world)
    received = len(mine) * (me.world - 1) / 1e9
    return _rate(me, received, lambda: dist.all_gather_into_tensor(everything, mine), 2)
