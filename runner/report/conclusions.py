"""A few sentences about the runs of a report. Each rule makes sentences from the data, or none where the data do not
allow one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from runner.record.fields import NOISY as NOISY_IQR
from runner.report.comparison import by_workload, comparable
from runner.report.fair import by_time, origins, spread, tied
from runner.report.labels import labels
from runner.report.runs import FACTS, WORKLOAD, Run, latest
from runner.report.table import counted, fact

COMPARED = (*WORKLOAD, "timing")  # the facts that runs of a case share
MOST = 4  # sentences of a rule; if there are more, the last one counts the rest
Case = list[Run]


def conclusions(runs: Sequence[Run], which: str = "total") -> dict[str, list[str]]:
    """The sentences on the runs of a sweep by what they are about, for the pass `which`: what is fastest, how noisy the times are, and what failed."""
    compared = cases(runs, which)
    failed = sum(run.status != "ok" for run in runs)
    rules = {
        "fastest": fastest(compared, labels(runs, without={"timing"}), which),
        "noise": noise(runs, labels(runs), which),
        "failures": [f"{failed} of {counted(len(runs), 'run')} failed or could not be done."] if failed else [],
    }
    return {about: texts for about, texts in rules.items() if texts}


def cases(runs: Sequence[Run], which: str) -> list[Case]:
    """The runs that may be compared: of one workload, timing method, commit and machine, the latest of each label, the fastest
    in the pass `which` first, with at least two labels in each case."""
    named, found = labels(runs, without={"timing"}), []
    for group in by_workload(comparable(runs), COMPARED):
        places: dict[str, list[Run]] = defaultdict(list)
        for run in by_time(group, which):
            places[origins([run])[0]].append(run)
        found += [by_time(latest(at_one, named.__getitem__).values(), which) for at_one in places.values()]
    return [case for case in found if len(case) > 1]


def fastest(compared: Sequence[Case], named: dict[Run, str], which: str) -> list[str]:
    """Which label is fastest in which cases and by how much, as far as the spreads allow to say so."""
    first: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in compared:
        first[tuple(sorted(named[run] for run in tied(case, which)))].append(case)
    ahead, level = [], []
    for names, where in sorted(first.items(), key=lambda item: -len(item[1])):
        who, at = _listed(names, MOST), _at(where, compared)
        if len(names) == 1:
            ratios = _range([(case[1].ms(which) or 0.0) / (case[0].ms(which) or 1.0) for case in where], ".2f")
            ahead.append(f"{who} is the fastest {at}: the next takes {ratios} times as long.")
        else:
            known = all(spread(run, which) for case in where for run in case)
            why = "the spreads of their medians overlap" if known else "not all have a spread"
            level.append(f"{who} cannot be told apart {at}: {why}.")
    more = "variants are the fastest of some comparison", "groups are even in some comparison"
    return _cut(ahead, more[0]) + _cut(level, more[1])


def noise(runs: Iterable[Run], named: dict[Run, str], which: str) -> list[str]:
    """How noisy the times are, and which run is worst."""
    timed = {run: times for run in runs if run.ok and (times := run.times(which)) and times.n > 1}
    lines = []
    if noisy := sum(times.noisy for times in timed.values()):
        worst = max(timed, key=lambda run: timed[run].iqr_over_median)
        lines.append(
            f"{noisy} of {counted(len(timed), 'timed run')} {'is' if noisy == 1 else 'are'} noisy: the interquartile range is "
            f"above {NOISY_IQR:.0%} of the median, at most {timed[worst].iqr_over_median:.0%} in {named[worst]} "
            f"(S {fact(worst, 'seq_len')}, W {worst.world_size})."
        )
    elif timed:
        typical = median(times.iqr_over_median for times in timed.values())
        lines.append(f"No timed run is noisy: the interquartile range is {typical:.1%} of the median, typically.")
    if trend := sum(times.trend for times in timed.values()):
        lines.append(f"In {counted(trend, 'run')} the times rose or fell while they were taken.")
    return lines


def _at(where: Sequence[Case], compared: Sequence[Case]) -> str:
    """Names the cases `where` among all cases `compared`, by the facts that vary."""
    if len(compared) == 1:
        return "in this comparison"
    if len(where) == len(compared):
        return f"in all {len(compared)} comparisons"
    varying = [key for key in COMPARED if len({getattr(case[0], key) for case in compared}) > 1]
    if len(varying) == 1 and len(where) <= 3:
        return f"at {FACTS[varying[0]]} = {_listed([fact(case[0], varying[0]) or 'none' for case in where])}"
    return f"in {len(where)} of {len(compared)} comparisons"


def _cut(lines: list[str], what: str) -> list[str]:
    """The first lines, and a count of the others."""
    return lines if len(lines) <= MOST else [*lines[: MOST - 1], f"{len(lines) - MOST + 1} more {what}."]


def _listed(names: Sequence[str], most: int = 100) -> str:
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _range(values: Sequence[float], format: str) -> str:
    return " to ".join(dict.fromkeys(f"{end:{format}}" for end in (min(values), max(values))))
