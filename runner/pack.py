"""`python -m runner.pack SWEEP...`: a sweep in a few files, without a folder for each run; nothing measured is lost.

    python -m runner.pack outputs/multirun/2026-01-31_12-00-00 --into results/MACHINE    # results/MACHINE/2026-01-31_12-00-00
    python -m runner.pack results/MACHINE/EXPERIMENT --remove                            # in its place

A packed sweep has `results.parquet` (a row for each run: the columns of the summary, and its result.json in the column
`result`), `phases.parquet`, `samples.parquet` and `kernels.parquet` (the tables of all runs,
with the column `run` first), and `summary.md`. `runner.report`, `runner.compare` and resume=true read it like run folders. A packed target
keeps its other runs; a run of the same name is replaced. Everything is read back and compared before --remove deletes
the run folders. Logs and traces are not packed; the configuration is in the result."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runner.config.values import Refusal
from runner.output import commands, reader, summary
from runner.output.results import replacing, write_text
from runner.output.run_tables import TABLES, completed, read_table, readable
from runner.reading import read_parquet
from runner.record.result import Result


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    for sweep in options.sweeps:
        target = options.into / sweep.resolve().name if options.into else sweep
        runs = pack(sweep, target)
        if unfinished := [run.name for run in runs if run.unfinished]:
            way_out = "resume=true runs them anew"
            print(f"{sweep}: without all their rounds: {', '.join(unfinished)}; {way_out}", file=sys.stderr)
        if options.remove:
            remove(sweep, runs)
        size = sum(path.stat().st_size for path in target.glob("*.parquet"))
        print(f"{target}: {len(runs)} runs packed, read back and the same; {size / 2**10:.0f} KiB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.pack", __doc__)
    add = parser.add_argument
    add("sweeps", nargs="+", type=Path, metavar="SWEEP", help="a sweep's folder")
    add("--into", type=Path, metavar="DIR", help="DIR/<the sweep's name> (default: the sweep's folder)")
    add("--remove", action="store_true", help="delete the folders of the packed runs, and summary.csv and .parquet")
    return parser


def pack(sweep: Path, target: Path) -> list[Result]:
    """Pack the runs of a sweep into `target` and read everything back; returns the runs. Raises Refusal for a folder
    without runs, for a file that is no result, and where the data read back differs."""
    runs = _runs(sweep)
    target.mkdir(parents=True, exist_ok=True)
    every = {run.name: run for run in (*reader.read_results(target, below=False)[0], *runs)}
    written = {target / reader.PACKED: _results_table([every[name] for name in sorted(every)])}
    for kind, name in TABLES.items():
        tables = _kept(target / f"{kind}.parquet", {run.name for run in runs})
        for run in runs:
            if (run.folder / name).exists():
                table = read_table(run.folder / name)
                tables.append(table.add_column(0, "run", pa.array([run.name] * len(table), pa.string())))
        if tables:
            written[target / f"{kind}.parquet"] = pa.concat_tables(tables)
    for path, table in written.items():  # after all are made: an error leaves the packed sweep as it was
        _write(path, table)
        if not read_parquet(path).equals(table):
            raise Refusal(f"{path}: reads back otherwise than it was written; the runs' folders are kept")
    write_text(target / "summary.md", summary.markdown(summary.sweep_rows(target)))
    return runs


def _runs(sweep: Path) -> list[Result]:
    """The runs that have a folder in the sweep. Raises Refusal."""
    runs, problems = reader.read_results(sweep, below=False)
    if problems:
        raise Refusal(f"{problems[0]}; remove it, or run it again with resume=true")
    folders = {path.parent for path in sweep.glob(f"*/{reader.RESULT}")}
    runs = [run for run in runs if run.folder in folders]
    if not runs:
        raise Refusal(f"{sweep}: no run's folder with a result.json in it; give the folder of a sweep")
    for run in runs:
        if run.folder.name != run.name:
            raise Refusal(f"{run.folder}: holds the run {run.name}; rename the folder")
    return runs


def _results_table(runs: Sequence[Result]) -> pa.Table:
    """The columns of the summary that are not empty, and `result`."""
    plain = (json.dumps(reader.stored(run), ensure_ascii=False, separators=(",", ":")) for run in runs)
    rows = [row | {"result": text} for row, text in zip(summary.rows([*runs]), plain, strict=True)]
    filled = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return pa.Table.from_pylist([{key: row[key] for key in filled} for row in rows])


def _kept(path: Path, replaced: set[str]) -> list[pa.Table]:
    """The packed table of the runs that are not replaced; empty where there is no such file."""
    if not path.exists():
        return []
    with readable(path):
        table = read_parquet(path)
    table = table.filter(pc.invert(pc.is_in(table["run"], pa.array(sorted(replaced), pa.string()))))
    return [completed(table, path.stem)]


def _write(path: Path, table: pa.Table) -> None:
    numbers = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    with replacing(path) as scratch:
        words = [name for name in table.column_names if name not in (*numbers, "result")]
        how: dict[str, Any] = {"use_dictionary": words, "use_byte_stream_split": numbers, "write_statistics": False}
        pq.write_table(table, scratch, compression="zstd", compression_level=19, **how)


def remove(sweep: Path, runs: Iterable[Result]) -> None:
    """Delete the folders of the packed runs, and the summaries that results.parquet repeats."""
    for run in runs:
        shutil.rmtree(run.folder)
    for name in ("summary.csv", "summary.parquet", "multirun.yaml"):
        (sweep / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
