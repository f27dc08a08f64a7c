"""Results in MLflow: its real client into a local file."""

import sqlite3
import sys

import pytest

from runner.tracker import Tracked, track
from tests.support.recorded import measured, refused


def value(tmp_path, made=None):
    found = made or measured("ring_default")
    options = {"name": "mlflow", "uri": None, "experiment": "ours"}
    found["config"] |= {"output": str(tmp_path), "tracker": options}
    found["environment"] = {"started_at": 1e9, "seconds": 2.0, "host": "h", "git": {"commit": "c0ffee"}}
    return found


def test_a_tracker_gets_what_was_asked_and_what_was_measured(tmp_path):
    run = Tracked.of(value(tmp_path), tmp_path)
    assert run.parameters["attention"] == "zigzag" and run.parameters["status"] == "ok"
    assert (run.metrics["forward_ms"], run.metrics["peak_bytes"]) == (4.0, 300.0)
    assert not set(run.metrics) & set(run.parameters)
    decode = measured("tree") | {"config": {"prefix": 4096, "kv_lengths": "random"}}
    decode["experiment"]["workload"] |= {"q_len": 1, "prefix": 4096, "kv_lengths": [7, 9]}
    asked = Tracked.of(value(tmp_path, decode), tmp_path)
    assert (asked.parameters["prefix"], asked.parameters["kv_lengths"]) == (4096, "7,9")
    assert "prefix" not in asked.metrics
    assert run.tags == {"key": "0", "host": "h", "commit": "c0ffee"}


@pytest.mark.slow
def test_mlflow_holds_runs_in_a_local_file(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install -e '.[mlflow]'")
    assert track(value(tmp_path), tmp_path / "run") is None
    assert track(value(tmp_path, refused("other", "invalid", "no such size")), tmp_path / "other") is None
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        runs = store.execute("select name, status from runs").fetchall()
        metrics = store.execute("select name, key, value from metrics join runs using (run_uuid)").fetchall()
        parameters = store.execute("select name, key, value from params join runs using (run_uuid)").fetchall()
    assert set(runs) == {("ring_default", "FINISHED"), ("other", "FAILED")}
    assert ("ring_default", "forward_ms", 4.0) in metrics
    assert {("ring_default", "attention", "zigzag"), ("other", "status", "invalid")} <= set(parameters)


def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    reason = track(value(tmp_path), tmp_path / "run")
    assert reason.startswith("tracker=mlflow: not installed") and "pip install -e '.[mlflow]'" in reason
    assert "\n" not in reason


def test_a_tracker_that_fails_is_one_line_and_no_error(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    (tmp_path / "mlflow.db").write_text("a file that is no database")
    reason = track(value(tmp_path), tmp_path / "run")
    assert reason.startswith("tracker=mlflow: ") and "the result is in its folder" in reason and "\n" not in reason
