"""The recorded phases and kernels of a few runs: which runs are shown, what a phase is spent on, and when. The data of the
panels `phases` and `timeline`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.output.run_tables import table_of
from runner.report.charts import place, timed, varying
from runner.report.comparison import by_workload
from runner.report.labels import labels
from runner.report.runs import Run

WHOLE = "pass"  # the phase that is a rank's whole pass
COMPUTE, MERGE, EXPOSED = "compute", "merge and copies", "exposed communication"
RANKS, OTHER = "wait for other ranks", "other"
TRANSFER, BLOCK = "transfer", "own block"  # these overlap the others
OVERLAPPED = "overlapped communication"  # of kernels; drawn upon what computes meanwhile
KERNELS = "kernels"
BESIDE = (TRANSFER, BLOCK, OVERLAPPED)
WAITS = (EXPOSED, RANKS)
# light and dark pages have the same, of which exposed communication is the strongest
COLORS = {
    COMPUTE: "#5b8fd9", MERGE: "#7cc0b5", EXPOSED: "#e5343d", OVERLAPPED: "#5b3f9b", RANKS: "#eda63c", TRANSFER: "#a78bda",
    BLOCK: "#c98fae", OTHER: "#9aa0a6",
}  # fmt: skip
MERGES = ("comp_merge", "comp_place", "comp_stage_", "comp_shard_kv", "comp_num_den", "comp_final_output")
MOST_RANKS = 8  # of a run

Rows = list[dict[str, Any]]  # of a run's table of phases
Span = tuple[float, float]


def group_of(phase: str) -> str:
    """What the time of a phase is spent on."""
    for prefix, group in (("wait_room_", RANKS), ("wait_", EXPOSED), ("comm_", TRANSFER)):
        if phase.startswith(prefix):
            return group
    return BLOCK if not phase.startswith("comp_") else MERGE if phase.startswith(MERGES) else COMPUTE


@dataclass(frozen=True)
class Recorded:
    """A run of a panel, with its label, and one iteration of its phases and one of its kernels; of one of the two there may
    be none."""

    label: str
    run: Run
    phases: Rows
    kernels: Rows

    @property
    def ranks(self) -> list[int]:
        """The ranks that are shown: all or, of many, some at equal distances."""
        world = 1 + max(row["rank"] for row in (*self.phases, *self.kernels))
        n = min(world, MOST_RANKS)
        return [round(i * (world - 1) / max(1, n - 1)) for i in range(n)]


def median_iteration(rows: Rows) -> Rows:
    """The rows of the iteration whose time is the median; an iteration's time is the sum over its passes."""
    iterations: dict[int, Rows] = defaultdict(list)
    for row in rows:
        iterations[row["iteration"]].append(row)
    by_time = sorted(iterations.values(), key=lambda rows: sum(lengths(rows).values()))
    return by_time[(len(by_time) - 1) // 2] if rows else []


def lengths(rows: Rows) -> dict[str, float]:
    """The ms of each pass of one iteration, of its slowest rank."""
    slowest: dict[str, float] = {}
    for row in rows:
        if row["phase"] == WHOLE:
            slowest[row["pass"]] = max(slowest.get(row["pass"], 0.0), row["ms"])
    return slowest


def chosen(runs: Sequence[Run], which: str, most: int, placed: bool) -> tuple[list[Recorded], str]:
    """The runs that a panel shows, the fastest first, at most `most`, and in words how they were chosen; none without
    phases of several ranks. placed: those whose phases have a begin and an end, and those with such kernels."""
    several = [
        run
        for run in timed(runs)
        if (run.world_size or 1) > 1
        and run.ms(which)
        and (run.result.phases or (placed and "kernel_times" in run.result.artifacts))
    ]
    if not several:
        return [], ""

    def size(group: list[Run]) -> tuple[bool, int, int, int]:
        variants = len({run.attention for run in group})
        return variants > 1, group[0].seq_len or 0, group[0].world_size or 0, variants

    largest = max(by_workload(several), key=size)
    named, variants = labels(runs), size(largest)[0]
    fastest: dict[Any, Run] = {}
    for run in sorted(largest, key=lambda run: run.ms(which) or 0.0):
        fastest.setdefault(run.attention if variants else named[run], run)
    recorded: list[Recorded] = []
    for run in fastest.values():
        phases = table_of(run.result, "phases") or []
        kernels = (table_of(run.result, "kernel_times") or []) if placed else []
        if placed and any(row.get("start_ms") is None for row in phases):
            phases = []
        if len(recorded) < most and (phases or kernels):
            kernels = [row | {"phase": row["kernel"], "ms": row["stop_ms"] - row["start_ms"]} for row in kernels]
            recorded.append(Recorded(named[run], run, median_iteration(phases), kernels))
    kind = "variant" if variants else "setting"
    rule = f"The {most} fastest of {len(fastest)} {kind}s" if len(fastest) > most else f"The fastest run of each {kind}"
    where = place(largest[0], varying(several)).replace("\n", " ")
    return recorded, f"{rule} at {where}." if where else f"{rule}."


def spent(recorded: Recorded) -> Rows:
    """The ms of each group, pass and shown rank. With `other` and the wait for other ranks, from a rank's end to that of the
    slowest, a rank's groups add up to the pass."""
    ends = lengths(recorded.phases)
    ms: dict[tuple[int, str, str], float] = defaultdict(float)
    for row in recorded.phases:
        where, group = (row["rank"], row["pass"]), group_of(row["phase"])
        if row["phase"] == WHOLE:
            ms[*where, RANKS] += ends[row["pass"]] - row["ms"]
            ms[*where, OTHER] += row["ms"]
        elif group not in BESIDE:
            ms[*where, group] += row["ms"]
            ms[*where, OTHER] -= row["ms"]
    return [
        {"rank": rank, "pass": which, "group": group, "ms": time}
        for (rank, which, group), time in sorted(ms.items())
        if rank in recorded.ranks
    ]


@dataclass(frozen=True)
class Bar:
    """A piece of a timeline, in ms since the iteration began. `kernel`: a kernel, not a phase."""

    rank: int
    which: str  # the pass
    group: str
    phase: str
    step: int
    start: float
    stop: float
    kernel: bool = False

    @property
    def lane(self) -> tuple[int, str]:
        """The rank, and what its lane is for: no two bars of a lane overlap."""
        return self.rank, self.group if self.group in BESIDE else KERNELS if self.kernel else COMPUTE

    @property
    def ms(self) -> float:
        return self.stop - self.start


def timeline(recorded: Recorded) -> tuple[list[Bar], dict[str, float]]:
    """The bars of one iteration, and when each pass begins. The pause between two passes, in which the ranks are aligned, is
    cut out. Kernels may be of another iteration: their passes begin with those of the phases, and the next pass begins after
    both."""
    bars: list[Bar] = []
    passes: dict[str, float] = {}
    begin = 0.0
    for which in dict.fromkeys(row["pass"] for row in (*recorded.phases, *recorded.kernels)):
        passes[which], ends = begin, [begin]
        for table in (recorded.phases, recorded.kernels):
            rows = [row for row in table if row["pass"] == which]
            if whole := [row for row in rows if row["phase"] == WHOLE]:
                shift = begin - min(row["start_ms"] for row in whole)
                ends.append(max(row["stop_ms"] for row in whole) + shift)
                for rank in recorded.ranks:
                    bars += _drawn(_bars([row for row in rows if row["rank"] == rank], shift, ends[-1]))
        begin = max(ends)
    return bars, passes


def _bars(rows: Rows, shift: float, end: float) -> Iterable[Bar]:
    """The bars of a rank's phases or kernels in one pass, whose slowest rank ends at `end`: a rank that ends before waits for
    other ranks. Communication of kernels is exposed where none computes."""
    busy = [(row["start_ms"] + shift, row["stop_ms"] + shift) for row in rows if row.get("kind") == COMPUTE]
    for row in rows:
        kernel = "kernel" in row
        # names of joined bars are parted by ", "
        name = row["phase"].removeprefix("void ").replace(", ", ",")
        start, stop = row["start_ms"] + shift, row["stop_ms"] + shift
        bar = Bar(row["rank"], row["pass"], COMPUTE, name, row.get("step", -1), start, stop, kernel)
        if row["phase"] == WHOLE:
            if not kernel:
                yield replace(bar, group=RANKS, phase="end of the pass", step=-1, start=stop, stop=end)
        elif not kernel:
            yield replace(bar, group=group_of(name))
        elif row["kind"] == COMPUTE:
            yield bar
        else:
            exposed = minus((start, stop), busy)
            for group, spans in ((EXPOSED, exposed), (OVERLAPPED, minus((start, stop), exposed))):
                yield from (replace(bar, group=group, start=a, stop=b) for a, b in spans)


def _drawn(bars: Iterable[Bar]) -> list[Bar]:
    """The bars of one rank and pass as they are drawn: each from when its lane is free, and a wait where nothing computes."""
    drawn: list[Bar] = []
    free: dict[Any, float] = defaultdict(float)  # when a lane is
    busy: list[Span] = []
    for bar in sorted(bars, key=lambda bar: (bar.group in WAITS, bar.start)):
        spans = [(max(bar.start, free[bar.lane]), bar.stop)]
        if bar.group in WAITS:
            spans = minus((bar.start, bar.stop), busy)
        drawn += [replace(bar, start=start, stop=stop) for start, stop in spans if start < stop]
        free[bar.lane] = max(free[bar.lane], bar.stop)
        if bar.group not in BESIDE:
            busy.append((bar.start, bar.stop))
    return drawn


def minus(span: Span, others: Iterable[Span]) -> list[Span]:
    """The parts of a span outside of the others."""
    start, end = span
    parts = []
    for a, b in sorted(others):
        if start < a and start < end:
            parts.append((start, min(a, end)))
        start = max(start, b)
    return [*parts, (start, end)] if start < end else parts


def coarser(bars: Sequence[Bar], most: int, least: float) -> list[Bar]:
    """The bars, where those shorter than `least` ms are drawn with the next of their lane, as the group that takes most
    of their time; if more than `most` bars are left, `least` is doubled, down to a bar a lane."""
    clusters: list[list[Bar]] = []
    lanes = {(bar.which, bar.lane) for bar in bars}
    for bar in sorted(bars, key=lambda bar: (bar.lane, bar.start)):
        first, last = (clusters[-1][0], clusters[-1][-1]) if clusters else (bar, bar)
        near = max(bar.start - last.stop, last.stop - first.start) < least
        if clusters and near and (last.which, last.lane) == (bar.which, bar.lane):
            clusters[-1].append(bar)
        else:
            clusters.append([bar])
    return [*map(_joined, clusters)] if len(clusters) <= max(most, len(lanes)) else coarser(bars, most, 2 * least)


def _joined(bars: Sequence[Bar]) -> Bar:
    taken: dict[str, float] = defaultdict(float)
    for bar in bars:
        taken[bar.group] += bar.ms
    phases = ", ".join(dict.fromkeys(name for bar in bars for name in bar.phase.split(", ")))
    group, step = max(taken, key=lambda name: taken[name]), bars[0].step if len(bars) == 1 else -1
    return replace(bars[0], group=group, phase=phases, step=step, stop=bars[-1].stop)
