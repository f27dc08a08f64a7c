"""The recorded phases and kernels of a few runs: which runs are shown, what a phase is spent on, and when. The data of the
panels `phases` and `timeline`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from runner.output.record import Result
from runner.output.run_tables import table_of
from runner.report.comparison import by_workload, comparable
from runner.report.labels import labels
from runner.report.runs import FACTS, WORKLOAD, Run
from runner.report.table import fact

WHOLE = "pass"  # the phase that is a rank's whole pass
COMPUTE, MERGE, EXPOSED = "compute", "merge and copies", "exposed communication"
RANKS, OTHER = "wait for other ranks", "other"
TRANSFER, BLOCK = "transfer", "own block"  # these overlap the others
OVERLAPPED = "overlapped communication"  # of kernels; drawn upon what computes meanwhile
KERNELS = "kernels"
BESIDE = (TRANSFER, BLOCK, OVERLAPPED)
# light and dark pages have the same, of which exposed communication is the strongest
COLORS = {
    COMPUTE: "#5b8fd9", MERGE: "#7cc0b5", EXPOSED: "#e5343d", RANKS: "#eda63c", OTHER: "#9aa0a6", TRANSFER: "#a78bda",
    BLOCK: "#c98fae", OVERLAPPED: "#5b3f9b",
}  # fmt: skip
MERGES = ("comp_merge", "comp_place", "comp_stage_", "comp_shard_kv", "comp_num_den", "comp_final_output")
MOST_RANKS = 8  # of a run
ALIKE = 4  # times the shortest iteration: longer runs have axes of their own
MOST_LANES = 3  # of a rank, for what goes on at once

Rows = list[dict[str, Any]]  # of a run's table of phases
Span = tuple[float, float]


def group_of(phase: str) -> str:
    """What the time of a phase is spent on."""
    for prefix, group in (("wait_room_", RANKS), ("wait_", EXPOSED), ("comm_", TRANSFER)):
        if phase.startswith(prefix):
            return group
    return BLOCK if not phase.startswith("comp_") else MERGE if phase.startswith(MERGES) else COMPUTE


@dataclass(frozen=True)
class Shown:
    """A run of a panel, with its label, its recorded phases and when its kernels ran in one iteration; of one of the two
    there may be none."""

    label: str
    run: Run
    rows: Rows
    kernels: Rows = field(default_factory=list)

    @cached_property
    def by_iteration(self) -> list[Rows]:
        """The rows of each iteration, the shortest first. An iteration's time is the sum over its passes, each of the
        slowest rank."""
        found: dict[int, Rows] = defaultdict(list)
        for row in self.rows:
            found[row["iteration"]].append(row)
        return sorted(found.values(), key=lambda rows: sum(lengths(rows).values()))

    @property
    def middle(self) -> list[Rows]:
        """The middle half of the iterations by their time."""
        kept = max(1, len(self.by_iteration) // 2)
        first = (len(self.by_iteration) - kept) // 2
        return self.by_iteration[first : first + kept]

    @property
    def usual(self) -> Rows:
        """The iteration nearest to the median; none without phases."""
        if not self.rows:
            return []
        times = [sum(lengths(rows).values()) for rows in self.by_iteration]
        return min(zip(times, self.by_iteration, strict=True), key=lambda each: abs(each[0] - median(times)))[1]

    @property
    def ms(self) -> float:
        """The time of the iteration that is shown."""
        return max(sum(lengths(rows).values()) for rows in (self.usual, self.kernels))

    @property
    def ranks(self) -> list[int]:
        """The ranks that are shown: all or, of many, some at equal distances."""
        world = 1 + max(row["rank"] for row in (*self.rows, *self.kernels))
        few = min(world, MOST_RANKS)
        return [round(i * (world - 1) / max(1, few - 1)) for i in range(few)]


def lengths(rows: Rows) -> dict[str, float]:
    """The ms of each pass of one iteration, of its slowest rank."""
    found: dict[str, float] = {}
    for row in rows:
        if row["phase"] == WHOLE:
            found[row["pass"]] = max(found.get(row["pass"], 0.0), row["ms"])
    return found


def _of_kernels(rows: Rows | None) -> Rows:
    """A run's table of kernels, with the columns of phases."""
    return [row | {"phase": row["kernel"], "ms": row["stop_ms"] - row["start_ms"]} for row in rows or ()]


def alike(shown: Sequence[Shown]) -> bool:
    """Whether the runs' times are near enough to share an axis."""
    times = [each.ms for each in shown]
    return max(times) <= ALIKE * min(times)


