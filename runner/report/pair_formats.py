"""A comparison of two result sets as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from runner.output.table import Table, escaped
from runner.output.terminal import gib
from runner.report.labels import varying_options
from runner.report.pairs import Pair, settings_apart
from runner.report.runs import FACTS, PASSES, Run
from runner.report.table import differing, fact, time
from runner.report.tables import LEFT, environment_table
from runner.report.verdicts import Verdict

SAID = {Verdict.SLOWER, Verdict.FASTER, Verdict.INCONCLUSIVE}  # with the interval of their ratio
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
        commit, settings = apart.pop("commit", ""), settings_apart(self.pairs)
        versions = [sorted({run.result.schema_version for run in runs}) for runs in (self.runs_a, self.runs_b)]
        schemas = " → ".join(" and ".join(map(str, numbers)) for numbers in versions)
        notes = {
            f"not measured alike: {'; '.join(f'{title} {change}' for title, change in apart.items())}": apart,
            f"settings differ: {'; '.join(settings)}": settings,
            f"results of other versions: schema {schemas}": versions[0] != versions[1],
            f"commit: {commit}": commit,
            WAY_OUT: any(Verdict.INCONCLUSIVE in pair.verdicts for pair in self.pairs),
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def summary(self) -> str:
        """The number of pairs by verdict, and the geometric mean of B's time over A's."""
        counts = Counter(verdict for pair in self.pairs for verdict in pair.verdicts)
        text = f"{len(self.pairs)} run{'s' * (len(self.pairs) != 1)}: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}"
        times = [[run.ms(self.which) for run in pair.runs] for pair in self.pairs]
        ratios = [ms[0] / ms[1] for ms in times if len(ms) == 2 and ms[0] and ms[1]]
        if not ratios:
            return text
        return f"{text}; {self.which} in B over A: {geometric_mean(ratios):.3f} (geometric mean of {len(ratios)})"

    def markdown(self, titled: bool = False) -> str:
        """The table and what is said of it; `titled` with the names of both sets above."""
        title = [f"## {escaped(self.a)} → {escaped(self.b)}\n"] if titled else []
        return "\n".join([*title, table(self.pairs).markdown(), *map(escaped, [*self.notes, self.summary])])


def table(pairs: Sequence[Pair]) -> Table:
    """A row for each pair: what sets it apart, its passes and its peak memory from A to B, and the verdict."""
    runs = [run for pair in pairs for run in pair.runs]
    varying, first = varying_options(runs), [pair.runs[0] for pair in pairs]
    shown = [key for key in differing(first) if key not in ("gpu", "kernel", "transport")]
    # kernel and transport only where the runs were asked for several
    shown += [key for key in ("kernel", "transport") if len({getattr(run, f"asked_{key}") for run in runs}) > 1]
    passes = [which for which in PASSES if any(run.ok and which in run.passes for run in runs)]
    columns = {FACTS[key]: [fact(run, key, varying) for run in first] for key in shown}
    for which in passes:
        columns[f"{which} ms"] = [_change(_time(pair.a, which), _time(pair.b, which)) for pair in pairs]
    columns["peak memory a rank"] = [_change(_peak(pair.a), _peak(pair.b)) for pair in pairs]
    columns[""] = [f"**{text(pair)}**" if pair.worse or pair.missing else text(pair) for pair in pairs]
    return Table.of(columns, LEFT | {""})


def _time(run: Run | None, which: str) -> tuple[float | None, str]:
    return (run.ms(which), time(run, which)) if run and run.ok and which in run.passes else (None, "none")


def _peak(run: Run | None) -> tuple[float | None, str]:
    peak = run.result.peak_bytes if run and run.ok else None
    return peak, "none" if peak is None else gib(peak)


def _change(*values: tuple[float | None, str]) -> str:
    """A value from A to B, each beside its text."""
    (a, before), (b, after) = values
    if a is None and b is None:
        return ""
    return f"{before} → {after}" + (f" ({b / a - 1:+.1%})" if a and b else "")


def text(pair: Pair) -> str:
    """The verdicts of a pair, with the interval of the ratio or the reason of a failure."""
    verdicts = ", ".join(pair.verdicts)
    if pair.ratio is not None and SAID & {*pair.verdicts}:
        verdicts += f" (B/A {pair.ratio[0]:.3f} to {pair.ratio[1]:.3f})"
    for run in pair.runs:
        if not run.ok:
            reason = " ".join((run.result.reason or "").split())[:100]
            return f"{verdicts}: {run.status}" + (f", {reason}" if reason else "")
    return verdicts
