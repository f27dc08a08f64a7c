"""Only regular files up to a size are read: a FIFO would hang, a device fill the memory."""

import os

import pandas as pd
import pytest

from runner import reading
from runner.config import folders
from runner.config.huggingface import loaded
from runner.config.values import InvalidConfig
from runner.output import results
from runner.record.result import Result
from runner.report.entries import files, log_tail
from runner.report.runs import Run
from tests.support.recorded import refused

IRREGULAR = "not a regular file|Is a directory|at most"


def irregular(path, kind):
    """Make a file that must not be read."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, reading.MOST_TABLE_BYTES + 1)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
def test_nothing_else_is_read(tmp_path, kind):
    path = tmp_path / "x"
    irregular(path, kind)
    with pytest.raises(OSError, match=IRREGULAR):
        reading.read_regular(path, 100)
    with pytest.raises(OSError, match=IRREGULAR):
        reading.read_parquet(path)
    with pytest.raises(InvalidConfig, match=rf"model.config=.*x: no configuration of a model \(.*({IRREGULAR})"):
        loaded(str(path), None, {})
    path.rename(tmp_path / folders.SEED)
    assert folders.seed(tmp_path) == folders.fresh_seed()


def test_a_file_is_read_whole_or_its_end(tmp_path):
    (tmp_path / "x").write_text("hello")
    (tmp_path / "link").symlink_to("x")
    assert reading.read_text(tmp_path / "link", 5) == "hello"
    assert reading.read_regular(tmp_path / "x", 2, end=True) == b"lo"
    with pytest.raises(OSError, match="symbolic link"):
        reading.read_regular(tmp_path / "link", follow=False)


def test_a_page_neither_follows_nor_names_links_in_a_runs_folder(tmp_path):
    (tmp_path / "secret").write_text("the content")
    for name in ("run.log", "trace.gz"):
        (tmp_path / name).symlink_to("secret")
    value = refused("a", "crash", "why") | {"artifacts": {"log": "run.log", "trace": "trace.gz"}}
    run = Run.of(Result.of(value, tmp_path))
    assert log_tail(run) is None and files(run, tmp_path) == {}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", [0, 2_000_000_000]),
        ("rank", [None, 0]),
        ("rank", ["a", "b"]),
        ("ms", [-1.0, 1.0]),
        ("ms", [float("nan"), 1.0]),
    ],
)
def test_samples_that_no_run_writes_are_refused(tmp_path, column, values):
    path = tmp_path / "samples.parquet"
    results.write_samples(path, [{"forward": [1.0, 2.0]}])
    pd.read_parquet(path).assign(**{column: values}).to_parquet(path)
    with pytest.raises(ValueError, match=r"samples|finite|cast|Failed to parse"):
        results.read_samples(path)
