"""The schema of a result, and files that appear whole or not at all."""

import json
import os

import pandas as pd
import pytest

from runner.output import columns, results
from runner.output.reader import read_result, read_results
from tests.support.composing import python
from tests.support.recorded import NAMED, ROOT, files, measured, refused, unnamed

NAN, INF = float("nan"), float("inf")


def strict(text: str):
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_result_has_every_field_and_none_where_there_is_nothing_to_say():
    value = results.result(status="oom", reason="too large")
    assert set(value) == set(results.FIELDS)
    assert value["schema_version"] == results.SCHEMA_VERSION
    assert {key for key, x in value.items() if x is not None} == {"schema_version", "status", "reason"}


@pytest.mark.parametrize("fields", [{"status": "ok", "speed": 3}, {"status": "fine"}])
def test_unknown_fields_and_statuses_are_refused(fields):
    with pytest.raises(AssertionError):
        results.result(**fields)


def test_a_later_result_replaces_an_earlier_one(tmp_path):
    results.write_result(tmp_path, refused("a", "crash", "rank 1"))
    results.write_result(tmp_path, measured("a"))
    assert read_result(tmp_path).status == "ok"
    assert files(tmp_path) == {"result.json"}


def test_nan_and_infinity_become_null_at_any_depth(tmp_path):
    value = results.result(status="incorrect", correctness={"a": NAN, "b": [1.5, INF, {"c": (-INF, 2)}]}, comm=NAN)
    results.write_result(tmp_path, value)
    found = strict((tmp_path / "result.json").read_text())
    assert found["correctness"] == {"a": None, "b": [1.5, None, {"c": [None, 2]}]}
    assert found["comm"] is None


# each writes far more than the 4096 bytes that a file may have
WRITERS = {
    "result.json": "results.write_result(folder, results.result(status='ok', reason='x' * 100_000))",
    "samples.parquet": "results.write_samples(folder / 'samples.parquet', [{'forward': [i / 7 for i in range(9999)]}])",
    "phases.csv": "results.write_csv(folder / 'phases.csv', [{'ms': i / 7} for i in range(9999)], ['ms'])",
    "summary.parquet": "summary.write_parquet(folder / 'summary.parquet', [{'ms': i / 7} for i in range(9999)])",
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_that_leaves_the_earlier_file_and_nothing_else(tmp_path, name):
    (tmp_path / name).write_bytes(b"as it was")
    program = f"""
import resource, sys
from pathlib import Path
import pyarrow.parquet
from runner.output import results, summary
folder = Path({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # Python ignores SIGXFSZ: writing beyond it gives EFBIG
try:
    {WRITERS[name]}
except OSError as error:
    sys.exit(f"refused: {{error.errno}}")
"""
    done = python("-c", program, cwd=tmp_path)
    assert done.stderr.startswith("refused"), done.stderr
    assert (tmp_path / name).read_bytes() == b"as it was"
    assert os.listdir(tmp_path) == [name]


def test_samples_have_a_row_for_every_iteration_of_every_rank_and_pass(tmp_path):
    by_rank = [{"forward": [1.5, 2.5, 3.5], "backward": [7, 8, 9]}, {"forward": [4, 5, 6], "backward": [1, 1, 2.25]}]
    results.write_samples(tmp_path / "samples.parquet", by_rank)
    found = pd.read_parquet(tmp_path / "samples.parquet")
    assert list(found.columns) == ["iteration", "round", "rank", "pass", "ms"]
    assert found["ms"].dtype == "float64"
    for rank, passes in enumerate(by_rank):
        for which, ms in passes.items():
            rows = found[(found["rank"] == rank) & (found["pass"] == which)]
            assert list(rows["iteration"]) == [0, 1, 2]
            assert list(rows["ms"]) == ms
    assert len(found) == 12
    assert files(tmp_path) == {"samples.parquet"}


def test_a_table_is_written_as_csv_with_the_asked_columns(tmp_path):
    rows = [{"phase": "comp, block", "ms": 1.25, "more": 1}, {"phase": "wait_kv", "ms": None}]
    results.write_csv(tmp_path / "phases.csv", rows, ["phase", "ms"])
    assert (tmp_path / "phases.csv").read_text().splitlines() == ["phase,ms", '"comp, block",1.25', "wait_kv,"]


@pytest.mark.slow
def test_every_column_and_every_key_of_a_result_is_named_in_the_readme_of_the_outputs():
    assert set(columns.KEYS) <= NAMED
    assert set(results.FIELDS) <= NAMED
    experiments = sorted(path for path in ROOT.glob("results/*/*") if path.is_dir())
    for folder in experiments:
        recorded, _ = read_results(folder)
        for result in recorded[:: max(1, len(recorded) // 4)]:
            assert not set(unnamed(result.plain)), result.folder
