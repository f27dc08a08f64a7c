"""A few sentences about the runs of a report. Each rule makes sentences from the data, or none where the data do not
allow one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from runner.measure.statistics import NOISY as NOISY_IQR
from runner.report.comparison import by_workload, comparable
from runner.report.fair import origins, spread
from runner.report.labels import labels
from runner.report.runs import FACTS, WORKLOAD, Run
from runner.report.table import counted, fact

COMPARED = (*WORKLOAD, "timing")  # the facts that runs of a case share
MOST = 4  # sentences of a rule; if there are more, the last one counts the rest
LONGEST = 110  # characters of a reason
HALF = 0.5  # a share of the time above which something binds a run
HOLDS = 0.05  # a phase below this share of the time holds nothing back

Key = TypeVar("Key")


@dataclass(frozen=True)
class Conclusion:
    """A sentence, and in a word what it is about."""

    about: str
    text: str


@dataclass(frozen=True)
class Case:
    """Runs of one workload, timing method, commit and machine, one per label, the fastest in the pass `which` first."""

    runs: list[Run]
    which: str

    @property
    def best(self) -> Run:
        return self.runs[0]

    def ratio(self, other: Run, first: Run | None = None) -> float:
        """The time of `other` over that of `first`, by default the fastest."""
        return (other.ms(self.which) or 0.0) / ((first or self.best).ms(self.which) or 1.0)

    def even(self, one: Run, other: Run) -> bool:
        """Whether the spreads of the two medians overlap. Runs without a spread cannot be told apart."""
        a, b = spread(one, self.which), spread(other, self.which)
        return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def conclusions(runs: Sequence[Run], which: str = "total") -> list[Conclusion]:
    """What the runs of a sweep say, for the pass `which`: what is fastest, what binds it and holds it back, how noisy
    the times are, and what failed."""
    found = cases(runs, which)
    named = labels(runs)
    ways = labels(runs, without={"timing"})
    rules: list[tuple[str, Callable[[], list[str]]]] = [
        ("fastest", lambda: fastest(found, ways)),
        ("external", lambda: against_external(found)),
        ("bound by", lambda: bound(runs)),
        ("limit", lambda: limit([case.best for case in found] or [run for run in runs if run.ok])),
        ("held back by", lambda: held_back(runs, named)),
        ("noise", lambda: noise(runs, named, which)),
        ("failures", lambda: failed(runs, named)),
    ]
    return [Conclusion(about, text) for about, rule in rules for text in rule()]


def cases(runs: Sequence[Run], which: str) -> list[Case]:
    """The runs that may be compared, with at least two labels in each case."""
    named = labels(runs, without={"timing"})
    groups: dict[tuple[int, str], dict[str, Run]] = {}
    for number, group in enumerate(by_workload(comparable(runs), COMPARED)):
        for run in sorted(group, key=lambda run: run.environment.started_at):
            if run.ms(which):
                groups.setdefault((number, origins([run])[0]), {})[named[run]] = run  # the latest of a label
    several = [list(latest.values()) for latest in groups.values() if len(latest) > 1]
    return [Case(sorted(group, key=lambda run: run.ms(which) or 0.0), which) for group in several]


def fastest(found: Sequence[Case], named: dict[Run, str]) -> list[str]:
    """Which label is fastest in which cases and by how much, as far as the spreads allow to say so."""
    won: dict[str, list[Case]] = {}
    even: dict[tuple[str, ...], list[Case]] = {}
    for case in found:
        tied = [run for run in case.runs if run is case.best or case.even(case.best, run)]
        if len(tied) == 1:
            won.setdefault(named[case.best], []).append(case)
        else:
            even.setdefault(tuple(sorted(named[run] for run in tied)), []).append(case)
    ahead = [
        f"{label} is the fastest {_at(where, found)}: the next takes {_times([c.ratio(c.runs[1]) for c in where])} as long."
        for label, where in _most_first(won)
    ]
    level = [
        f"{_listed(names, MOST)} cannot be told apart {_at(where, found)}: the spreads of their medians overlap."
        for names, where in _most_first(even)
    ]
    return _cut(ahead, "variants are the fastest of some comparison") + _cut(
        level, "groups are even in some comparison"
    )


def against_external(found: Sequence[Case]) -> list[str]:
    """The fastest external package against the fastest of ours, both launched without CUDA graphs."""
    ratios, even, where = [], 0, []
    for case in found:
        launched = [run for run in case.runs if run.graphs is False]
        theirs = next((run for run in launched if run.external), None)
        ours = next((run for run in launched if not run.external), None)
        if theirs and ours:
            ratios.append(case.ratio(theirs, ours))
            even += case.even(theirs, ours)
            where.append(case)
    if not ratios:
        return []
    but = f"; the spreads overlap{f' in {even}' if len(where) > 1 else ''}" if even else ""
    return [
        f"The fastest external package takes {_times(ratios)} as long as the fastest of ours {_at(where, found)}{but}."
    ]


def shares(run: Run) -> tuple[float, float, float] | None:
    """Of the recorded passes together: the share of compute, of exposed communication, and of the rest."""
    found = [phases for phases in run.result.phases.values() if phases.total_ms > 0 and phases.compute_share > 0]
    if not run.ok or not found:
        return None
    total = sum(phases.total_ms for phases in found)
    compute, wait = (
        sum(phases.total_ms * getattr(phases, key) for phases in found) / total
        for key in ("compute_share", "communication_share")
    )
    return compute, wait, max(0.0, 1 - compute - wait)


def bound(runs: Iterable[Run]) -> list[str]:
    """Compute- or communication-bound, by the phases of the slowest rank."""
    known = [found for run in runs if (found := shares(run))]
    kinds = ("compute-bound", "communication-bound", "bound by CPU launch overhead and gaps")
    whats = ("compute takes", "compute waits for communication", "these take")
    lines, left = [], len(known)
    for i, (kind, what) in enumerate(zip(kinds, whats, strict=True)):
        of = [found[i] for found in known if found[i] > HALF]
        left -= len(of)
        if of:
            lines.append(f"{_of_all(len(of), len(known))} {kind}: {what} {_percents(of)} of the recorded time.")
    if left:
        lines.append(
            f"{_of_all(left, len(known))} without a single bottleneck: none takes more than half of the recorded time."
        )
    return lines


def limit(best: Iterable[Run]) -> list[str]:
    """How near the fastest runs come to the rates that were measured on this machine."""
    by: dict[str, list[float]] = {}
    for run in best:
        metrics = run.result.last_metrics
        if metrics and metrics.sol and metrics.limited_by:
            by.setdefault(metrics.limited_by, []).append(metrics.sol)
    lines = []
    for what, found in by.items():
        who = "The fastest run works" if len(found) == 1 else f"The {len(found)} fastest runs work"
        above = " Above 100%: the measured rate is too low." if max(found) > 1.05 else ""
        rate = {"compute": "compute", "memory": "memory", "communication": "link"}.get(what, what)
        lines.append(f"{who} at {_percents(found)} of the {rate} rate that was measured on this machine.{above}")
    return lines


def held_back(runs: Iterable[Run], named: dict[Run, str]) -> list[str]:
    """The two largest parts of the time that are not compute, each in the run where it is largest."""
    worst: dict[str, tuple[float, Run, str]] = {}
    for run in runs:
        for which, phases in run.result.phases.items() if run.ok else ():
            waits = {name: phase.share or 0.0 for name, phase in phases.phases.items() if name.startswith("wait_")}
            parts = {f"waiting for {name.removeprefix('wait_')} ({name})": share for name, share in waits.items()}
            if phases.total_ms and phases.other_ms:
                parts["launch overhead and gaps"] = 1 - phases.compute_share - phases.communication_share
            for name, share in parts.items():
                if share > worst.get(name, (HOLDS,))[0]:
                    worst[name] = share, run, which
    found = sorted(worst.items(), key=lambda item: -item[1][0])[:2]
    return [f"{name}: up to {share:.0%} of the {which}, in {_run(run, named)}." for name, (share, run, which) in found]


def noise(runs: Iterable[Run], named: dict[Run, str], which: str) -> list[str]:
    """How noisy the times are, and which run is worst."""
    timed = [(run, times) for run in runs if run.ok and (times := run.times(which)) and times.n > 1]
    noisy = sorted((t.iqr_over_median, i) for i, (_, t) in enumerate(timed) if t.noisy)
    trend = sum(times.trend for _, times in timed)
    lines = []
    if noisy:
        share, worst = noisy[-1]
        lines.append(
            f"{len(noisy)} of {counted(len(timed), 'timed run')} {'is' if len(noisy) == 1 else 'are'} noisy: the interquartile "
            f"range is above {NOISY_IQR:.0%} of the median, at most {share:.0%} in {_run(timed[worst][0], named)}."
        )
    elif timed:
        typical = median(times.iqr_over_median for _, times in timed)
        lines.append(f"No timed run is noisy: the interquartile range is {typical:.1%} of the median, typically.")
    if trend:
        lines.append(f"In {counted(trend, 'run')} the times rose or fell while they were taken.")
    return lines


def failed(runs: Sequence[Run], named: dict[Run, str]) -> list[str]:
    """The runs without a result, counted by status and reason."""
    reasons = Counter(_reason(run) for run in runs if run.status != "ok")
    if not reasons:
        return []
    lines = [f"{n} {reason}" for reason, n in reasons.most_common()]
    first = f"{reasons.total()} of {counted(len(runs), 'run')} failed or could not be done."
    return [first, *_cut(lines, "reasons; the last section has all")]


def _reason(run: Run) -> str:
    """The status and the reason; a long one is cut."""
    text = " ".join((run.result.reason or "no reason given").split())
    return f"{run.status}: {text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'}"


def _at(where: Sequence[Case], found: Sequence[Case]) -> str:
    """Names the cases `where` among all cases `found`, by the facts that vary."""
    if len(found) == 1:
        return "in this comparison"
    if len(where) == len(found):
        return f"in all {len(found)} comparisons"
    varying = [key for key in COMPARED if len({getattr(case.best, key) for case in found}) > 1]
    if len(varying) == 1 and len(where) <= 3:
        values = [fact(case.best, varying[0]) or "none" for case in where]
        return f"at {FACTS[varying[0]]} = {_listed(values)}"
    if len(where) == 1:
        facts = ", ".join(f"{FACTS[key]} {fact(where[0].best, key) or 'none'}" for key in varying)
        return f"at {facts}" if facts else f"in one of {len(found)} comparisons"
    return f"in {len(where)} of {len(found)} comparisons"


def _run(run: Run, named: dict[Run, str]) -> str:
    return f"{named[run]} (S {fact(run, 'seq_len')}, W {run.world_size})"


def _most_first(groups: dict[Key, list[Case]]) -> list[tuple[Key, list[Case]]]:
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _cut(lines: list[str], what: str) -> list[str]:
    """The first lines, and a count of the others."""
    return lines if len(lines) <= MOST else [*lines[: MOST - 1], f"{len(lines) - MOST + 1} more {what}."]


def _listed(names: Sequence[str], most: int = 100) -> str:
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _times(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _percents(found: Sequence[float]) -> str:
    low, high = f"{min(found):.0%}", f"{max(found):.0%}"
    return low if low == high else f"{low} to {high}"


def _of_all(n: int, of: int) -> str:
    runs = "run with phases" if of == 1 else "runs with phases"
    return f"{'All' if n == of else f'{n} of'} {of} {runs} {'is' if n == 1 else 'are'}" if of > 1 else f"The {runs} is"
