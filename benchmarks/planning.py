"""How long it takes to plan one rank of a large world, on a CPU and with nothing cached.

    python -m benchmarks.planning [--world 1024] [--tokens 8192] [--sequences 1] [VARIANT ...]

Prints for each variant and mask the milliseconds of CPU time of what `ContextParallel.plan` computes for a rank in the middle of the world:
its problem, its steps and their kernel calls, and its messages; and how many steps were built for it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from attention.executors.plan import plan_steps
from attention.geometry import schedules, transfers
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import SEQUENCE, Problem
from attention.kernels.interface import Call
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS


def forget() -> None:
    """Empties all caches of the library."""
    for name, module in list(sys.modules.items()):
        if name.startswith("attention."):
            for each in vars(module).values():
                if hasattr(each, "cache_clear") and not isinstance(each, type):
                    each.cache_clear()


def planned(problem: Problem, rank: int) -> None:
    """What a call computes before its first launch."""
    found = plan_steps(problem, rank, Call(1.0), len(problem.cu_seqlens) > 2, torch.device("cpu"))
    schedules.masks(problem)
    if found[-1].owner == SEQUENCE:
        transfers.gather_move(problem, rank)
    if problem.layout != problem.q_layout and not problem.q_layout.replicated:
        transfers.query_move(problem, rank)


def milliseconds(v: Variant[Any], world: int, cu_seqlens: CuSeqlens, mask: Band, times: int = 5) -> float:
    """The least of some runs. Raises ValueError for a mask or world that the variant can't do."""
    found = []
    for _ in range(times):
        forget()
        start = time.process_time()
        problem = v.problem(cu_seqlens, world, mask, q_tokens=1 if v.decode else None)
        planned(problem, problem.world // 2)
        found.append((time.process_time() - start) * 1e3)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--sequences", type=int, default=1, help="of equal length; several are a packed batch")
    given = parser.parse_args()
    masks = {"causal": CAUSAL, "full": FULL, "window": Band(3 * given.tokens, 0)}
    each = given.world * given.tokens // given.sequences
    cu_seqlens = tuple(range(0, each * given.sequences + 1, each))
    print(f"{'ms, W=' + str(given.world):<20}", *(f"{name:>8}" for name in masks))
    for name in given.variants:
        cells = []
        for mask in masks.values():
            try:
                cells.append(f"{milliseconds(VARIANTS[name], given.world, cu_seqlens, mask):8.1f}")
            except ValueError:
                cells.append(f"{'-':>8}")
        print(f"{name:<20}", *cells)


if __name__ == "__main__":
    main()
