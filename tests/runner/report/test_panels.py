"""The panels appear where the runs call for them, and hold few rows."""

import dataclasses
from pathlib import Path

import pytest

from runner.report import charts
from runner.report.runs import read

RESULTS = Path(__file__).parents[3] / "results"
pytestmark = pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))


def test_peak_memory_has_a_point_for_each_variant_and_length_and_needs_two_lengths():
    from runner.report.panels import memory

    runs = [run for run in read([RESULTS / "h200-x2" / "speed"]) if run.ok and run.result.peak_bytes]
    [panel] = memory.draw(runs)
    rows = panel.spec["data"]["values"]
    assert {row["tokens"] for row in rows} == {run.seq_len for run in runs}
    highest = max(run.result.peak_bytes for run in runs) / 2**30
    assert max(row["gib"] for row in rows) == pytest.approx(highest, abs=1e-4)
    [again] = memory.draw([*runs, *(dataclasses.replace(run) for run in runs)])
    assert again.spec["data"]["values"] == rows
    length = runs[0].seq_len
    assert memory.draw([run for run in runs if run.seq_len == length]) == []


def test_loss_curves_are_of_trained_models_only():
    from runner.report.panels import loss

    runs = read([RESULTS / "cpu-x2" / "model_sharded"])
    trained = [run for run in runs if run.ok and run.result.model and run.result.model.loss_curve]
    assert trained
    [panel] = loss.draw(runs)
    last = {row["loss"] for row in panel.spec["data"]["values"]}
    assert {round(run.result.model.loss, 6) for run in trained} <= last
    assert loss.draw([run for run in runs if run not in trained]) == []
    assert loss.draw(read([RESULTS / "h200-x2" / "strong_scaling"])) == []


def test_a_panel_has_at_most_six_lines_each_with_its_spread():
    from runner.report.drawing import draw

    runs = read([RESULTS / "h200-x4" / "context_parallel"])
    spec = draw(runs)["time"].to_dict()
    rows = spec["data"]["values"] if "values" in spec["data"] else next(iter(spec["datasets"].values()))
    panels = {row["panel"] for row in rows}
    assert all(len({row["label"] for row in rows if row["panel"] == panel}) <= charts.MOST_LINES for panel in panels)
    assert len(rows) == sum(run.ok for run in runs)
    assert all(row["p10"] <= row["time"] <= row["p90"] for row in rows)
    assert any("y2" in layer["encoding"] for layer in spec["spec"]["layer"])


def test_pictures_have_the_colors_of_the_page():
    from runner.report.drawing import COLORS

    script = (Path(charts.__file__).parent / "assets" / "page.js").read_text()
    assert ", ".join(f'"{color}"' for color in COLORS) in script
