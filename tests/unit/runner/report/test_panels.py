"""The panels appear where the runs call for them, and hold few rows."""

import dataclasses

import pytest

from runner.measure import metrics
from runner.output.record import Result
from runner.report import charts
from runner.report.panels import panels
from runner.report.runs import read
from tests.support.composing import resolved
from tests.support.paths import RESULTS
from tests.support.recorded import measured, result, written

pytestmark = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def stored(name: str) -> list:
    return read([RESULTS / name])


def values(panel) -> list[dict]:
    return panel.spec["data"]["values"]


def drawn(runs, name: str, which: str = "total") -> list:
    return [panel for panel in panels(runs, which) if panel.name == name]


def test_peak_memory_has_a_point_for_each_variant_and_length_and_needs_two_lengths():
    runs = stored("h200-x2/speed")
    [panel] = drawn(runs, "memory")
    assert {row["over"] for row in values(panel)} == {run.seq_len for run in runs}
    highest = max(run.result.peak_bytes for run in runs) / 2**30
    assert max(row["peak"] for row in values(panel)) == pytest.approx(highest, rel=1e-4)
    assert drawn([run for run in runs if run.seq_len == runs[0].seq_len], "memory") == []


def test_loss_curves_are_of_trained_models_only():
    runs = stored("cpu-x2/model_sharded")
    trained = [run for run in runs if run.ok and run.result.model and run.result.model.loss_curve]
    [panel] = drawn(runs, "loss")
    assert {charts.short(run.result.model.loss, 7) for run in trained} <= {row["loss"] for row in values(panel)}
    assert drawn([run for run in runs if run not in trained], "loss") == []


@pytest.mark.parametrize("name", ["h200-x4/context_parallel", "h200-x1/grouped", "h200-x4/variants", "h200-x2/speed"])
def test_no_two_points_of_stored_results_lie_in_one_place_and_none_is_lost(name):
    runs = charts.timed(stored(name))
    axes = charts.Axes.of(runs)
    rows = charts.points(runs, axes)
    kept, _ = charts.thinned(charts.faceted(rows), "over")
    places = {(row["facet"], row["label"], row["over"]) for row in kept}
    assert len(places) == len(rows) >= len(runs)
    assert not any("none" in row["panel"].split() for row in rows)


