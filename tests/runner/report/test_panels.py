"""The panels appear where the runs call for them, and hold few rows."""

import dataclasses
from pathlib import Path

import pytest

from runner.measure import metrics
from runner.output.record import Result
from runner.report import charts
from runner.report.runs import read
from tests.support.composing import resolved
from tests.support.recorded import measured, result, written

CEILINGS = {"matmul_tflops": 1.0, "copy_gb_s": 10.0}
RESULTS = Path(__file__).parents[3] / "results"
pytestmark = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


@pytest.fixture(scope="module")
def stored():
    """The runs of each stored sweep, by machine and name."""
    folders = sorted({path.parent.parent for path in RESULTS.glob("*/*/*/result.json")} | set(RESULTS.glob("*/*/")))
    sweeps = {}
    for folder in folders:
        if folder.is_dir():
            sweeps[f"{folder.parent.name}/{folder.name}"] = read([folder])
    return sweeps


def values(panel) -> list[dict]:
    return panel.spec["data"]["values"]


def test_peak_memory_has_a_point_for_each_variant_and_length_and_needs_two_lengths(stored):
    from runner.report.panels import memory

    runs = [run for run in stored["h200-x2/speed"] if run.ok and run.result.peak_bytes]
    [panel] = memory.draw(runs)
    rows = values(panel)
    assert {row["over"] for row in rows} == {run.seq_len for run in runs}
    highest = max(run.result.peak_bytes for run in runs) / 2**30
    assert max(row["peak"] for row in rows) == pytest.approx(highest, rel=1e-4)
    [again] = memory.draw([*runs, *(dataclasses.replace(run) for run in runs)])
    assert values(again) == rows
    length = runs[0].seq_len
    assert memory.draw([run for run in runs if run.seq_len == length]) == []


def test_small_peaks_are_in_a_unit_that_shows_them(tmp_path):
    from runner.report.panels import memory

    kept = [result("ring", 2.0, seq_len=s) for s in (8192, 16384)]
    for value in kept:
        value["memory"] = {"by_rank": [{"peak_resident": 300 * value["config"]["seq_len"]}]}
    [panel] = memory.draw(read([written(tmp_path, *kept)]))
    assert "peak memory, MiB" in str(panel.spec) and values(panel)[0]["peak"] == pytest.approx(300 / 128, rel=1e-3)


def test_loss_curves_are_of_trained_models_only(stored):
    from runner.report.panels import loss

    runs = stored["cpu-x2/model_sharded"]
    trained = [run for run in runs if run.ok and run.result.model and run.result.model.loss_curve]
    assert trained
    [panel] = loss.draw(runs)
    last = {row["loss"] for row in values(panel)}
    assert {charts.short(run.result.model.loss, 7) for run in trained} <= last
    assert loss.draw([run for run in runs if run not in trained]) == []
    assert loss.draw(stored["h200-x2/strong_scaling"]) == []


def test_no_panel_of_stored_results_has_more_than_six_lines_and_none_is_lost(stored):
    """Of one variant, too: `grouped` has 9 and 12 settings, `variants` 8 variants with kernels of their own."""
    most = 0
    for name, runs in stored.items():
        timed = [run for run in runs if run.ok]
        axes = charts.Axes.of(timed)
        rows = charts.points(timed, axes)
        most = max(most, len({row["label"] for row in rows}))
        found = charts.shown(rows).rows
        lines: dict[str, set] = {}
        for row in found:
            lines.setdefault(row["panel"], set()).add(row["label"])
        assert all(len(labels) <= charts.MOST_LINES for labels in lines.values()), name
        places = [(row["panel"], row["label"], row["over"]) for row in found]
        if axes.over:
            assert len(places) == len(set(places)) == len(rows), f"{name}: two points in one place"
        assert not any("none" in row["panel"].split() for row in rows if row["panel"] != "no setting"), name
        assert all(row["p10"] <= row["time"] <= row["p90"] for row in rows if row["p10"] is not None), name
    assert most > 3 * charts.MOST_LINES


