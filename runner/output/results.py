"""Write the files of a run. Each file appears whole or not at all: it is written under another name and then
renamed."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.config.values import CannotWrite, Refusal, redacted
from runner.output.reader import RESULT
from runner.record.result import Result, Tables

COLUMNS = {  # of the tables in CSV
    "phases": ("iteration", "rank", "pass", "phase", "step", "ms", "start_ms", "stop_ms"),
    "kernels": ("rank", "kernel", "calls", "total_ms", "mean_us"),
}


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Raises CannotWrite where a file of a run cannot be written."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(cannot_write(where, error)) from None


def cannot_write(where: Path | str, error: OSError) -> str:
    """Why a file of a run could not be written (full disk, no permission, missing folder), and the way out."""
    way_out = "give another folder with output=DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = f"free some space or {way_out}"
    elif error.errno == errno.ENOENT:
        way_out = "the folder was removed while the run went on"
    return f"{where}: could not be written ({error.strerror}); {way_out}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch path to write to, which replaces `path` at the end of the block. When the block raises, `path` stays as
    it was."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Raises OSError, for instance when the disk is full."""
    with replacing(path) as scratch, scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_result(result: Result) -> None:
    """Write result.json into the run's folder, without secrets. Raises OSError."""
    result.folder.mkdir(parents=True, exist_ok=True)
    write_text(result.folder / RESULT, json.dumps(finite(redacted(result.plain())), indent=1) + "\n")


def finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    return value


def write_samples(path: Path, samples: Sequence[dict[str, list[float]]], rounds: Sequence[int] | None = None) -> None:
    """Write samples.parquet, a row for each iteration of each rank and pass. `samples`: by rank, the ms of each
    iteration by pass. `rounds`: the number of iterations in each round; None: one round."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [number for number, n in enumerate(rounds or ()) for _ in range(n)]
    rows = [
        (iteration, numbers[iteration] if numbers else 0, rank, which, ms)
        for rank, passes in enumerate(samples)
        for which, values in passes.items()
        for iteration, ms in enumerate(values)
    ]
    kinds = {"iteration": pa.int32(), "round": pa.int32(), "rank": pa.int32(), "pass": pa.string(), "ms": pa.float64()}
    table = pa.Table.from_pylist([dict(zip(kinds, row, strict=True)) for row in rows], pa.schema(kinds))
    with replacing(path) as scratch:
        pq.write_table(table, scratch)


def read_samples(path: Path) -> list[dict[str, list[float]]]:
    """Read samples.parquet: by rank, the ms of each iteration by pass. Raises Refusal."""
    from runner.output.run_tables import read_table

    samples: dict[int, dict[str, list[float]]] = {}
    for row in read_table(path).to_pylist():  # in the order of iterations
        samples.setdefault(row["rank"], {}).setdefault(row["pass"], []).append(row["ms"])
    if samples.keys() != set(range(len(samples))):
        raise Refusal(f"{path}: has samples of {len(samples)} ranks, which are not the first {len(samples)}")
    return [samples[rank] for rank in range(len(samples))]


def write_tables(folder: Path, tables: Tables) -> dict[str, str]:
    """Write what a run measured beside its result; returns the run's files by name. Raises OSError."""
    artifacts = {"log": "run.log"}
    if tables.samples:
        artifacts["samples"] = "samples.parquet"
        write_samples(folder / artifacts["samples"], tables.samples)
    for name, columns in COLUMNS.items():
        if rows := getattr(tables, name):
            artifacts[name] = f"{name}.csv"
            write_csv(folder / artifacts[name], rows, columns)
    return artifacts | {f"trace_{i}": name for i, name in enumerate(tables.traces)}


def write_csv(path: Path, rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    """Write these columns of the rows. Raises OSError."""
    with replacing(path) as scratch, scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
