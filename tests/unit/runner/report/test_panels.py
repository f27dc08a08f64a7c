"""The panels appear where the runs call for them, and hold few rows."""

import dataclasses
from pathlib import Path

import pytest

from runner.measure import metrics
from runner.output.record import Result
from runner.report import charts
from runner.report.panels import panels
from runner.report.runs import read
from tests.support.composing import resolved
from tests.support.paths import RESULTS
from tests.support.recorded import measured, result, written

CEILINGS = {"matmul_tflops": 1.0, "copy_gb_s": 10.0}
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
    """The rows of a panel without those of its dashed line."""
    return [row for row in panel.spec["data"]["values"] if not row.get("guide")]


def guides(panel) -> list[dict]:
    return [row for row in panel.spec["data"]["values"] if row.get("guide")]


def drawn(runs, name: str, which: str = "total") -> list:
    return [panel for panel in panels(runs, which) if panel.name == name]


def test_peak_memory_has_a_point_for_each_variant_and_length_and_needs_two_lengths(stored):
    runs = [run for run in stored["h200-x2/speed"] if run.ok and run.result.peak_bytes]
    [panel] = drawn(runs, "memory")
    rows = values(panel)
    assert {row["over"] for row in rows} == {run.seq_len for run in runs}
    highest = max(run.result.peak_bytes for run in runs) / 2**30
    assert max(row["peak"] for row in rows) == pytest.approx(highest, rel=1e-4)
    [again] = drawn([*runs, *(dataclasses.replace(run) for run in runs)], "memory")
    assert values(again) == rows
    length = runs[0].seq_len
    assert drawn([run for run in runs if run.seq_len == length], "memory") == []


def test_small_peaks_are_in_a_unit_that_shows_them(tmp_path):
    kept = [result("ring", 2.0, seq_len=s) for s in (8192, 16384)]
    for value in kept:
        value["memory"] = {"by_rank": [{"peak_resident": 300 * value["config"]["seq_len"]}]}
    [panel] = drawn(read([written(tmp_path, *kept)]), "memory")
    assert "peak memory, MiB" in str(panel.spec) and values(panel)[0]["peak"] == pytest.approx(300 / 128, rel=1e-3)


def test_loss_curves_are_of_trained_models_only(stored):
    runs = stored["cpu-x2/model_sharded"]
    trained = [run for run in runs if run.ok and run.result.model and run.result.model.loss_curve]
    assert trained
    [panel] = drawn(runs, "loss")
    last = {row["loss"] for row in values(panel)}
    assert {charts.short(run.result.model.loss, 7) for run in trained} <= last
    assert drawn([run for run in runs if run not in trained], "loss") == []
    assert drawn(stored["h200-x2/strong_scaling"], "loss") == []


def test_no_panel_of_stored_results_has_more_lines_than_colours_and_none_is_lost(stored):
    """Of one variant, too: `grouped` has 9 and 12 settings, `variants` 8 variants with kernels of their own."""
    most = 0
    for name, runs in stored.items():
        timed = charts.timed(runs)
        axes = charts.Axes.of(timed)
        rows = charts.points(timed, axes)
        most = max(most, len({row["label"] for row in rows}))
        kept, _ = charts.shown(rows)
        lines: dict[str, set] = {}
        for row in kept:
            lines.setdefault(row["panel"], set()).add(row["label"])
        assert all(len(labels) <= charts.MOST_LINES for labels in lines.values()), name
        places = [(row["panel"], row["label"], row["over"]) for row in kept]
        if axes.over:
            assert len(places) == len(set(places)) == len(rows), f"{name}: two points in one place"
        assert not any("none" in row["panel"].split() for row in rows if row["panel"] != "no setting"), name
        assert all(row["p10"] <= row["time"] <= row["p90"] for row in rows if row["p10"] is not None), name
    assert most > 2 * charts.MOST_LINES