def test_lines_and_bars_show_their_spread(stored):
    from runner.report.panels import times

    lines, _ = times.draw(stored["h200-x4/context_parallel"])
    assert any("y2" in layer["encoding"] for layer in lines.spec["spec"]["layer"])
    assert len(values(lines)) == sum(run.ok for run in stored["h200-x4/context_parallel"])
    bars = times.draw(stored["h200-x2/same_kernel"])
    assert all(any("x2" in layer["encoding"] for layer in panel.spec["layer"]) for panel in bars)
    for panel, turn in zip(bars, (1, -1), strict=True):  # the best on top, in each panel
        field = panel.name
        shown = [row[field] * turn for row in values(panel)]
        assert shown == sorted(shown)
    assert "p10 to p90" in bars[0].note and "p90" in bars[1].note


def test_many_points_are_thinned_at_the_same_places_for_all_lines_and_the_caption_says_so():
    rows = [
        {"label": label, "variant": label, "whose": "ours", "panel": "", "over": 1024 * i}
        for i in range(1, 1001)
        for label in ("a", "b", "c")
    ]
    found = charts.shown(rows)
    assert len(found.rows) <= charts.MOST_POINTS + 3 and "of 3,000 points: one place of 2" in found.note
    assert len({row["over"] for row in found.rows}) * 3 == len(found.rows)
    assert max(row["over"] for row in found.rows) == 1024 * 1000
    many = [row | {"panel": str(row["over"] // 1024 % 40)} for row in rows]
    assert len({row["panel"] for row in charts.shown(many).rows}) == charts.MOST_FACETS
    few = charts.few_points(rows, 100)
    assert len(few.rows) == 100 and "100 of 3,000 runs" in few.note and charts.few_points(rows[:5]).note == ""


@pytest.mark.parametrize("low, high", [(1.6e-3, 4.8e-3), (3, 10), (0.9, 1.4), (0.02, 5000), (47, 660), (19.9, 70)])
def test_a_logarithmic_axis_has_enough_ticks_and_not_too_many(low, high):
    from runner.report.drawing import logarithmic

    ticks = logarithmic(low, high)[1].to_dict()["values"]
    assert 4 <= len(ticks) <= 12 and low <= min(ticks) and max(ticks) <= high and len(set(ticks)) == len(ticks)


def test_efficiency_is_over_the_world_size_whatever_else_is_swept(stored):
    from runner.report.panels import scaling

    runs = stored["h200-x4/tree_scaling"]
    assert charts.Axes.of(runs).over == "seq_len"
    [panel] = scaling.draw(runs)
    rows = values(panel)
    assert {row["panel"] for row in rows} == {f"S = {run.seq_len:,}" for run in runs}
    assert {row["over"] for row in rows} == {1, 2, 4}
    assert all(row["efficiency_p90"] <= row["efficiency"] <= row["efficiency_p10"] for row in rows)
    ideal = [layer for layer in panel.spec["spec"]["layer"] if layer["encoding"].get("y", {}).get("datum") == 1]
    assert ideal and scaling.draw(runs, "forward") == []
    assert scaling.draw(stored["h200-x2/speed"]) == []


def test_the_roofline_has_no_point_far_above_its_ceilings(stored):
    from runner.report.panels import roofline

    runs = stored["h200-x4/speed"]
    [panel] = roofline.draw(runs)
    points = [row for row in values(panel) if not row.get("roof")]
    assert {row["panel"] for row in points} == {"device memory, bf16", "links, 4 ranks, bf16"}
    assert all(0 < row["share"] < 1.03 for row in points)
    run = next(run for run in runs if run.attention == "ulysses" and run.seq_len == 131072)
    metrics = run.result.metrics
    total = metrics.passes["total"]
    linked = metrics.flops["total"] / 4 / max(sum(of.values()) for of in total.bytes_received_by_rank)
    assert charts.short(linked) in {row["intensity"] for row in points}
    roof = [row for row in values(panel) if row.get("roof")]
    assert max(row["tflops"] for row in roof) == charts.short(max(run.result.ceilings["matmul_tflops"] for run in runs))
    assert roofline.draw([dataclasses.replace(run, model="llama3_8b") for run in runs]) == []


def test_recorded_bytes_of_memory_are_those_of_the_schedule():
    from runner.report.modelled import kernel_bytes
    from runner.report.runs import Run

    value = measured("ring_run")
    without = Run.of(Result.of(value))
    spec = resolved("seq_len=1024")
    found = metrics.compute(spec, {which: t["median"] for which, t in value["timing"]["passes"].items()}, CEILINGS)
    recorded = Run.of(Result.of(value | {"metrics": found}))
    for which in ("forward", "backward", "total"):
        assert recorded.result.metrics.passes[which].memory_bytes == kernel_bytes(without, which)
    assert kernel_bytes(recorded, "optimizer") is None


def test_kernels_at_shapes_are_a_heat_map_of_the_fastest(stored):
    from runner.report.panels import kernels

    runs = stored["h200-x1/kernels"]
    [panel] = kernels.draw(runs)
    rows = values(panel)
    assert len(rows) == sum(run.ok for run in runs)
    for shape in {row["shape"] for row in rows}:
        of = [row for row in rows if row["shape"] == shape]
        assert max(row["share"] for row in of) == 1 == min(of, key=lambda row: row["time"])["share"]
    assert kernels.draw(stored["h200-x2/speed"]) == []  # kernel=auto
    assert kernels.draw([run for run in runs if run.kernel == "flash4"]) == []
    assert kernels.draw(stored["h200-x1/do_bench"]) == []  # one shape


def masked(density: float, ms: float, size: int, s: int = 8192) -> dict:
    value = result("balanced", ms, seq_len=s)
    value["experiment"]["workload"]["named_mask"] = {"name": "chunked", "parameters": {"chunk": size}}
    value["metrics"]["density"] = density
    return value | {"name": f"balanced_{size}_{s}"}


def test_time_is_shown_over_density_where_masks_of_one_workload_differ(tmp_path):
    from runner.report.panels import density

    kept = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 2048), masked(0.125, 1.0, 1024)]
    [panel] = density.draw(read([written(tmp_path / "a", *kept)]))
    rows = {row["density"]: row for row in values(panel)}
    assert {d: row["time"] for d, row in rows.items()} == {0.5: 12.0, 0.25: 9.0, 0.125: 3.0}
    assert {d: row["ideal"] for d, row in rows.items()} == {0.5: 12.0, 0.25: 6.0, 0.125: 3.0}
    assert "chunked(chunk=2048)" in rows[0.25]["mask"]
    lengths = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 4096, s=16384)]  # a density for each length, not each mask
    assert density.draw(read([written(tmp_path / "b", *lengths)])) == []


