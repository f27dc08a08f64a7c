"""The data of the panels of phases: which runs, what a rank's time is spent on, and when."""

import json
import random
from pathlib import Path

import pytest

from runner.report import charts
from runner.report.panels import Panel, panels
from runner.report.panels.recorded import (
    COMPUTE,
    EXPOSED,
    MERGE,
    MOST_RANKS,
    OTHER,
    OVERLAPPED,
    RANKS,
    TRANSFER,
    Recorded,
    chosen,
    coarser,
    group_of,
    lengths,
    median_iteration,
    minus,
    spent,
    timeline,
)
from runner.report.runs import Run, read
from tests.support.paths import RESULTS
from tests.support.recorded import kernel_rows, phase_rows, result, with_kernels, with_phases, written

needs_charts = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def recorded(rows: list[dict], kernels: list[dict] = ()) -> Recorded:
    return Recorded("ring", None, median_iteration(rows), list(kernels))


@pytest.mark.parametrize(
    ("phase", "group"),
    [
        ("comp_block", COMPUTE), ("comp_local_attention", COMPUTE), ("comp_merge", MERGE), ("comp_stage_kv", MERGE),
        ("wait_kv", EXPOSED), ("wait_room_kv", RANKS), ("comm_kv", TRANSFER),
    ],
)  # fmt: skip
def test_each_phase_has_a_group(phase, group):
    assert group_of(phase) == group


def test_a_ranks_groups_add_up_to_the_iteration_of_the_slowest():
    rows = spent(recorded(phase_rows(world=3)))
    for rank in range(3):
        mine = {row["group"]: row["ms"] for row in rows if row["rank"] == rank and row["pass"] == "backward"}
        assert mine == {COMPUTE: 11, MERGE: 5 - rank, EXPOSED: 3, OTHER: 2, RANKS: rank}
        assert sum(mine.values()) == 21  # the middle iteration


def test_the_median_iteration_is_drawn():
    assert lengths(median_iteration(phase_rows(iterations=5))) == {"forward": 22, "backward": 22}


def test_of_many_ranks_some_at_equal_distances_are_shown():
    ranks = recorded(phase_rows(world=64, iterations=1)).ranks
    assert len(ranks) == MOST_RANKS and ranks[0] == 0 and ranks[-1] == 63
    assert recorded(phase_rows(world=3, iterations=1)).ranks == [0, 1, 2]


def test_passes_follow_each_other_without_the_pause_between_them():
    bars, passes = timeline(recorded(phase_rows()))
    assert passes == {"forward": 0, "backward": 21}
    waits = [(bar.rank, bar.start, bar.stop) for bar in bars if bar.group == EXPOSED]
    assert waits == [(0, 7, 10), (1, 7, 10), (0, 28, 31), (1, 28, 31)]
    # rank 1 ends 1 ms before rank 0
    assert [(bar.rank, bar.start, bar.stop) for bar in bars if bar.group == RANKS] == [(1, 20, 21), (1, 41, 42)]


def test_kernels_begin_with_the_phases_of_their_pass_and_communication_is_exposed_or_overlapped():
    kernels = [row | {"phase": row["kernel"]} for row in kernel_rows()]
    bars, passes = timeline(recorded(phase_rows(), kernels))
    assert passes == {"forward": 0, "backward": 31}  # kernels take 31 ms, phases 21
    assert [(bar.which, bar.group, bar.start, bar.stop) for bar in bars if bar.kernel and bar.rank == 1] == [
        ("forward", COMPUTE, 1, 11), ("forward", OVERLAPPED, 6, 11), ("forward", COMPUTE, 16, 31), ("forward", EXPOSED, 11, 16),
        ("backward", COMPUTE, 32, 42), ("backward", OVERLAPPED, 37, 42), ("backward", COMPUTE, 47, 62),
        ("backward", EXPOSED, 42, 47),
    ]  # fmt: skip
    assert_apart(bars)
    second = [
        row | {"start_ms": row["start_ms"] + 1, "phase": "Memcpy PtoP"} for row in kernels if "nccl" in row["kernel"]
    ]
    assert timeline(recorded(phase_rows(), kernels + second))[0] == bars  # of two at once the first is drawn
    without = timeline(recorded(phase_rows()))[0]
    ends = {(bar.which, bar.rank, bar.stop - passes[bar.which]) for bar in bars if bar.group == RANKS}
    assert ends == {("forward", 1, 21), ("backward", 1, 21)} and len(without) == sum(not bar.kernel for bar in bars)


def assert_apart(bars) -> None:
    """No two bars of one lane overlap."""
    lanes: dict = {}
    for bar in sorted(bars, key=lambda bar: bar.start):
        assert bar.start >= lanes.get(bar.lane, 0.0) and bar.stop > bar.start
        lanes[bar.lane] = bar.stop


