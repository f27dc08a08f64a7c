"""The recorded phases of a few runs: which runs are shown, what a phase is spent on, and when. The data of the
panels `phases` and `timeline`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from runner.output.run_tables import table_of
from runner.report.charts import place, varying
from runner.report.comparison import by_workload
from runner.report.fair import by_time
from runner.report.labels import labels
from runner.report.runs import Run

WHOLE = "pass"  # the phase that is a rank's whole pass
COMPUTE, MERGE, EXPOSED = "compute", "merge and copies", "exposed communication"
RANKS, OTHER = "wait for other ranks", "other"
TRANSFER, BLOCK = "transfer", "own block"  # these overlap the others
WAITS = (EXPOSED, RANKS)
BESIDE = (TRANSFER, BLOCK)
# light and dark pages have the same, of which exposed communication is the strongest
COLORS = {
    COMPUTE: "#5b8fd9", MERGE: "#7cc0b5", EXPOSED: "#e5343d", RANKS: "#eda63c", TRANSFER: "#a78bda", BLOCK: "#c98fae",
    OTHER: "#9aa0a6",
}  # fmt: skip
MERGES = ("comp_merge", "comp_place", "comp_stage_", "comp_shard_kv", "comp_num_den", "comp_final_output")
MOST_RUNS, MOST_RANKS = 4, 8
MOST_NAME = 60  # letters of the phases of a bar

Rows = list[dict[str, Any]]  # of a run's table of phases


def group_of(phase: str) -> str:
    """What the time of a phase is spent on."""
    for prefix, group in (("wait_room_", RANKS), ("wait_", EXPOSED), ("comm_", TRANSFER)):
        if phase.startswith(prefix):
            return group
    return BLOCK if not phase.startswith("comp_") else MERGE if phase.startswith(MERGES) else COMPUTE


@dataclass(frozen=True)
class Recorded:
    """A run of a panel, with its label, and one iteration of its phases."""

    label: str
    run: Run
    phases: Rows

    @property
    def placed(self) -> bool:
        """Whether the phases have a begin and an end, which earlier versions did not record."""
        return all(row.get("start_ms") is not None for row in self.phases)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are shown: all or, of many, some at equal distances."""
        world = 1 + max(row["rank"] for row in self.phases)
        n = min(world, MOST_RANKS)
        return [round(i * (world - 1) / max(1, n - 1)) for i in range(n)]


def median_iteration(rows: Rows) -> Rows:
    """The rows of the iteration whose time is the median; an iteration's time is the sum over its passes."""
    iterations: dict[int, Rows] = defaultdict(list)
    for row in rows:
        iterations[row["iteration"]].append(row)
    by_time = sorted(iterations.values(), key=lambda rows: sum(lengths(rows).values()))
    return by_time[(len(by_time) - 1) // 2]


def lengths(rows: Rows) -> dict[str, float]:
    """The ms of each pass of one iteration, of its slowest rank."""
    slowest: dict[str, float] = {}
    for row in rows:
        if row["phase"] == WHOLE:
            slowest[row["pass"]] = max(slowest.get(row["pass"], 0.0), row["ms"])
    return slowest


def chosen(runs: Sequence[Run], which: str) -> tuple[list[Recorded], str]:
    """The runs that a panel shows, the fastest first, and in words how they were chosen; none without phases of several
    ranks."""
    several = [run for run in runs if (run.world_size or 1) > 1 and run.result.phases]
    if not several:
        return [], ""

    def size(group: Sequence[Run]) -> tuple[bool, int, int]:
        return len({run.attention for run in group}) > 1, group[0].seq_len or 0, group[0].world_size or 0

    largest = max(by_workload(several), key=size)
    named, variants = labels(runs), size(largest)[0]
    fastest: dict[Any, Run] = {}
    for run in by_time(largest, which):
        fastest.setdefault(run.attention if variants else named[run], run)
    recorded = []
    for run in [*fastest.values()][:MOST_RUNS]:
        if phases := table_of(run.result, "phases"):
            recorded.append(Recorded(named[run], run, median_iteration(phases)))
    kind = "variant" if variants else "setting"
    where = place(largest[0], varying(several)).replace("\n", " ")
    return recorded, f"The fastest run of each {kind}{f' at {where}' if where else ''}, at most {MOST_RUNS}."


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
        {"run": recorded.label, "rank": rank, "pass": which, "group": group, "ms": round(time, 5)}
        for (rank, which, group), time in sorted(ms.items())
        if rank in recorded.ranks and time > 0
    ]


def timeline(recorded: Recorded) -> tuple[Rows, dict[str, float]]:
    """The bars of one iteration, with `start` and `stop` in ms, and when each pass begins. The pause between two passes, in which
    the ranks are aligned, is cut out. A rank that ends a pass before the slowest waits for other ranks."""
    bars: Rows = []
    passes: dict[str, float] = {}
    begin = 0.0
    for which in dict.fromkeys(row["pass"] for row in recorded.phases):
        rows = [row for row in recorded.phases if row["pass"] == which]
        whole = [row for row in rows if row["phase"] == WHOLE]
        shift = begin - min(row["start_ms"] for row in whole)
        passes[which], begin = begin, max(row["stop_ms"] for row in whole) + shift
        for row in [row for row in rows if row["rank"] in recorded.ranks]:
            start, stop, group = row["start_ms"] + shift, row["stop_ms"] + shift, group_of(row["phase"])
            name, lane = row["phase"], f"rank {row['rank']}{f' {group}' if group in BESIDE else ''}"
            if name == WHOLE:
                name, lane, group, start, stop = "end of the pass", f"rank {row['rank']}", RANKS, stop, begin
            bar = {"lane": lane, "pass": which, "group": group, "phase": name, "start": start, "stop": stop}
            bars.append(bar | ({"step": row["step"]} if row["step"] >= 0 else {}))
    return [bar for bar in bars if bar["start"] < bar["stop"]], passes


def coarser(bars: Rows, least: float) -> Rows:
    """The bars, where those shorter than `least` ms are drawn with the next of their lane, as the group that takes most of
    their time."""
    clusters: list[Rows] = []
    lane = itemgetter("lane", "pass")
    for bar in sorted(bars, key=lambda bar: (lane(bar), bar["start"])):
        last = clusters[-1] if clusters else []
        if last and lane(last[0]) == lane(bar) and max(bar["start"], last[-1]["stop"]) - last[0]["start"] < least:
            last.append(bar)
        else:
            clusters.append([bar])
    return [*map(_joined, clusters)]


def _joined(bars: Rows) -> dict[str, Any]:
    ms: dict[str, float] = defaultdict(float)
    for bar in bars:
        ms[bar["group"]] += bar["stop"] - bar["start"]
    names = ", ".join(dict.fromkeys(bar["phase"] for bar in bars))
    name = names if len(names) <= MOST_NAME else f"{names[:MOST_NAME]}…"
    start, stop = round(bars[0]["start"], 5), round(max(bar["stop"] for bar in bars), 5)
    joined = {"group": max(ms, key=lambda group: ms[group]), "phase": name, "start": start, "stop": stop}
    return bars[0] | joined | ({"step": ""} if len(bars) > 1 else {})
