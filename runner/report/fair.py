"""Fair comparison: whether two medians differ by more than their spreads, and whether runs are of one commit and
machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.report.runs import BACK_TO_BACK, Run

MIXED = "‡"
EVEN = "`even`: the 95% intervals of the two medians overlap (p10 to p90 with fewer than 6 samples), or there is one sample."


def spread(run: Run, which: str) -> tuple[float, float] | None:
    """The 95% interval of a pass's median or, with too few samples, p10 to p90, in ms; a time back to back is a mean of many
    iterations, both ends of its own. None for a pass without samples, or with one."""
    if which == BACK_TO_BACK:
        return (run.back_to_back, run.back_to_back) if run.back_to_back else None
    times = run.times(which)
    if times is None or times.n == 1:
        return None
    if times.ci95 is not None:
        return times.ci95
    return (times.p10, times.p90) if times.p10 is not None and times.p90 is not None else None


def even(one: Run, other: Run, which: str) -> bool:
    """Whether the times of two runs cannot be told apart: their spreads overlap, or one of them has none."""
    a, b = spread(one, which), spread(other, which)
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def by_time(runs: Iterable[Run], which: str) -> list[Run]:
    """The runs that have a time, the fastest first."""
    return sorted((run for run in runs if run.ms(which) is not None), key=lambda run: run.ms(which) or 0.0)


def tied(runs: Iterable[Run], which: str) -> list[Run]:
    """The fastest run and those that are even with it; empty where none has a time."""
    timed = by_time(runs, which)
    return [run for run in timed if run is timed[0] or even(timed[0], run, which)]


def noisy(run: Run, which: str) -> bool:
    """Whether the samples of a pass are noisy."""
    times = run.times(which)
    return times is not None and times.noisy


def origins(runs: Iterable[Run]) -> list[str]:
    """The commits and machines of these runs, each once, in a few words."""
    texts = set()
    for about in (run.environment for run in runs):
        commit = (about.git.commit if about.git else None) or "unknown"
        texts.add(f"{commit[:7]} on {about.host or 'an unknown host'} of {about.cores or '?'} cores")
    return sorted(texts)


def mixed(runs: Iterable[Run]) -> bool:
    """Whether the runs are of several commits or machines."""
    return len(origins(runs)) > 1


def mixed_note(rows: Iterable[Sequence[Run]]) -> list[str]:
    """The note to rows that are marked with MIXED."""
    texts = dict.fromkeys(origin for runs in rows if mixed(runs) for origin in origins(runs))
    return [f"`{MIXED}`: runs of several commits or machines in a row: {', '.join(texts)}."] if texts else []
