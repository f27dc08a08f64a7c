"""A comparison of two result sets as Markdown and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.output.summary import escaped
from runner.output.terminal import gib
from runner.report.labels import varying_options
from runner.report.pairs import Pair, settings_apart
from runner.report.runs import FACTS, PASSES, Run
from runner.report.table import Table, differing, digits, fact
from runner.report.tables import LEFT, environment_table
from runner.report.verdicts import Verdict

SAID = (Verdict.SLOWER, Verdict.FASTER, Verdict.INCONCLUSIVE)  # with the interval of their ratio
WAY_OUT = "inconclusive: the spread hides the tolerance; timing=adaptive or more timing.timing_runs narrows it"


@dataclass(frozen=True)
class Comparison:
    """Two result sets, by the names of their folders, and their runs in pairs. which: the pass that was judged."""

    a: str
    b: str
    runs_a: Sequence[Run]
    runs_b: Sequence[Run]
    pairs: Sequence[Pair]
    which: str

    @property
    def exit_status(self) -> int:
        """1 where a run is worse, else 2 where one is missing, else 0."""
        return 1 if any(pair.worse for pair in self.pairs) else 2 if any(pair.missing for pair in self.pairs) else 0

    @property
    def notes(self) -> list[str]:
        """What else may explain a difference, a line each."""
        before, after = (dict(environment_table(runs).rows) for runs in (self.runs_a, self.runs_b))
        apart = {
            title: f"{before.get(title, 'unknown')} → {after.get(title, 'unknown')}"
            for title in {**before, **after}
            if title != "command" and before.get(title) != after.get(title)
        }
        commit = apart.pop("commit", "")
        versions = [sorted({run.result.schema_version for run in runs}) for runs in (self.runs_a, self.runs_b)]
        schemas = " → ".join(" and ".join(map(str, found)) for found in versions)
        notes = {
            f"not measured alike: {'; '.join(f'{title} {change}' for title, change in apart.items())}": apart,
            f"settings differ: {'; '.join(settings_apart(self.pairs))}": settings_apart(self.pairs),
            f"results of other versions: schema {schemas}": versions[0] != versions[1],
            f"commit: {commit}": commit,
            WAY_OUT: any(Verdict.INCONCLUSIVE in pair.verdicts for pair in self.pairs),
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def summary(self) -> str:
        """The number of pairs by verdict, and the geometric mean of B's time over A's."""
        counts = Counter(verdict for pair in self.pairs for verdict in pair.verdicts)
        text = f"{len(self.pairs)} runs: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}"
        which, both = self.which, [(pair.a, pair.b) for pair in self.pairs if pair.a and pair.b]
        ratios = [y / x for a, b in both if (x := a.ms(which)) and (y := b.ms(which))]
        if not ratios:
            return text
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return f"{text}; {which} in B over A: {mean:.3f} (geometric mean of {len(ratios)})"


def table(pairs: Sequence[Pair]) -> Table:
    """A row for each pair: what sets it apart, its passes and its peak memory from A to B, and the verdict."""
    runs = [run for pair in pairs for run in (pair.a, pair.b) if run is not None]
    shown, varying = _shown(pairs), varying_options(runs)
    passes = [which for which in PASSES if any(_time(run, which) is not None for run in runs)]
    rows = [
        [
            *(fact(pair.either, key, varying) for key in shown),
            *(_change(_time(pair.a, which), _time(pair.b, which), digits) for which in passes),
            _change(_peak(pair.a), _peak(pair.b), gib),
            f"**{text(pair)}**" if pair.worse or pair.missing else text(pair),
        ]
        for pair in pairs
    ]
    titles = [*(FACTS[key] for key in shown), *(f"{which} ms" for which in passes), "peak memory a rank", ""]
    return Table(titles, rows, LEFT | {""})


def _shown(pairs: Sequence[Pair]) -> list[str]:
    """The facts that tell the pairs apart; kernel and transport where the runs were asked for several."""
    runs = [run for pair in pairs for run in (pair.a, pair.b) if run is not None]
    found = [key for key in differing([pair.either for pair in pairs]) if key not in ("gpu", "kernel", "transport")]
    return found + [key for key in ("kernel", "transport") if len({getattr(run, f"asked_{key}") for run in runs}) > 1]


def _time(run: Run | None, which: str) -> float | None:
    return run.ms(which) if run is not None and which in run.passes else None


def _peak(run: Run | None) -> float | None:
    return run.result.peak_bytes if run is not None and run.ok else None


def _change(a: float | None, b: float | None, text: Callable[[float], str]) -> str:
    if a is None and b is None:
        return ""
    change = " → ".join("none" if value is None else text(value) for value in (a, b))
    return f"{change} ({b / a - 1:+.1%})" if a and b else change


def text(pair: Pair) -> str:
    """The verdicts of a pair, with the interval of the ratio or the reason of a failure."""
    found = ", ".join(pair.verdicts)
    if pair.ratio is not None and set(pair.verdicts) & set(SAID):
        found += f" (B/A {pair.ratio[0]:.3f} to {pair.ratio[1]:.3f})"
    failed = next((run for run in (pair.b, pair.a) if run is not None and not run.ok), None)
    if failed is not None:
        reason = " ".join((failed.result.reason or "").split())[:100]
        found += f": {failed.status}, {reason}" if reason else f": {failed.status}"
    return found


def markdown(of: Comparison, titled: bool = False) -> str:
    """The table and what is said of it; `titled` with the names of both sets above."""
    title = [f"## {escaped(of.a)} → {escaped(of.b)}\n"] if titled else []
    return "\n".join([*title, table(of.pairs).markdown(), *map(escaped, [*of.notes, of.summary])])


def plain(of: Comparison) -> dict[str, Any]:
    """Each pair with its facts, medians in ms with their 95% intervals, ratio, verdicts, and whether it is worse."""
    pairs = [
        {
            **{key: getattr(pair.either, key) for key in _shown(of.pairs)},
            **{name: run and _side(run, of.which) for name, run in (("a", pair.a), ("b", pair.b))},
            "ratio_ci95": pair.ratio,
            "verdicts": list(pair.verdicts),
            "worse": pair.worse,
        }
        for pair in of.pairs
    ]
    about = {key: getattr(of, key) for key in ("a", "b", "summary", "notes", "exit_status")}
    return about | {"pass": of.which, "pairs": pairs}


def _side(run: Run, which: str) -> dict[str, Any]:
    times = run.times(which) if run.ok else None
    about = {"name": run.result.name, "status": run.status, "reason": run.result.reason, "peak_bytes": _peak(run)}
    return about | {"median_ms": times and times.median, "ci95_ms": times and times.ci95}
