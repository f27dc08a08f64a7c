"""The panels appear where the runs call for them, and hold few rows."""

import pytest

from runner.measure import metrics
from runner.record.result import Result
from runner.report import charts
from runner.report.panels import panels
from runner.report.runs import Run, read
from tests.support.composing import resolved
from tests.support.paths import RESULTS
from tests.support.recorded import measured, result, written

pytestmark = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def stored(name):
    return read([RESULTS / name])


def rows(runs, name):
    """Those of the panel of this name; none without the panel."""
    return [row for panel in panels(runs) if panel.name == name for row in panel.spec["data"]["values"]]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("h200-x4/speed", "time tflops roofline predicted memory phases"),
        ("h200-x4/tree_scaling", "time tflops efficiency roofline memory phases"),
        ("cpu-x2/model_sharded", "time tflops efficiency loss"),
    ],
)
def test_panels_appear_where_the_runs_call_for_them(name, names):
    assert [panel.name for panel in panels(stored(name))] == names.split()


@pytest.mark.parametrize("name", ["h200-x4/context_parallel", "h200-x1/grouped", "h200-x4/variants"])
def test_no_two_points_of_stored_results_lie_in_one_place_and_none_is_lost(name):
    runs = charts.timed(stored(name))
    points = charts.points(runs, charts.Axes.of(runs))
    kept, _ = charts.thinned(charts.faceted(points), "over")
    assert len({(row["facet"], row["label"], row["over"]) for row in kept}) == len(points) == len(runs)


def test_many_points_are_thinned_at_the_same_places_for_all_lines_and_the_caption_says_so():
    points = [{"label": label, "facet": "", "over": i} for i in range(1, 1001) for label in ("a", "b", "c")]
    kept, note = charts.thinned(points, "over")
    assert "500 of 1,000 places on the x axis" in note
    assert len({row["over"] for row in kept}) * 3 == len(kept) and kept[-1]["over"] == 1000


@pytest.mark.parametrize(
    ("labels", "facets", "lines"),
    [
        ([f"{variant} kernel={n}" for variant in "abc" for n in range(4)], {"a", "b", "c"}, 4),
        ([f"v{n}" for n in range(17)], {""}, 17),
    ],
)
def test_lines_that_are_too_many_for_their_colours_have_a_facet_for_each_variant(labels, facets, lines):
    kept = charts.faceted([{"label": label, "variant": label.split()[0], "panel": ""} for label in labels])
    assert {row["facet"] for row in kept} == facets and len({row["label"] for row in kept}) == lines


def test_the_roofline_has_no_point_far_above_its_ceilings():
    runs = stored("h200-x4/speed")
    points = rows(runs, "roofline")
    assert {row["facet"] for row in points} == {"device memory, bf16", "links, 4 ranks, bf16"}
    assert all(0 < row["share"] < 1.03 for row in points if row["tflops"])
    highest = max(run.result.ceilings["matmul_tflops"] for run in runs)
    assert max(row["ideal"] for row in points) == charts.short(highest)


def test_recorded_bytes_of_memory_are_those_of_the_schedule():
    from runner.report.modelled import kernel_bytes

    value = measured("ring_run")
    without = Run.of(Result.of(value))
    times = {which: times["median"] for which, times in value["timing"]["passes"].items()}
    counted = metrics.compute(resolved("seq_len=1024"), times, {"matmul_tflops": 1.0, "copy_gb_s": 10.0})
    for which in ("forward", "backward", "total"):
        assert counted.passes[which].memory_bytes == kernel_bytes(without, which)


def test_time_is_shown_over_density_where_masks_of_one_workload_differ(tmp_path):
    values = [result("balanced", ms, seq_len=8192) for ms in (4.0, 3.0, 1.0)]
    for value, density in zip(values, (0.5, 0.25, 0.125), strict=True):
        mask = {"name": "chunked", "parameters": {"chunk": int(8192 * density)}}
        value["experiment"]["workload"]["named_mask"] = mask
        value["metrics"]["density"] = density
    points = rows(read([written(tmp_path, *values)]), "density")
    ideal = {row["density"]: (row["time"], row["ideal"]) for row in points}
    assert ideal == {0.5: (12.0, 12.0), 0.25: (9.0, 6.0), 0.125: (3.0, 3.0)}
