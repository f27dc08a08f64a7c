"""The data of the panels of phases: which runs, what a rank's time is spent on, and when."""

import pytest

from runner.output.results import COLUMNS
from runner.report import charts
from runner.report.panels import panels
from runner.report.panels.recorded import (
    COMPUTE,
    EXPOSED,
    MERGE,
    OTHER,
    RANKS,
    Recorded,
    chosen,
    coarser,
    median_iteration,
    spent,
    timeline,
)
from runner.report.runs import read
from tests.support.paths import RESULTS
from tests.support.recorded import phase_rows, result, with_phases

pytestmark = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def recorded(rows):
    return Recorded("ring", None, median_iteration(rows))


def test_a_ranks_groups_add_up_to_the_iteration_of_the_slowest():
    rows = spent(recorded(phase_rows(world=3)))
    for rank in range(3):
        mine = {row["group"]: row["ms"] for row in rows if row["rank"] == rank and row["pass"] == "backward"}
        waits = {RANKS: rank} if rank else {}
        assert mine == {COMPUTE: 11, MERGE: 5 - rank, EXPOSED: 3, OTHER: 2, **waits}
        assert sum(mine.values()) == 21  # the middle iteration


def test_of_many_ranks_some_at_equal_distances_are_shown():
    ranks = recorded(phase_rows(world=64, iterations=1)).ranks
    assert len(ranks) == 8 and ranks[0] == 0 and ranks[-1] == 63


def bars(rows, group):
    return [(row["lane"], row["start"], row["stop"]) for row in rows if row["group"] == group]


def test_passes_follow_each_other_without_the_pause_between_them():
    rows, passes = timeline(recorded(phase_rows()))
    assert passes == {"forward": 0, "backward": 21}
    waits = [("rank 0", 7, 10), ("rank 1", 7, 10), ("rank 0", 28, 31), ("rank 1", 28, 31)]
    assert bars(rows, EXPOSED) == waits
    assert bars(rows, RANKS) == [("rank 1", 20, 21), ("rank 1", 41, 42)]  # it ends 1 ms before rank 0


def test_short_bars_are_drawn_with_their_neighbours_as_what_takes_most_of_their_time():
    bar = {"lane": "rank 0", "pass": "forward", "group": COMPUTE, "phase": "comp_block", "step": 0}
    spans = [(0, 10, COMPUTE), (10, 10.2, COMPUTE), (10.2, 10.8, EXPOSED), (11, 20, COMPUTE)]
    rows = [bar | {"start": start, "stop": stop, "group": group} for start, stop, group in spans]
    assert bars(coarser(rows, 1), COMPUTE) == [("rank 0", 0, 10), ("rank 0", 11, 20)]
    assert bars(coarser(rows, 1), EXPOSED) == [("rank 0", 10, 10.8)]


def test_the_fastest_runs_of_the_largest_size_of_several_variants_are_shown(tmp_path):
    for name, ms, length, options in (
        ("ring", 3, 8192, {}),
        ("ring", 3, 16384, {}),
        ("ring", 2.2, 16384, {"again": True}),
        ("zigzag", 2, 16384, {}),
        ("ring", 9, 32768, {}),  # alone at its size
    ):
        with_phases(tmp_path, result(name, ms, seq_len=length, world_size=2, options=options))
    runs, rule = chosen(read([tmp_path]), "total")
    assert [(run.run.attention, run.run.options) for run in runs] == [("zigzag", {}), ("ring", {"again": True})]
    assert rule == "The fastest run of each variant at S = 16,384, at most 4."


def lanes(folder):
    """Those of the timeline; none without one."""
    charts = [panel.spec["data"]["values"] for panel in panels(read([folder])) if panel.name == "timeline"]
    return {row["lane"] for rows in charts for row in rows if "lane" in row}


def test_results_without_starts_have_bars_and_no_timeline(tmp_path):
    with_phases(tmp_path, result("ring", 2.0, world_size=2), columns=COLUMNS["phases"][:6])
    assert not lanes(tmp_path) and not lanes(RESULTS / "h200-x4" / "variants")
    assert "phases" in [panel.name for panel in panels(read([tmp_path]))]


def test_the_timeline_has_a_lane_for_each_rank_and_one_for_its_transfers(tmp_path):
    with_phases(tmp_path, result("ring", 2.0, world_size=2))
    assert lanes(tmp_path) == {f"rank {rank}{kind}" for rank in (0, 1) for kind in ("", " transfer")}
