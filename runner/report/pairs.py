"""The runs of two result sets in pairs, each with its verdict, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from runner.output.table import Table
from runner.output.terminal import gib
from runner.report.entries import flat
from runner.report.labels import varying_options
from runner.report.runs import FACTS, PASSES, Run, latest
from runner.report.table import counted, differing, fact, time
from runner.report.tables import LEFT, environment_table
from runner.report.verdicts import Interval, Verdict, speed

# settings and groups of settings by which runs are paired, beside their ranks, replay and timing
WORK = {
    "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "seq_len", "q_len", "kv_lengths", "prefix", "causal", "window",
    "seqlens", "seqlens_mean", "seqlens_std", "seqlens_multiple", "scale", "softcap", "sinks", "mode", "deterministic",
    "attention", "mask", "model", "kernel.name", "transport.name", "dtype.name",
}  # fmt: skip
MEMORY_TOLERANCE = 0.05
RESIDENT_NOISE = 16 << 20  # bytes by which the memory of a CPU process differs from one run to the next
WAY_OUT = "inconclusive: the spread hides the tolerance; timing=adaptive or more timing.timing_runs narrows it"


@dataclass(frozen=True)
class Pair:
    """The runs of both sets of which the same was asked; None where a set has none. `ratio` is that of the medians, B
    over A."""

    a: Run | None
    b: Run | None
    verdict: Verdict
    ratio: Interval | None = None

    @property
    def runs(self) -> list[Run]:
        """B's first."""
        return [run for run in (self.b, self.a) if run is not None]

    @property
    def text(self) -> str:
        """The verdict, bold where it decides the exit status, with the interval of the ratio or the reason of a failure."""
        text = str(self.verdict)
        if self.ratio is not None and self.verdict != Verdict.EVEN:
            text += f" (B/A {self.ratio[0]:.3f} to {self.ratio[1]:.3f})"
        for run in [run for run in self.runs if not run.ok][:1]:
            reason = " ".join((run.result.reason or "").split())[:100]
            text += f": {run.status}{', ' if reason else ''}{reason}"
        return f"**{text}**" if self.verdict.status else text


def paired(a: Sequence[Run], b: Sequence[Run], which: str, tolerance: float) -> list[Pair]:
    """All runs of both sets in pairs, in the order of B's tables, then the runs that B lacks. Of a repeated run the
    latest counts."""
    before, after = (latest(runs, asked) for runs in (a, b))
    return [_pair(before.get(work), after.get(work), which, tolerance) for work in dict.fromkeys(map(asked, (*b, *a)))]


def asked(run: Run) -> Hashable:
    """The settings by which runs are compared, from the configuration: a refused run has no experiment. What older results
    lack is as if it were off."""
    config = run.result.config
    if not run.attention:
        return run.result.key, str(config)
    drawn = config.get("seqlens") in ("random", "real") or config.get("kv_lengths") == "random"
    names = WORK | ({"seed"} if drawn else set())
    settings = {
        (key, text)
        for key, text in flat(config).items()
        if names & {key, key.partition(".")[0]} and text not in ("none", "false")
    }
    return run.world_size, run.replay or "none", run.timing, frozenset(settings)


def _pair(a: Run | None, b: Run | None, which: str, tolerance: float) -> Pair:
    if a is None or b is None:
        return Pair(a, b, Verdict.NEW if a is None else Verdict.MISSING if a.ok else Verdict.GONE)
    if not a.ok or not b.ok:
        return Pair(a, b, Verdict.MENDED if b.ok else Verdict.BROKEN if a.ok else Verdict.FAILED)
    verdict, ratio = speed(a, b, which, tolerance)
    return Pair(a, b, Verdict.LARGER) if not verdict.status and _larger(a, b) else Pair(a, b, verdict, ratio)


def _larger(a: Run, b: Run) -> bool:
    """Whether the peak memory grew beyond the tolerance and, where it is that of a process, beyond its noise. A GPU's
    allocator counts exactly."""
    before, after = a.result.peak_bytes, b.result.peak_bytes
    if not before or not after or not a.result.memory:
        return False
    process = any(rank.peak_allocated is None for rank in a.result.memory.by_rank)
    return after - before > max(MEMORY_TOLERANCE * before, RESIDENT_NOISE * process)


def table(pairs: Sequence[Pair]) -> Table:
    """A row for each pair: what sets it apart, its passes and its peak memory from A to B, and the verdict."""
    runs = [run for pair in pairs for run in pair.runs]
    varying, first = varying_options(runs), [pair.runs[0] for pair in pairs]
    shown = [key for key in differing(first) if key not in ("gpu", "kernel", "transport")]
    # kernel and transport only where the runs were asked for several
    shown += [key for key in ("kernel", "transport") if len({getattr(run, f"asked_{key}") for run in runs}) > 1]
    columns = {FACTS[key]: [fact(run, key, varying) for run in first] for key in shown}
    columns |= {f"{which} ms": [_change(pair, which) for pair in pairs] for which in PASSES}
    columns |= {"peak memory a rank": [_change(pair) for pair in pairs], "": [pair.text for pair in pairs]}
    return Table.of(columns, LEFT | {""})


def _change(pair: Pair, which: str = "") -> str:
    """The time of a pass, or the peak memory, from A to B."""
    values: list[float | None] = []
    texts = []
    for run in (pair.a, pair.b):
        measured = run if run and run.ok and (not which or which in run.passes) else None
        values.append((measured.ms(which) if which else measured.result.peak_bytes) if measured else None)
        texts.append("none" if not measured else time(measured, which) if which else gib(values[-1] or 0))
    a, b = values
    change = f" ({b / a - 1:+.1%})" if a and b else ""
    return " → ".join(texts) + change if a or b else ""


def notes(a: Sequence[Run], b: Sequence[Run], pairs: Sequence[Pair], which: str) -> list[str]:
    """What else may explain a difference, a line each, then the number of pairs by verdict and the geometric mean of B's
    time over A's."""
    before, after = (dict(environment_table(runs).rows) for runs in (a, b))
    apart = {
        title: f"{title} {before.get(title, 'unknown')} → {after.get(title, 'unknown')}"
        for title in before | after
        if title != "command" and before.get(title) != after.get(title)
    }
    commit, counts = apart.pop("commit", ""), Counter(pair.verdict for pair in pairs)
    times = [(pair.a.ms(which), pair.b.ms(which)) for pair in pairs if pair.a and pair.b]
    ratios = [after / before for before, after in times if before and after]
    mean = f"; {which} in B over A: {geometric_mean(ratios):.3f} (geometric mean of {len(ratios)})" if ratios else ""
    return [
        *([f"not measured alike: {'; '.join(apart.values())}"] if apart else []),
        *([commit] if commit else []),
        *([WAY_OUT] if counts[Verdict.INCONCLUSIVE] else []),
        f"{counted(len(pairs), 'run')}: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}{mean}",
    ]