def test_whatever_was_recorded_no_bars_of_a_lane_overlap_and_all_lie_within_the_iteration():
    chance = random.Random(0)
    names = ["comp_block", "comp_merge", "wait_kv", "wait_room_kv", "comm_kv", "mine"]
    for _ in range(50):
        rows = []
        for rank in range(2):
            start, stop = chance.uniform(0, 2), chance.uniform(50, 60)
            common = {"iteration": 0, "rank": rank, "pass": "forward", "step": 0}
            rows.append(common | {"phase": "pass", "ms": stop - start, "start_ms": start, "stop_ms": stop})
            for _ in range(chance.randrange(30)):
                a, b = sorted((chance.uniform(start, stop), chance.uniform(start, stop)))
                rows.append(common | {"phase": chance.choice(names), "ms": b - a, "start_ms": a, "stop_ms": b})
        whole = [row for row in rows if row["phase"] == "pass"]
        end = max(row["stop_ms"] for row in whole) - min(row["start_ms"] for row in whole)
        bars, _ = timeline(recorded(rows))
        assert_apart(bars)
        assert all(bar.start >= 0 and bar.stop <= end + 1e-9 for bar in bars)
        few = coarser(bars, 20, 0.1)
        assert_apart(few)
        assert len(few) <= 20 and {bar.lane for bar in few} == {bar.lane for bar in bars}
        waits = [bar for bar in bars if bar.group in (EXPOSED, RANKS)]
        computes = [bar for bar in bars if bar.group in (COMPUTE, MERGE)]
        assert not any(
            wait.rank == bar.rank and wait.start < bar.stop - 1e-9 and bar.start < wait.stop - 1e-9
            for wait in waits
            for bar in computes
        )


def test_minus_keeps_what_lies_outside():
    assert minus((0, 10), [(8, 12), (2, 3), (2.5, 4)]) == [(0, 2), (4, 8)]
    assert minus((0, 10), [(-1, 11)]) == [] and minus((0, 10), []) == [(0, 10)]


def drawn(name: str, runs: list[Run]) -> list[Panel]:
    return [panel for panel in panels(runs) if panel.name == name]


@pytest.fixture
def swept(tmp_path) -> list[Run]:
    """Three variants at two lengths, the ring with two options."""
    for name, ms in (("ring", 3.0), ("zigzag", 2.0), ("ulysses", 2.5)):
        for length in (8192, 16384):
            with_phases(tmp_path, result(name, ms, seq_len=length, world_size=2))
    with_phases(tmp_path, result("ring", 9.0, seq_len=32768, world_size=2))  # alone
    with_phases(tmp_path, result("ring", 2.2, seq_len=16384, world_size=2, options={"again": True}))
    return read([tmp_path])


def test_the_fastest_runs_of_the_largest_size_are_shown_and_the_rule_is_said(swept):
    shown, rule = chosen(swept, "total", 3, placed=True)
    assert [(run.run.attention, run.run.ms("total")) for run in shown] == [
        ("zigzag", 6.0), ("ring", pytest.approx(6.6)), ("ulysses", 7.5),
    ]  # fmt: skip
    assert rule == "The fastest run of each variant at S = 16,384."
    shown, rule = chosen(swept, "total", 2, placed=True)
    assert len(shown) == 2 and rule.startswith("The 2 fastest of 3 variants")
    rings = [run for run in swept if run.attention == "ring" and run.seq_len == 16384]
    shown, rule = chosen(rings, "total", 3, placed=True)
    assert [run.label for run in shown] == ["again=True", "ring"] and rule == "The fastest run of each setting."


@needs_charts
def test_results_without_starts_have_bars_and_no_timeline(tmp_path):
    old = read([with_phases(tmp_path / "old", result("ring", 2.0, world_size=2), starts=False)])
    assert drawn("timeline", old) == [] and len(drawn("phases", old)) == 1
    packed = read([RESULTS / "h200-x4" / "variants"])
    assert drawn("timeline", packed) == [] and len(drawn("phases", packed)) == 1
    without = read([written(tmp_path / "none", result("ring", 2.0))])
    assert drawn("timeline", without) == [] and drawn("phases", without) == []


@needs_charts
def test_the_timeline_has_a_lane_of_kernels_below_the_phases_or_alone(tmp_path):
    def lanes_of(folder: Path) -> tuple[set, dict, str]:
        [panel] = drawn("timeline", read([folder]))
        rows = panel.spec["data"]["values"]
        named = {(row["l"], row["p"]) for row in rows if row.get("g") == OVERLAPPED}
        return {row["l"] for row in rows if "l" in row}, named, panel.note

    value = result("ring", 2.0, world_size=2)
    lanes, overlapped, note = lanes_of(with_kernels(tmp_path / "alone", value))
    assert lanes == {"rank 0 kernels", "rank 1 kernels"}
    assert overlapped == {(lane, "ncclDevKernel_SendRecv") for lane in lanes}
    assert "within 1 ms" in note and "4 shortest kernels are left out" in note and "empty" not in note
    value["phases"] = None
    assert drawn("phases", read([with_kernels(tmp_path / "without", value)])) == []
    both = with_phases(tmp_path / "both", result("ring", 2.0, world_size=2))
    with_kernels(
        both, value | {"phases": {"forward": {"exposed_communication_ms": 0.125}}, "name": next(both.iterdir()).name}
    )
    lanes, _, note = lanes_of(both)
    assert lanes == {f"rank {r}{what}" for r in (0, 1) for what in ("", " kernels", " transfer")} and "empty" in note


@needs_charts
def test_the_panels_are_small(swept):
    for name in ("phases", "timeline"):
        [panel] = drawn(name, swept)
        assert len(json.dumps(panel.spec)) < 30_000