def test_many_points_are_thinned_at_the_same_places_for_all_lines_and_the_caption_says_so():
    rows = [{"label": label, "facet": "", "over": 1024 * i} for i in range(1, 1001) for label in ("a", "b", "c")]
    kept, note = charts.thinned(rows, "over")
    assert len(kept) <= charts.MOST_POINTS and "500 of 1,000 places on the x axis" in note
    assert len({row["over"] for row in kept}) * 3 == len(kept) and kept[-1]["over"] == 1024 * 1000
    kept, note = charts.thinned([row | {"facet": str(row["over"] // 1024 % 40)} for row in rows], "over")
    assert len({row["facet"] for row in kept}) == charts.MOST_FACETS and "30 of 40 panels" in note


@pytest.mark.parametrize(
    ("labels", "panels", "facets", "lines"),
    [
        ([f"{variant} kernel={n}" for variant in "abc" for n in range(4)], [""], {"a", "b", "c"}, 4),
        ([f"v{n}" for n in range(17)], [""], {""}, 17),
        (["ring"], ["S = 1", "S = 2"], {""}, 2),
        (["ring", "zigzag"], ["S = 1", "S = 2"], {"S = 1", "S = 2"}, 2),
    ],
)
def test_lines_that_are_too_many_for_their_colours_have_a_facet_for_each_variant(labels, panels, facets, lines):
    rows = [{"label": label, "variant": label.split()[0], "panel": panel} for label in labels for panel in panels]
    kept = charts.faceted(rows)
    assert {row["facet"] for row in kept} == facets and len({row["label"] for row in kept}) == lines


def test_efficiency_is_over_the_world_size_whatever_else_is_swept():
    runs = stored("h200-x4/tree_scaling")
    [panel] = drawn(runs, "efficiency")
    assert {row["facet"] for row in values(panel)} == {f"S = {run.seq_len:,}" for run in runs}
    assert {row["over"] for row in values(panel)} == {1, 2, 4}
    assert {row["ideal"] for row in values(panel)} == {1}
    assert drawn(runs, "efficiency", "forward") == [] == drawn(stored("h200-x2/speed"), "efficiency")


def test_the_roofline_has_no_point_far_above_its_ceilings():
    runs = stored("h200-x4/speed")
    [panel] = drawn(runs, "roofline")
    assert {row["facet"] for row in values(panel)} == {"device memory, bf16", "links, 4 ranks, bf16"}
    assert all(0 < row["share"] < 1.03 for row in values(panel) if row["tflops"])
    highest = max(run.result.ceilings["matmul_tflops"] for run in runs)
    assert max(row["ideal"] for row in values(panel)) == charts.short(highest)
    assert drawn([dataclasses.replace(run, model="llama3_8b") for run in runs], "roofline") == []


def test_recorded_bytes_of_memory_are_those_of_the_schedule():
    from runner.report.modelled import kernel_bytes
    from runner.report.runs import Run

    value = measured("ring_run")
    without = Run.of(Result.of(value))
    times = {which: times["median"] for which, times in value["timing"]["passes"].items()}
    counted = metrics.compute(resolved("seq_len=1024"), times, {"matmul_tflops": 1.0, "copy_gb_s": 10.0})
    recorded = Run.of(Result.of(value | {"metrics": counted}))
    for which in ("forward", "backward", "total"):
        assert recorded.result.metrics.passes[which].memory_bytes == kernel_bytes(without, which)


def masked(density: float, ms: float, size: int, s: int = 8192) -> dict:
    value = result("balanced", ms, seq_len=s)
    value["experiment"]["workload"]["named_mask"] = {"name": "chunked", "parameters": {"chunk": size}}
    value["metrics"]["density"] = density
    return value | {"name": f"balanced_{size}_{s}"}


def test_time_is_shown_over_density_where_masks_of_one_workload_differ(tmp_path):
    masks = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 2048), masked(0.125, 1.0, 1024)]
    [panel] = drawn(read([written(tmp_path / "a", *masks)]), "density")
    assert {row["density"]: row["time"] for row in values(panel)} == {0.5: 12.0, 0.25: 9.0, 0.125: 3.0}
    assert {row["density"]: row["ideal"] for row in values(panel)} == {0.5: 12.0, 0.25: 6.0, 0.125: 3.0}
    lengths = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 4096, s=16384)]  # a density for each length, not each mask
    assert drawn(read([written(tmp_path / "b", *lengths)]), "density") == []


def test_errors_are_those_of_the_worst_run_of_each_variant_beside_a_local_call():
    runs = stored("h200-x4/speed")
    [panel] = drawn(runs, "errors")
    rows = {(row["label"], row["panel"]): row for row in values(panel)}
    errors = [run.result.correctness.tensors["dq"] for run in runs if run.attention == "ulysses"]
    worst = max(errors, key=lambda error: error.rel_l2)
    row = rows["ulysses flash4", "dq"]
    least = min(error.rel_l2 for error in errors)
    assert (row["error"], row["local"], row["least"]) == (
        charts.short(worst.rel_l2, 3), charts.short(worst.local_rel_l2, 3), charts.short(least, 3),
    )  # fmt: skip
    failed = dataclasses.replace(
        runs[0].result, correctness=dataclasses.replace(runs[0].result.correctness, passed=False)
    )
    [panel] = drawn([dataclasses.replace(runs[0], result=failed), *runs], "errors")
    assert not all(row["passed"] for row in values(panel))


def test_predictions_are_drawn_where_rates_are_measured_and_state_their_error():
    runs = stored("h200-x4/speed")
    [panel] = drawn(runs, "predicted")
    assert {row["label"] for row in values(panel)} == {"zigzag", "zigzag_llama3", "ulysses"}
    assert "Errors: median" in panel.note
    for gpu in ("another GPU", None):
        assert drawn([dataclasses.replace(run, gpu=gpu) for run in runs], "predicted") == []
