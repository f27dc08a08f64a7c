"""`python -m runner.predict`: its rows, and its error against results and against a real world."""

import json

import pytest

from runner.config.schema import groups
from runner.predict import command, validation
from runner.predict.command import predicted
from runner.report import runs
from tests.support.paths import ROOT


def test_four_gpus_are_predicted_from_fewer_within_a_tenth_as_stored_and_documented():
    measured = runs.read(sorted((ROOT / "results").glob("h200-*")))
    outcome = validation.validate(measured)
    assert outcome.predicted == 4 and outcome.calibrated_on == (1, 2)
    by_gpu = {errors.called: errors for errors in outcome.errors if not errors.launch_bound}
    assert by_gpu["dense"].passes > 150 and by_gpu["dense"].median < 0.04
    assert all(errors.median < 0.1 for errors in by_gpu.values())
    assert outcome == validation.stored(), "run `python -m runner.predict --validate results/h200-* --write`"
    assert outcome.markdown in (ROOT / "docs/predict.md").read_text()
    with pytest.raises(ValueError, match=r"world sizes \[4\]"):
        validation.validate([run for run in measured if run.world_size == 4])


def test_every_world_has_its_fastest_variant_first_and_reasons_last():
    predictions, _ = predicted(["config=llama3_8b", "world_size=4,8", "seq_len=131072"])
    for world in (4, 8):
        here = [row for row in predictions if row.world_size == world]
        times = [row.ms for row in here if row.ms is not None]
        assert times == sorted(times) and len(times) >= 6
        assert all(row.why for row in here[len(times) :])


@pytest.mark.parametrize("name", groups()["topology"])
def test_every_topology_predicts(name):
    rows, _ = predicted(["config=llama3_8b", "world_size=4", "seq_len=32768", "attention=ring", f"topology={name}"])
    assert rows[0].ms > 0 and rows[0].peak_bytes > 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("topology=h200", "not a topology"),
        ("world_size=two", "world_size=two: must be a whole number"),
        ("attention=rings", "not a variant that the model knows; did you mean ring"),
        ("attention.head_parts=2", "options are candidates here"),
        ("mask=prefix_lm", "takes full, causal and windowed attention"),
    ],
)
def test_refusals_are_one_line(given, text, capsys):
    rest = [] if given.startswith("world_size") else ["world_size=4"]
    assert command.main(["config=llama3_8b", *rest, given]) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) == 1


def test_rows_are_printed_as_json(capsys):
    arguments = ["config=llama3_8b", "world_size=4,8", "seq_len=32768", "attention=ring,ulysses"]
    assert command.main([*arguments, "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "median" in printed["error"]
    assert {row["variant"] for row in printed["rows"]} == {"ring", "ulysses"}