def chosen(runs: Sequence[Run], which: str, most: int, placed: bool) -> tuple[list[Shown], str]:
    """The runs that a panel shows, the fastest first, at most `most`, and in words how they were chosen; none without
    phases of several ranks. placed: those whose phases have a begin and an end, and those with such kernels."""

    def has_any(result: Result) -> bool:
        return bool(result.phases or (placed and "kernel_times" in result.artifacts))

    several_ranks = [run for run in comparable(runs) if run.ok and (run.world_size or 1) > 1 and run.ms(which)]
    recorded = [run for run in several_ranks if has_any(run.result)]
    if not recorded:
        return [], ""
    groups = by_workload(recorded)
    several = [group for group in groups if len({run.attention for run in group}) > 1]
    sizes, size = (several, "size of several variants") if several else (groups, "size")
    largest = max(sizes, key=lambda of: (of[0].seq_len or 0, of[0].world_size or 0, len({r.attention for r in of})))
    varying = [key for key in WORKLOAD if len({getattr(run, key) for run in recorded}) > 1]
    where = ", ".join(f"{FACTS[key]} = {fact(largest[0], key) or 'none'}" for key in varying)
    named = labels(runs)
    settings, variants = ({of(run) for run in largest} for of in (named.__getitem__, lambda run: run.attention))
    by_variant = len(settings) > most and len(variants) > 1
    fastest: dict[Any, Run] = {}
    for run in sorted(largest, key=lambda run: run.ms(which) or 0.0):
        fastest.setdefault(run.attention if by_variant else named[run], run)
    found: list[Shown] = []
    for run in fastest.values():
        if len(found) == most:
            break
        rows = table_of(run.result, "phases") or []
        kernels = _of_kernels(table_of(run.result, "kernel_times")) if placed else []
        if placed and any(row.get("start_ms") is None for row in rows):
            rows = []
        if rows or kernels:
            found.append(Shown(named[run], run, rows, kernels))
    each = "variant" if by_variant or len(settings) == len(variants) else "setting"
    rule = (
        f"the fastest run of each {each}" if len(fastest) <= most else f"the {most} fastest of {len(fastest)} {each}s"
    )
    return found, f"{rule[0].upper()}{rule[1:]}{f' at the largest {size} ({where})' if len(groups) > 1 else ''}"


def spent(shown: Shown) -> Rows:
    """The ms of each group, pass and shown rank, in the mean over the middle half of the iterations. With `other` and
    the wait for other ranks, from a rank's end to that of the slowest, a rank's groups add up to the pass."""
    ranks = set(shown.ranks)
    found: dict[tuple[int, str, str], float] = defaultdict(float)
    for rows in shown.middle:
        ends = lengths(rows)
        for row in rows:
            if row["rank"] not in ranks:
                continue
            place = (row["rank"], row["pass"])
            if row["phase"] == WHOLE:
                found[*place, RANKS] += ends[row["pass"]] - row["ms"]
                found[*place, OTHER] += row["ms"]
            elif (group := group_of(row["phase"])) not in (TRANSFER, BLOCK):
                found[*place, group] += row["ms"]
                found[*place, OTHER] -= row["ms"]
    n = len(shown.middle)
    return [
        {"rank": rank, "pass": which, "group": group, "ms": ms / n}
        for (rank, which, group), ms in sorted(found.items(), key=lambda item: item[0][0])
    ]


@dataclass(frozen=True)
class Bar:
    """A piece of a timeline, in ms since the iteration began. `lane`: of the rank's lanes for this kind of bar, from 0.
    `kernel`: a kernel, not a phase."""

    rank: int
    which: str  # the pass
    group: str
    phase: str
    step: int
    start: float
    stop: float
    lane: int = 0
    kernel: bool = False

    @property
    def place(self) -> tuple[int, str, int]:
        """The rank, what its lane is for, and which of these lanes: no two bars of one place overlap."""
        return self.rank, self.group if self.group in BESIDE else KERNELS if self.kernel else COMPUTE, self.lane

    @property
    def ms(self) -> float:
        return self.stop - self.start


def timeline(
    rows: Rows, ranks: Sequence[int], kernels: Sequence[dict[str, Any]] = ()
) -> tuple[list[Bar], dict[str, Span]]:
    """The bars of one iteration, and when each pass began and ended. The pause between two passes, in which the ranks
    are aligned, is cut out. A rank that ends before the slowest waits for other ranks. `kernels` may be of another
    iteration: their passes begin with those of the phases, and the next pass begins after both."""
    bars: list[Bar] = []
    passes: dict[str, Span] = {}
    begin = 0.0
    for which in dict.fromkeys(row["pass"] for row in (*rows, *kernels)):
        ends = []
        for table, bars_of in ((rows, _phases), (kernels, _kernels)):
            of = [row for row in table if row["pass"] == which]
            if whole := [row for row in of if row["phase"] == WHOLE]:
                shift = begin - min(row["start_ms"] for row in whole)
                ends.append(max(row["stop_ms"] for row in whole) + shift)
                for rank in ranks:
                    mine = [
                        row | {key: row[key] + shift for key in ("start_ms", "stop_ms")}
                        for row in of
                        if row["rank"] == rank
                    ]
                    bars += bars_of(mine, ends[-1])
        passes[which] = (begin, ends[0])
        begin = max(ends)
    return bars, passes


