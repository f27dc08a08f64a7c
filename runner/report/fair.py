"""Fair comparison: whether two medians differ by more than their spreads, and whether runs are of one commit and
machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.report.runs import Run

MIXED = "‡"


def spread(run: Run, which: str) -> tuple[float, float] | None:
    """The 95% interval of a pass's median or, with too few samples, p10 to p90, in ms. None for a pass without
    samples."""
    found = run.times(which)
    if found is None or found.ci95 is not None:
        return found.ci95 if found else None
    return (found.p10, found.p90) if found.p10 is not None and found.p90 is not None else None


def ratio(theirs: Run, ours: Run, which: str, names: tuple[str, str]) -> str:
    """Theirs over ours, with the names of both; `even` where the spreads of the two medians overlap."""
    a, b = theirs.ms(which), ours.ms(which)
    if not a or not b:
        return ""
    first, second = spread(theirs, which), spread(ours, which)
    even = first and second and first[0] <= second[1] and second[0] <= first[1]
    return f"{'even' if even else f'{a / b:.2f}'} ({names[0]} / {names[1]})"


def noise(run: Run, which: str) -> str:
    """`!` for a noisy pass."""
    found = run.times(which)
    return "!" if found is not None and found.noisy else ""


def origins(runs: Iterable[Run]) -> list[str]:
    """The commits and machines of these runs, each once, in a few words."""
    found = set()
    for about in (run.environment for run in runs):
        commit = (about.git.commit if about.git else None) or "unknown"
        found.add(f"{commit[:7]} on {about.host or 'an unknown host'} of {about.cores or '?'} cores")
    return sorted(found)


def mixed(runs: Sequence[Run]) -> bool:
    """Whether the runs are of several commits or machines."""
    return len(origins(runs)) > 1


def mixed_note(rows: Iterable[Sequence[Run]]) -> list[str]:
    """The note to rows that are marked with MIXED."""
    found = dict.fromkeys(origin for runs in rows if mixed(runs) for origin in origins(runs))
    return [f"`{MIXED}`: runs of several commits or machines in a row: {', '.join(found)}."] if found else []
