"""`timing.do_bench`: our timing compared with triton.testing.do_bench."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from runner.measure import timing
from runner.measure.stopwatch import Stopwatch
from runner.measure.workload import Workload

TURNS = 5  # of ours, between six of do_bench's


class _OnePass:
    """A single pass, repeated, as do_bench runs it."""

    def __init__(self, work: Workload, which: str):
        self.passes: tuple[str, ...] = (which,)
        self.call = partial(work.repeat, which, 1)

    def run(self, which: str) -> None:
        self.call()


def compare(
    work: Workload, watch: Stopwatch, flush: torch.Tensor | None, announce: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Each pass by do_bench and by our sampling under the same conditions, medians in ms: that pass alone, in turns, with the
    same L2 flush, and an equal warm-up without a pause after it, since a GPU at its power limit sets its clocks by the load
    just before. `ratio` is the median over our turns, each against do_bench's turns before and after it, since clocks drift.
    The headline times differ: they alternate forward and backward, as training does. announce: called before each turn."""
    from triton.testing import do_bench

    def theirs_ms() -> float:
        announce()
        with timing.undisturbed():
            return do_bench(alone.call, warmup=500, rep=500, return_mode="median")

    def ours_ms() -> float:
        announce()
        with timing.undisturbed():
            for _ in range(runs):
                alone.call()
            return median(timing.Timer(alone, watch, flush).sample(runs)[which])

    compared = {}
    for which in work.passes:
        work.run("forward")
        alone = _OnePass(work, which)
        theirs, ours = [theirs_ms()], []
        runs = max(10, int(500 / theirs[0]))
        for _ in range(TURNS):
            ours.append(ours_ms())
            theirs.append(theirs_ms())
        by_turn = [2 * x / (a + b) for x, a, b in zip(ours, theirs, theirs[1:], strict=False)]
        times = {"do_bench_ms": median(theirs), "ours_ms": median(ours), "ratio": median(by_turn)}
        compared[which] = times | {"do_bench_turns_ms": theirs, "ours_turns_ms": ours}
    work.release()
    return compared
