"""Read the tables of a run (samples, phases and kernels) from its folder or from its packed sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from runner.config.values import Refusal
from runner.output.reader import RESULT
from runner.reading import MOST_TABLE_BYTES, read_parquet, read_regular
from runner.record.result import Result

# the file in a run's folder; a packed sweep has NAME.parquet, where the column `run` comes before the others
TABLES = {"phases": "phases.csv", "samples": "samples.parquet", "kernels": "kernels.csv"}
WHOLE = ("iteration", "round", "rank", "step", "calls")  # columns of whole numbers


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises Refusal for a file that is no table of a run."""
    try:
        yield
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise Refusal(f"{path}: no table ({' '.join(str(error).split())[:100]})") from None


def read_table(path: Path) -> pa.Table:
    """The table in a run's folder, with the types that a packed sweep has. Raises Refusal."""

    def kind(name: str) -> pa.DataType:
        if name in WHOLE:
            return pa.int32()
        return pa.float64() if name.endswith(("ms", "us")) else pa.string()

    with readable(path):
        if path.suffix == ".csv":
            found = csv.read_csv(pa.BufferReader(read_regular(path, MOST_TABLE_BYTES)))
        else:
            found = read_parquet(path)
        found = found.cast(pa.schema([(name, kind(name)) for name in found.column_names]))
        found = completed(found, path.stem)
        _check(found, path.stem)
        return found


def _check(table: pa.Table, kind: str) -> None:
    """Raises Refusal and KeyError for a table that no run writes."""
    for column in table.columns:
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py() and len(column.drop_null()):
            raise Refusal("has a number that is not finite")
    if kind == "samples" and (
        any(column.null_count for column in table.columns)
        or any((pc.min(table[name]).as_py() or 0) < 0 for name in ("rank", "ms"))
    ):
        raise Refusal("has samples without a rank, a pass or a time")


def completed(table: pa.Table, kind: str) -> pa.Table:
    """The table with the columns that older versions did not write: `round` of samples, which is 0; `start_ms` and
    `stop_ms` of phases, which are null."""
    if kind == "samples" and "round" not in table.column_names:
        place = table.column_names.index("iteration") + 1
        return table.add_column(place, "round", pa.array([0] * len(table), pa.int32()))
    for name in ("start_ms", "stop_ms"):
        if kind == "phases" and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), pa.float64()))
    return table


def table_of(run: Result, kind: str) -> list[dict[str, Any]] | None:
    """The rows of a run's table; `kind` is one of TABLES. None where there is none. Raises Refusal for a file that
    cannot be read."""
    path, packed = run.folder / TABLES[kind], run.folder.parent / f"{kind}.parquet"
    if path.exists():
        return read_table(path).to_pylist()
    # a resumed sweep leaves a packed run a folder without a result
    if packed.exists() and not (run.folder / RESULT).exists():
        with readable(packed):
            rows = read_parquet(packed).filter(pc.field("run") == run.name).drop_columns(["run"])
            _check(rows, "")
            return rows.to_pylist() or None
    return None
