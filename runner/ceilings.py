"""This machine's ceilings, measured once and cached with its identity: matrix product rate, copy bandwidth within a
device, and what a rank receives per second from its peers in an all-gather."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from runner import environment
from runner.rank import Rank
from runner.timing import CpuStopwatch, CudaStopwatch
from runner.workpiece import DTYPES


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attention-runner"


def ceilings(me: Rank, dtype: str) -> dict[str, float]:
    """matmul_tflops (in `dtype`, one rank), copy_gb_s (read plus written), link_gb_s (received, in this world)."""
    me.say("ceilings")
    here = environment.of_torch(me.device.type)
    known = [here.get(key) for key in ("torch", "threads", "gpu", "cuda", "nccl")]
    host = environment.host()
    name = hashlib.sha256(json.dumps([known, host["cpu"], host["cores"], me.world, dtype]).encode()).hexdigest()[:16]
    path = cache_folder() / f"ceilings-{name}.json"
    cached = None
    if me.rank == 0 and path.exists():
        try:
            cached = json.loads(path.read_text())
        except ValueError:
            cached = None
    cached = me.agree(cached)
    if cached is not None:
        return cached
    found = {
        "matmul_tflops": min(me.gather(_matmul_tflops(me, DTYPES[dtype]))),
        "copy_gb_s": min(me.gather(_copy_gb_s(me))),
        "measured_at": time.time(),
    }
    if me.world > 1:
        found["link_gb_s"] = min(me.gather(_link_gb_s(me)))
    if me.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps(found))
            path.with_suffix(".tmp").replace(path)
        except OSError:
            pass  # a cache that cannot be written is measured again next time
    return found


def _best_s(me: Rank, run: Callable[[], object], repeats: int, inner: int) -> float:
    """The least time of one call, in seconds, over `repeats` marks around `inner` calls."""
    together = me.world > 1
    watch = (
        CudaStopwatch(me.device, together)
        if me.device.type == "cuda"
        else CpuStopwatch(me.control if together else None)
    )
    run()
    times = []
    for _ in range(repeats):
        watch.align()
        start = watch.mark()
        for _ in range(inner):
            run()
        stop = watch.mark()
        watch.settle()
        times.append(watch.elapsed(start, stop) / inner / 1e3)
    return min(times)


def _matmul_tflops(me: Rank, dtype: torch.dtype) -> float:
    n = 8192 if me.device.type == "cuda" else 768
    a, b = (torch.randn(n, n, device=me.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_s(me, lambda: torch.mm(a, b, out=out), 5, 3) / 1e12


def _copy_gb_s(me: Rank) -> float:
    n = 1 << 30 if me.device.type == "cuda" else 1 << 26
    a = torch.ones(n, dtype=torch.uint8, device=me.device)
    b = torch.empty_like(a)
    return 2 * n / _best_s(me, lambda: b.copy_(a), 5, 2) / 1e9


def _link_gb_s(me: Rank) -> float:
    n = 1 << 27 if me.device.type == "cuda" else 1 << 22
    mine = torch.ones(n, dtype=torch.uint8, device=me.device)
    everything = torch.empty(n * me.world, dtype=torch.uint8, device=me.device)
    seconds = _best_s(me, lambda: dist.all_gather_into_tensor(everything, mine), 5, 2)
    return n * (me.world - 1) / seconds / 1e9
