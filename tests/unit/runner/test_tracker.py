"""Results in MLflow: its real client into a local file."""

import sqlite3
import sys

import pytest

from runner.output.record import Result
from runner.tracker import columns, track
from tests.support.recorded import measured, refused


def value(tmp_path, made=None):
    found = made or measured("ring_default")
    options = {"name": "mlflow", "uri": None, "experiment": "ours"}
    found["config"] |= {"output": str(tmp_path), "tracker": options}
    found["environment"] = {"started_at": 1e9, "seconds": 2.0, "host": "h", "git": {"commit": "c0ffee"}}
    return found


def test_a_tracker_gets_what_was_asked_and_what_was_measured(tmp_path):
    asked, metrics = columns(Result.of(value(tmp_path), tmp_path))
    assert asked["attention"] == "zigzag" and asked["status"] == "ok"
    assert (metrics["forward_ms"], metrics["peak_bytes"]) == (4.0, 300.0)
    assert not set(metrics) & set(asked)
    decode = measured("tree") | {"config": {"prefix": 4096, "kv_lengths": "random"}}
    decode["experiment"]["workload"] |= {"q_len": 1, "prefix": 4096, "kv_lengths": [7, 9]}
    asked, metrics = columns(Result.of(value(tmp_path, decode), tmp_path))
    assert (asked["prefix"], asked["kv_lengths"]) == (4096, "7,9")
    assert "prefix" not in metrics


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
        tags = store.execute(
            "select key, tags.value from tags join runs using (run_uuid) where name = 'other'"
        ).fetchall()
    assert set(runs) == {("ring_default", "FINISHED"), ("other", "FAILED")}
    assert ("ring_default", "forward_ms", 4.0) in metrics
    assert {("host", "h"), ("commit", "c0ffee"), ("folder", str(tmp_path / "other"))} <= set(tags)
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
