"""timing.do_bench: our timing beside triton.testing.do_bench, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runner.measure import timing
from runner.measure.statistics import summarize
from runner.measure.timing import Stopwatch
from runner.measure.workload import Workload

TURNS = 5  # of ours, between six of do_bench's


class _OnePass:
    """A pass by itself, over and over, as do_bench runs it."""

    def __init__(self, work: Workload, which: str):
        self.passes: tuple[str, ...] = (which,)
        self.call = work.again if which == "backward" else lambda: work.run(which)

    def run(self, which: str) -> None:
        self.call()

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            self.call()


def compare(
    work: Workload, watch: Stopwatch, flush: torch.Tensor | None, announce: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Each pass by do_bench and by our sampling under the same conditions, medians in ms: that pass alone, in turns, the same
    L2 flush, and as long a warm-up without a pause after it, since a GPU at its power limit clocks by what it did just before.
    `ratio` is the median over our turns, each against do_bench's turns before and after it, since clocks drift. The headline
    alternates forward and backward, as training does, at other clocks. `announce` is called before each turn."""
    found = {}
    for which in work.passes:
        work.run("forward")
        alone = _OnePass(work, which)
        theirs, ours = [_do_bench_ms(alone, announce)], []
        runs = max(10, int(500 / theirs[0]))
        for _ in range(TURNS):
            ours.append(_ours_ms(alone, which, runs, watch, flush, announce))
            theirs.append(_do_bench_ms(alone, announce))
        by_turn = [2 * x / (a + b) for x, a, b in zip(ours, theirs, theirs[1:], strict=False)]
        found[which] = {
            "do_bench_ms": summarize(theirs).median,
            "ours_ms": summarize(ours).median,
            "ratio": summarize(by_turn).median,
            "do_bench_turns_ms": theirs,
            "ours_turns_ms": ours,
        }
    work.release()
    return found


def _do_bench_ms(alone: _OnePass, announce: Callable[[], None]) -> float:
    from triton.testing import do_bench

    announce()
    with timing.undisturbed():
        return do_bench(alone.call, warmup=500, rep=500, return_mode="median")


def _ours_ms(
    alone: _OnePass,
    which: str,
    runs: int,
    watch: Stopwatch,
    flush: torch.Tensor | None,
    announce: Callable[[], None],
) -> float:
    announce()
    with timing.undisturbed():
        alone.repeat(which, runs)
        return summarize(timing.sample(alone, watch, runs, flush)[which]).median