def test_errors_are_those_of_the_worst_run_of_each_variant_beside_a_local_call(stored):
    from runner.report.panels import errors

    runs = stored["h200-x4/speed"]
    [panel] = errors.draw(runs)
    rows = {(row["label"], row["tensor"]): row for row in values(panel)}
    assert {tensor for _, tensor in rows} == set(errors.TENSORS)
    ulysses = [run.result.correctness.tensors["dq"] for run in runs if run.attention == "ulysses"]
    row = next(row for (label, tensor), row in rows.items() if label.startswith("ulysses") and tensor == "dq")
    worst = max(ulysses, key=lambda error: error.rel_l2)
    assert row["error"] == charts.short(worst.rel_l2, 3) and row["local"] == charts.short(worst.local_rel_l2, 3)
    assert row["least"] == charts.short(min(error.rel_l2 for error in ulysses), 3)
    one = dataclasses.replace(runs[0].result, correctness=dataclasses.replace(runs[0].result.correctness, passed=False))
    failed = errors.draw([dataclasses.replace(runs[0], result=one), *runs])
    assert [row["label"] for row in values(failed[0]) if not row["passed"]]
    assert errors.draw([run for run in runs if run.attention == "ulysses" and run.seq_len == 8192]) == []


def test_predictions_are_drawn_where_rates_are_measured_and_state_their_error(stored):
    from runner.predict import validation
    from runner.report.panels import predicted

    runs = stored["h200-x4/speed"]
    [panel] = predicted.draw(runs)
    found = validation.points(runs)
    assert len(values(panel)) == len(found) and "Errors: median" in panel.note
    assert {row["measured"] for row in values(panel)} == {charts.short(point.measured) for point in found}
    assert predicted.draw([dataclasses.replace(run, gpu="another GPU") for run in runs]) == []


def test_pictures_have_the_colors_of_the_page():
    from runner.report.drawing import COLORS

    script = (Path(charts.__file__).parent / "assets" / "page.js").read_text()
    assert ", ".join(f'"{color}"' for color in COLORS) in script
