"""Results in MLflow: its real client into a local file."""

import sqlite3
import sys

import pytest

from runner.record.result import Result
from runner.tracker import columns, track
from tests.support.recorded import measured, refused


def result(folder, value=None):
    value = value or measured("ring_default")
    options = {"name": "mlflow", "uri": None, "experiment": "ours"}
    value["config"] |= {"output": str(folder), "tracker": options}
    value["environment"] = {"started_at": 1e9, "seconds": 2.0, "host": "h", "git": {"commit": "c0ffee"}}
    return Result.of(value, folder / value["name"])


def test_a_tracker_gets_what_was_asked_and_what_was_measured(tmp_path):
    decode = measured("tree")
    decode["experiment"]["workload"] |= {"q_len": 1, "prefix": 4096, "kv_lengths": [7, 9]}
    asked, metrics = columns(result(tmp_path, decode))
    assert (asked["attention"], asked["status"], asked["prefix"], asked["kv_lengths"]) == ("zigzag", "ok", 4096, "7,9")
    assert (metrics["forward_ms"], metrics["peak_bytes"]) == (4.0, 300.0)
    assert not metrics.keys() & asked.keys()


@pytest.mark.nightly
def test_mlflow_holds_runs_in_a_local_file(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install -e '.[mlflow]'")
    assert track(result(tmp_path)) is None
    assert track(result(tmp_path, refused("other", "invalid", "MY_TOKEN=s3cret"))) is None
    assert b"s3cret" not in (tmp_path / "mlflow.db").read_bytes()
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        runs = store.execute("select name, status from runs").fetchall()
        metrics = store.execute("select name, key, value from metrics join runs using (run_uuid)").fetchall()
        tags = store.execute(
            "select key, tags.value from tags join runs using (run_uuid) where name = 'other'"
        ).fetchall()
    assert set(runs) == {("ring_default", "FINISHED"), ("other", "FAILED")}
    assert ("ring_default", "forward_ms", 4.0) in metrics
    assert {("host", "h"), ("commit", "c0ffee"), ("folder", str(tmp_path / "other"))} <= set(tags)


@pytest.mark.parametrize("lacking", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_tracker_that_is_not_installed_or_fails_is_one_line_and_no_error(tmp_path, monkeypatch, lacking):
    if lacking:
        monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    else:
        pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
        (tmp_path / "mlflow.db").write_text("a file that is no database")
    reason = track(result(tmp_path))
    assert reason.startswith("tracker=mlflow: ") and "the result is in its folder" in reason and "\n" not in reason
    assert ("not installed" in reason and "pip install -e '.[mlflow]'" in reason) == lacking
