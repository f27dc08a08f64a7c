"""A result is of its fields alone, and files appear whole or not at all."""

import json
import os

import pytest

from runner.output import columns, results
from runner.output.reader import read_result, read_results
from runner.record.result import SCHEMA_VERSION, Result
from tests.support.composing import python
from tests.support.paths import RESULTS
from tests.support.recorded import FIELDS, NAMED, files, measured, plain, unnamed, write


def test_what_the_run_makes_is_what_its_file_gives_back(tmp_path):
    made = Result.of(measured("a"), tmp_path / "a")
    results.write_result(made)
    assert read_result(tmp_path / "a") == made and files(tmp_path) == {"result.json"}
    assert json.loads((tmp_path / "a" / "result.json").read_text()).keys() == {"schema_version", *FIELDS}
    begun = Result.begun(tmp_path / "b", "0", "b", {})
    results.write_result(begun.anew(status="oom", reason="token=ghp_" + "a" * 36))
    refused = read_result(tmp_path / "b")
    assert refused.reason == "token=<secret>" and refused.timing is None and refused.phases == {}
    assert refused.environment == begun.environment


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"speed": 3}, "speed"),
        ({"timing": {"speed": 3}}, "timing.speed"),
        ({"memory": {"by_rank": [{"speed": 3}]}}, "memory.by_rank[0].speed"),
    ],
)
def test_a_fact_without_a_field_is_refused_in_a_file_of_this_schema(tmp_path, field, name):
    write(tmp_path, plain(key="0", name="a", status="oom") | field)
    problem = read_result(tmp_path)
    assert problem.newer and f"result.json: left out: {name} is not known to this version" in str(problem)


def test_every_stored_result_reads_as_written_by_this_version_too():
    """Whatever its schema: what is read of it, written and read again is the same."""
    schemas = set()
    for folder in (path.parent for path in RESULTS.glob("*/*/results.parquet")):
        runs, problems = read_results(folder)
        assert runs and not problems
        for run in runs[:: max(1, len(runs) // 4)]:
            schemas.add(run.schema_version)
            now = json.loads(json.dumps(run.plain())) | {"schema_version": SCHEMA_VERSION}
            again = Result.of(now, run.folder)
            assert (again.asked, again.timing, again.environment) == (run.asked, run.timing, run.environment)
            assert not set(unnamed(run.plain())), folder
    assert schemas == {1, 2, 3}
    assert {*columns.KEYS, *FIELDS} <= NAMED


def test_nan_and_infinity_become_null_at_any_depth():
    inf = float("inf")
    found = results.finite({"a": inf - inf, "b": [1.5, inf, {"c": (-inf, 2)}]})
    assert found == {"a": None, "b": [1.5, None, {"c": [None, 2]}]}


# each writes far more than the 4096 bytes that a file may have
WRITERS = {
    "result.json": "results.write_text(folder / 'result.json', 'x' * 100_000)",
    "samples.parquet": "results.write_samples(folder / 'samples.parquet', [{'forward': [i / 7 for i in range(9999)]}])",
    "phases.csv": "results.write_csv(folder / 'phases.csv', [{'ms': i / 7} for i in range(9999)], ['ms'])",
}


def test_a_full_disk_is_an_error_that_leaves_the_earlier_file_and_nothing_else(tmp_path):
    for name in WRITERS:
        (tmp_path / name).write_bytes(b"as it was")
    program = f"""
import resource, sys
from pathlib import Path
import pyarrow.parquet
from runner.output import results
folder = Path({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # Python ignores SIGXFSZ: writing beyond it gives EFBIG
for command in {list(WRITERS.values())!r}:
    try:
        exec(command)
    except OSError:
        print("refused")
"""
    assert python("-c", program, cwd=tmp_path).stdout.split() == ["refused"] * len(WRITERS)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"as it was"}
    assert sorted(os.listdir(tmp_path)) == sorted(WRITERS)
