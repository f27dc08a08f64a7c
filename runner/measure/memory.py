"""The memory that a run takes on each rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from attention import transports
from attention.gpu import cuda_graphs
from runner.measure.timing import iterate
from runner.measure.workload import Passes
from runner.record.fields import RankMemory

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
FRESH, USUAL = 64 << 10, 32 << 20  # bytes from which an allocation has its own pages: here, and in glibc by default


def empty_caches(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Resets the peaks of a GPU."""
    empty_caches(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def of_gpu(device: torch.device, inputs: int) -> RankMemory:
    """Bytes since `reset_peak`: what PyTorch can still have, its peaks, symmetric memory (outside its allocator), and the pools of CUDA graphs."""
    return RankMemory(
        free=torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(),
        peak_allocated=torch.cuda.max_memory_allocated(),
        peak_reserved=torch.cuda.max_memory_reserved(),
        symmetric=transports.held_bytes(),
        graphs=cuda_graphs.held_bytes(device),
        inputs=inputs,
    )


def of_cpu(work: Passes, inputs: int) -> RankMemory:
    """The peak of one iteration in bytes: the inputs plus the growth of the process, without the interpreter, libraries and
    caches. Each tensor gets fresh pages, since reused memory of earlier runs would not count as growth."""
    gc.collect()
    with _fresh_pages():
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status_bytes("VmRSS")
        iterate(work)
        return RankMemory(peak_resident=inputs + _status_bytes("VmHWM") - before, inputs=inputs)


@contextlib.contextmanager
def _fresh_pages() -> Iterator[None]:
    c = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        c.mallopt(MMAP_THRESHOLD, FRESH)
        c.malloc_trim(0)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            c.mallopt(MMAP_THRESHOLD, USUAL)
            c.mallopt(TRIM_THRESHOLD, 2 * USUAL)


def _status_bytes(key: str) -> int:
    """An entry of this process's status, such as VmRSS or its peak, VmHWM."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