def test_lines_and_bars_show_their_spread(stored):
    lines, rates = (drawn(stored["h200-x4/context_parallel"], name)[0] for name in ("time", "tflops"))
    assert any("y2" in layer["encoding"] for layer in lines.spec["spec"]["layer"])
    assert len(values(lines)) == len(charts.timed(stored["h200-x4/context_parallel"]))
    for panel, ends in ((lines, ("p10", "p90")), (rates, ("p90", "p10"))):
        for row in values(panel):
            low, high = (row[end] if panel is lines else row["tflops"] * row["time"] / row[end] for end in ends)
            assert (row["low"], row["high"]) == pytest.approx((low, high), rel=1e-4)
    bars = [drawn(stored["h200-x2/same_kernel"], name)[0] for name in ("time", "tflops")]
    assert all(any("x2" in layer["encoding"] for layer in panel.spec["layer"]) for panel in bars)
    for panel, turn in zip(bars, (1, -1), strict=True):  # the best on top, in each panel
        shown = [row[panel.name] * turn for row in values(panel)]
        assert shown == sorted(shown)
    assert "p10 to p90" in bars[0].note and "p90" in bars[1].note


def test_many_points_are_thinned_at_the_same_places_for_all_lines_and_the_caption_says_so():
    rows = [
        {"label": label, "whose": "ours", "panel": "", "over": 1024 * i}
        for i in range(1, 1001)
        for label in ("a", "b", "c")
    ]
    kept, note = charts.shown(rows)
    assert len(kept) <= charts.MOST_POINTS and "500 of 1,000 places on the x axis" in note
    assert len({row["over"] for row in kept}) * 3 == len(kept)
    assert max(row["over"] for row in kept) == 1024 * 1000
    many = [row | {"panel": str(row["over"] // 1024 % 40)} for row in rows]
    kept, note = charts.shown(many)
    assert len({row["panel"] for row in kept}) == charts.MOST_FACETS and "30 of 40 panels" in note
    kept, note = charts.few(rows, 100, "runs")
    assert len(kept) == 100 and "100 of 3,000 runs" in note and charts.few(rows[:5], 100, "runs") == (rows[:5], "")


@pytest.mark.parametrize(
    ("labels", "panels"),
    [
        ([f"{variant} kernel={n}" for variant in "abc" for n in range(4)], {"a", "b", "c"}),
        ([f"{variant} x={n}" for variant in "abcdefgh" for n in range(2)], {"x=0", "x=1"}),
        ([f"v{n}" for n in range(17)], {"1 of 3", "2 of 3", "3 of 3"}),
    ],
)
def test_more_lines_than_colours_are_split_by_a_word_of_their_labels_or_evenly(labels, panels):
    rows = [{"label": label, "whose": "ours", "panel": ""} for label in labels]
    split = charts.few_lines(rows)
    assert {row["panel"] for row in split} == panels and len({(r["panel"], r["label"]) for r in split}) == len(rows)


def test_efficiency_is_over_the_world_size_whatever_else_is_swept(stored):
    runs = stored["h200-x4/tree_scaling"]
    assert charts.Axes.of(runs).over == "seq_len"
    [panel] = drawn(runs, "efficiency")
    rows = values(panel)
    assert {row["panel"] for row in rows} == {f"S = {run.seq_len:,}" for run in runs}
    assert {row["over"] for row in rows} == {1, 2, 4}
    assert all(row["low"] <= row["efficiency"] <= row["high"] for row in rows)
    assert {row["efficiency"] for row in guides(panel)} == {1}
    assert drawn(runs, "efficiency", "forward") == []
    assert drawn(stored["h200-x2/speed"], "efficiency") == []


def test_the_roofline_has_no_point_far_above_its_ceilings(stored):
    runs = stored["h200-x4/speed"]
    [panel] = drawn(runs, "roofline")
    points = values(panel)
    assert {row["panel"] for row in points} == {"device memory, bf16", "links, 4 ranks, bf16"}
    assert all(0 < row["share"] < 1.03 for row in points)
    run = next(run for run in runs if run.attention == "ulysses" and run.seq_len == 131072)
    metrics = run.result.metrics
    total = metrics.passes["total"]
    linked = metrics.flops["total"] / 4 / max(sum(of.values()) for of in total.bytes_received_by_rank)
    assert charts.short(linked) in {row["intensity"] for row in points}
    assert max(row["tflops"] for row in guides(panel)) == charts.short(
        max(run.result.ceilings["matmul_tflops"] for run in runs)
    )
    assert drawn([dataclasses.replace(run, model="llama3_8b") for run in runs], "roofline") == []


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
    runs = stored["h200-x1/kernels"]
    [panel] = drawn(runs, "kernels")
    rows = values(panel)
    assert len(rows) == sum(run.ok for run in runs)
    assert {"calculate": "datum.fastest / datum.time", "as": "share"} in panel.spec["layer"][0]["transform"]
    assert drawn(stored["h200-x2/speed"], "kernels") == []  # kernel=auto
    assert drawn([run for run in runs if run.kernel == "flash4"], "kernels") == []
    assert drawn(stored["h200-x1/do_bench"], "kernels") == []  # one shape


def masked(density: float, ms: float, size: int, s: int = 8192) -> dict:
    value = result("balanced", ms, seq_len=s)
    value["experiment"]["workload"]["named_mask"] = {"name": "chunked", "parameters": {"chunk": size}}
    value["metrics"]["density"] = density
    return value | {"name": f"balanced_{size}_{s}"}


def test_time_is_shown_over_density_where_masks_of_one_workload_differ(tmp_path):
    kept = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 2048), masked(0.125, 1.0, 1024)]
    [panel] = drawn(read([written(tmp_path / "a", *kept)]), "density")
    rows = {row["density"]: row for row in values(panel)}
    assert {d: row["time"] for d, row in rows.items()} == {0.5: 12.0, 0.25: 9.0, 0.125: 3.0}
    assert {row["density"]: row["time"] for row in guides(panel)} == {0.5: 12.0, 0.25: 6.0, 0.125: 3.0}
    assert "chunked(chunk=2048)" in rows[0.25]["mask"]
    lengths = [masked(0.5, 4.0, 4096), masked(0.25, 3.0, 4096, s=16384)]  # a density for each length, not each mask
    assert drawn(read([written(tmp_path / "b", *lengths)]), "density") == []


def test_errors_are_those_of_the_worst_run_of_each_variant_beside_a_local_call(stored):
    runs = stored["h200-x4/speed"]
    [panel] = drawn(runs, "errors")
    rows = {(row["label"], row["panel"]): row for row in values(panel)}
    assert {tensor for _, tensor in rows} == {"out", "dq", "dk", "dv"}
    ulysses = [run.result.correctness.tensors["dq"] for run in runs if run.attention == "ulysses"]
    row = next(row for (label, tensor), row in rows.items() if label.startswith("ulysses") and tensor == "dq")
    worst = max(ulysses, key=lambda error: error.rel_l2)
    assert row["error"] == charts.short(worst.rel_l2, 3) and row["local"] == charts.short(worst.local_rel_l2, 3)
    assert row["least"] == charts.short(min(error.rel_l2 for error in ulysses), 3)
    one = dataclasses.replace(runs[0].result, correctness=dataclasses.replace(runs[0].result.correctness, passed=False))
    failed = drawn([dataclasses.replace(runs[0], result=one), *runs], "errors")
    assert [row["label"] for row in values(failed[0]) if not row["passed"]]
    assert drawn([run for run in runs if run.attention == "ulysses" and run.seq_len == 8192], "errors") == []


def test_predictions_are_drawn_where_rates_are_measured_and_state_their_error(stored):
    from runner.predict import validation

    runs = stored["h200-x4/speed"]
    [panel] = drawn(runs, "predicted")
    found = validation.points(runs)
    assert len(values(panel)) == len(found) and "Errors: median" in panel.note
    assert {row["time"] for row in values(panel)} == {charts.short(point.measured) for point in found}
    assert drawn([dataclasses.replace(run, gpu="another GPU") for run in runs], "predicted") == []
    assert drawn([dataclasses.replace(run, gpu=None) for run in runs], "predicted") == []


def test_pictures_have_the_colors_of_the_page():
    from runner.report.drawing import COLORS

    script = (Path(charts.__file__).parent / "assets" / "page.js").read_text()
    assert ", ".join(f'"{color}"' for color in COLORS) in script