def _phases(rows: Rows, end: float) -> list[Bar]:
    """The bars of a rank's phases in one pass, whose slowest rank ends at `end`."""
    bars = []
    for row in rows:
        common = (row["rank"], row["pass"])
        if row["phase"] == WHOLE:
            bars.append(Bar(*common, RANKS, "end of the pass", -1, row["stop_ms"], end))
        else:
            group = group_of(row["phase"])
            bars.append(Bar(*common, group, row["phase"], row["step"], row["start_ms"], row["stop_ms"]))
    return _in_lanes(bars)


def _kernels(rows: Rows, _: float) -> list[Bar]:
    """The bars of a rank's kernels in one pass: communication is exposed where no compute runs. Of transfers that run at
    once the first is drawn."""
    busy = [(row["start_ms"], row["stop_ms"]) for row in rows if row["kind"] == COMPUTE]
    moving: list[Span] = []
    bars = []
    for row in sorted(rows, key=lambda row: row["start_ms"]):
        if row["kind"] == WHOLE:
            continue
        span = (row["start_ms"], row["stop_ms"])
        name = row["phase"].removeprefix("void ").replace(", ", ",")  # names of joined bars are parted by ", "
        pieces = {COMPUTE: [span]}
        if row["kind"] != COMPUTE:
            alone, exposed = minus(span, moving), minus(span, busy)
            pieces = {
                EXPOSED: [piece for part in alone for piece in minus(part, busy)],
                OVERLAPPED: [piece for part in alone for piece in minus(part, exposed)],
            }
            moving.append(span)
        bars += [
            Bar(row["rank"], row["pass"], group, name, -1, *piece, kernel=True)
            for group, found in pieces.items()
            for piece in found
        ]
    return _in_lanes(bars)


def _in_lanes(bars: Iterable[Bar]) -> list[Bar]:
    """The bars of one rank and pass. What goes on at once has several lanes and, beyond MOST_LANES, is drawn from when one
    is free; a wait is kept where nothing computes."""
    drawn: list[Bar] = []
    ends: dict[str, list[float]] = defaultdict(list)  # of each lane
    busy: list[Span] = []
    for bar in sorted(bars, key=lambda bar: (bar.group in (EXPOSED, RANKS), bar.start)):
        if bar.group in (EXPOSED, RANKS):
            drawn += [replace(bar, start=start, stop=stop) for start, stop in minus((bar.start, bar.stop), busy)]
        else:
            lanes = ends[bar.place[1]]
            lane = next((i for i, end in enumerate(lanes) if end <= bar.start), len(lanes))
            if lane == MOST_LANES:
                lane = min(range(MOST_LANES), key=lambda i: lanes[i])
            start = max([bar.start, *lanes[lane : lane + 1]])
            if start < bar.stop:
                lanes[lane : lane + 1] = [bar.stop]
                drawn.append(replace(bar, start=start, lane=lane))
        if bar.group not in BESIDE:
            busy.append((bar.start, bar.stop))
    return drawn


def minus(span: Span, others: Iterable[Span]) -> list[Span]:
    """The parts of a span outside of the others."""
    start, end = span
    found = []
    for a, b in sorted(others):
        if start < a and start < end:
            found.append((start, min(a, end)))
        start = max(start, b)
    return [*found, (start, end)] if start < end else found


def coarser(bars: Iterable[Bar], most: int, least: float) -> list[Bar]:
    """The bars, where those shorter than `least` ms are drawn with the next of their lane, as the group that takes most
    of their time; if more than `most` bars are left, `least` is doubled, down to a bar a lane."""
    found: list[Bar] = []
    lanes: dict[Any, list[Bar]] = defaultdict(list)
    for bar in bars:
        lanes[bar.which, bar.place].append(bar)
    for lane in lanes.values():
        cluster: list[Bar] = []
        for bar in sorted(lane, key=lambda bar: bar.start):
            if cluster and (bar.start - cluster[-1].stop >= least or cluster[-1].stop - cluster[0].start >= least):
                found.append(_joined(cluster))
                cluster = []
            cluster.append(bar)
        found.append(_joined(cluster))
    return found if len(found) <= max(most, len(lanes)) else coarser(found, most, 2 * least)


def _joined(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    taken: dict[str, float] = defaultdict(float)
    for bar in bars:
        taken[bar.group] += bar.ms
    phases = ", ".join(dict.fromkeys(name for bar in bars for name in bar.phase.split(", ")))
    group = max(taken, key=lambda name: taken[name])
    return replace(bars[0], group=group, phase=phases, step=-1, stop=bars[-1].stop)
