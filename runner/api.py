"""Runs from Python, for notebooks, tests and other programs:

    result = runner.run(["attention=ring", "config=tiny", "seq_len=512"])
    result.status, result.passes["forward"].median, result.folder
    results = runner.multirun(["attention=ring,zigzag", "config=tiny", "seq_len=512,1024"])
    runner.load(results[0].folder.parent).plot("seq_len", "forward_ms")

The overrides are those of the command line; results lie in the same folders. Worlds stay warm between calls; `runner.close()`
or the end of the process ends them. The working folder, signal handlers, logging and a Hydra program around are left as they
are. Calls from several threads wait for each other; a world ends with the thread that started it."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.global_hydra import GlobalHydra

from runner import app
from runner.command import expand, perform
from runner.config import folders
from runner.config.values import InvalidConfig
from runner.output import columns, reader, summary, terminal
from runner.output.reader import UnreadableFile
from runner.record.result import Result

if TYPE_CHECKING:
    import pandas as pd


_one_call = threading.Lock()  # Hydra's state and the consoles are the process's


def run(given: Sequence[str] = (), quiet: bool = True) -> Result:
    """One run, as `python -m runner OVERRIDES...`. A run that fails (`incorrect`, `oom`, `timeout`, `crash`) or that this
    machine cannot do (`unsupported`) is a result with that status and its `reason`. quiet: print no tables and no progress.

    Raises InvalidConfig (a ValueError) with one line for overrides that break a rule, and OSError where nothing can be
    written."""
    (result,) = _results(given, False, quiet)
    return result


def multirun(given: Sequence[str], quiet: bool = True) -> list[Result]:
    """All runs of a sweep, as `python -m runner -m OVERRIDES...`, in the order of the command line; compared runs take turns.
    An impossible combination is a result with the status `invalid`. The runs' folders lie in one folder, with the summary.

    Raises as `run`."""
    return _results(given, True, quiet)


def load(*where: str | Path) -> pd.DataFrame:
    """The recorded runs below folders, packed ones too, as a row each: the columns of summary.csv and `folder`,
    where `samples.parquet` has the samples. Files that are no results are named in warnings.

    Raises FileNotFoundError for a folder that does not exist."""
    import pandas as pd

    found: list[Result] = []
    for folder in map(Path, where):
        if not folder.is_dir():
            raise FileNotFoundError(2, "no such folder of results", str(folder))
        read, problems = reader.read_results(folder)
        found += read
        for problem in problems:
            warnings.warn(str(problem), stacklevel=2)
    sweeps: dict[Path, list[Result]] = {}
    for result in found:
        sweeps.setdefault(result.folder.parent, []).append(result)
    rows = [
        row | {"folder": str(result.folder)}
        for sweep in sweeps.values()
        for row, result in zip(summary.rows(sweep), sweep, strict=True)
    ]
    return pd.DataFrame(rows, columns=[*columns.KEYS, "folder"])


def close() -> None:
    """End the living worlds. The next run starts new ones."""
    app.pool.close()


def _results(given: Sequence[str], multirun: bool, quiet: bool) -> list[Result]:
    """The recorded results of a command. What ends the call ends the worlds, too: one may be in the middle of a job."""
    if isinstance(given, str):
        raise InvalidConfig(f"{given!r}: give a list of overrides, as [{given!r}]")
    if "dry_run=true" in given:
        raise InvalidConfig(
            "dry_run=true: prints a plan; it is for the command line, python -m runner dry_run=true ..."
        )
    atexit.register(close)
    try:
        with _one_call, _undone(quiet):
            return [_result(folder) for folder in perform(expand(folders.resumed(given)), multirun)]
    except InvalidConfig:
        raise
    except BaseException:
        close()
        raise


def _result(folder: Path) -> Result:
    result = reader.read_result(folder)
    if result is None or isinstance(result, UnreadableFile):
        raise OSError(f"the result was removed or cannot be read: {result}")
    return result


@contextmanager
def _undone(quiet: bool) -> Iterator[None]:
    """Leaves the caller's Hydra and our consoles as they were."""
    around, out, err = GlobalHydra.instance().hydra, terminal.out.quiet, terminal.err.quiet
    try:
        GlobalHydra.instance().hydra = None
        terminal.out.quiet, terminal.err.quiet = quiet or out, quiet or err
        yield
    finally:
        GlobalHydra.instance().hydra = around
        terminal.out.quiet, terminal.err.quiet = out, err
