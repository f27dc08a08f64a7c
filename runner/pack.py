"""`python -m runner.pack SWEEP...`: a sweep in a few files, without a folder a run; nothing measured is lost.

    python -m runner.pack outputs/multirun/2026-01-31_12-00-00 --into results/MACHINE    # results/MACHINE/2026-01-31_12-00-00
    python -m runner.pack results/MACHINE/EXPERIMENT --remove                            # in its place

A packed sweep has `results.parquet` (a row a run: the columns of the summary, and the whole of its result.json in `result`),
`phases.parquet`, `samples.parquet` and `kernels.parquet` (the runs' tables one after another, `run` before their own columns),
and `summary.md`. `runner.report.command`, `runner.compare` and resume=true read it as they read the folders. What was packed there
before stays, but for runs of the same name. Everything is read back and compared before the command says so, and before
--remove deletes the run folders. Logs, traces and .hydra are not packed (the configuration is in the result)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.measure.statistics import Samples, slowest
from runner.output import reader, results, summary
from runner.output.record import Result

if TYPE_CHECKING:
    import pyarrow as pa

PROGRAM = "python -m runner.pack"
# what a run's folder has beside its result, by the name of its table here
TABLES = {"phases": "phases.csv", "samples": "samples.parquet", "kernels": "kernels.csv"}
WHOLE = (
    "iteration",
    "round",
    "rank",
    "step",
    "calls",
)  # columns of whole numbers; of those that are not text, the others are float64


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        for sweep in options.sweeps:
            target = options.into / sweep.resolve().name if options.into else sweep
            runs = pack(sweep, target)
            if lacking := [run.name for run in runs if run.timing and run.timing.rounds.unfinished]:
                print(
                    f"{sweep}: without all their rounds: {', '.join(lacking)}; resume=true goes on with them in their folders, "
                    "and runs them anew where only the pack is left",
                    file=sys.stderr,
                )
            if options.remove:
                remove(sweep, runs)
            size = sum(path.stat().st_size for path in target.glob("*.parquet"))
            print(f"{target}: {len(runs)} runs packed, read back and the same; {size / 2**10:.0f} KiB")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: could not be written or read ({error.strerror})", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="a sweep's folder")
    parser.add_argument("--into", type=Path, metavar="DIR", help="DIR/<the sweep's name> (default: the sweep's folder)")
    parser.add_argument(
        "--remove", action="store_true", help="delete the folders of the packed runs, and summary.csv and .parquet"
    )
    return parser


def pack(sweep: Path, target: Path) -> list[Result]:
    """Pack the runs of a sweep into `target`, and read all back; returns the runs. Raises ValueError for a folder without
    runs, for a file that is no result, and where what is read back differs."""
    folders = sorted(path.parent for path in sweep.glob(f"*/{reader.RESULT}"))
    runs, problems = reader.read_results(sweep, below=False)
    runs = [run for run in runs if run.folder in folders]
    if problems:
        raise ValueError(f"{problems[0]}; remove it, or run it again with resume=true")
    if not runs:
        raise ValueError(f"{sweep}: no run's folder with a result.json in it; give the folder of a sweep")
    foreign = next((run for run in runs if run.folder.name != run.name), None)
    if foreign:
        raise ValueError(f"{foreign.folder}: holds the run {foreign.name}; rename the folder")
    target.mkdir(parents=True, exist_ok=True)
    before = {run.name: run for run in reader.read_results(target, below=False)[0]}
    everything = sorted((before | {run.name: run for run in runs}).values(), key=lambda run: run.name)
    names = {run.name for run in runs}
    written = {target / reader.PACKED: _results_table(everything)}
    for kind, name in TABLES.items():
        tables = [_with_run(read_table(run.folder / name), run.name) for run in runs if (run.folder / name).exists()]
        kept = _kept(target / f"{kind}.parquet", names)
        if tables or kept is not None:
            written[target / f"{kind}.parquet"] = _joined([*([kept] if kept is not None else []), *tables])
    for path, table in written.items():  # only now: a table that cannot be made leaves the pack as it was
        _write(path, table)
    _verify(runs, target)
    results.write_text(target / "summary.md", summary.markdown(summary.sweep_rows(target)))
    return runs


def _results_table(runs: Iterable[Result]) -> pa.Table:
    import pyarrow as pa

    rows = [
        summary.row(run) | {"result": json.dumps(run.plain, ensure_ascii=False, separators=(",", ":"))} for run in runs
    ]
    said = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return pa.Table.from_pylist([{key: row[key] for key in said} for row in rows])


def read_table(path: Path) -> pa.Table:
    """A run's table: phases.csv, kernels.csv or samples.parquet, by the types that are packed."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    found = csv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)

    def kind(field: pa.Field) -> pa.DataType:
        if field.name in WHOLE:
            return pa.int32()
        return pa.float64() if field.name.endswith(("ms", "us")) else pa.string()

    found = found.cast(pa.schema([(field.name, kind(field)) for field in found.schema]))
    return _with_round(found) if path.suffix != ".csv" else found


def _with_round(samples: pa.Table) -> pa.Table:
    """A table of samples with the column `round`, 0 where an earlier version wrote none."""
    import pyarrow as pa

    if "round" in samples.column_names:
        return samples
    place = samples.column_names.index("iteration") + 1
    return samples.add_column(place, "round", pa.array([0] * len(samples), pa.int32()))


def _with_run(table: pa.Table, run: str) -> pa.Table:
    import pyarrow as pa

    return table.add_column(0, "run", pa.array([run] * len(table), pa.string()))


def _kept(path: Path, replaced: set[str]) -> pa.Table | None:
    """What was packed before of other runs."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if not path.exists():
        return None
    table = pq.read_table(path)
    table = table.filter(pc.invert(pc.is_in(table["run"], pa.array(sorted(replaced), pa.string()))))
    return _with_round(table) if path.stem == "samples" else table


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables)


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(
            table,
            scratch,
            compression="zstd",
            compression_level=19,
            use_dictionary=[field.name for field in table.schema if field.name not in (*numbers, "result")],
            use_byte_stream_split=numbers,
            write_statistics=False,
        )
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _verify(runs: Sequence[Result], target: Path) -> None:
    """Raises ValueError where a result or a table is not what its file has."""
    packed = reader.packed_results(target)
    for run in runs:
        if packed.get(run.name) != run.plain:
            raise ValueError(f"{run.folder}: packed into {target}, its result reads back otherwise")
    for kind, name in TABLES.items():
        found = _by_run(target / f"{kind}.parquet")
        for run in runs:
            path = run.folder / name
            if not _same(read_table(path) if path.exists() else None, found(run.name)):
                raise ValueError(f"{path}: packed into {target}, it reads back otherwise")


def _same(a: pa.Table | None, b: pa.Table | None) -> bool:
    if a is None or b is None:
        return b is None and not (a is not None and len(a))  # a table without rows is not packed
    return bool(a.equals(b))


def _by_run(path: Path) -> Callable[[str], pa.Table | None]:
    """A packed table's part of a run, without the column `run`; None where it has none."""
    import pyarrow.parquet as pq

    if not path.exists():
        return lambda run: None
    table = pq.read_table(path)
    places: dict[str, list[int]] = {}
    for i, run in enumerate(table["run"].to_pylist()):
        places.setdefault(run, []).append(i)
    rest = table.drop_columns(["run"])
    return lambda run: rest.take(places[run]).combine_chunks() if run in places else None


def remove(sweep: Path, runs: Iterable[Result]) -> None:
    """Delete the folders of packed runs, and the summaries that results.parquet repeats."""
    for run in runs:
        shutil.rmtree(run.folder)
    for name in ("summary.csv", "summary.parquet", "multirun.yaml"):
        (sweep / name).unlink(missing_ok=True)


def table_of(run: Result, kind: str) -> list[dict[str, Any]] | None:
    """The rows of a run's table, from its folder or its pack: `kind` is one of TABLES. None where there is none. Raises
    ValueError for a file that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    own, packed = run.folder / TABLES[kind], run.folder.parent / f"{kind}.parquet"
    try:
        if own.exists():
            return read_table(own).to_pylist()
        # a resumed sweep has a folder with .hydra alone for a packed run
        if packed.exists() and not (run.folder / reader.RESULT).exists():
            return pq.read_table(packed, filters=[("run", "=", run.name)]).drop_columns(["run"]).to_pylist() or None
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ValueError(
            f"{own if own.exists() else packed}: no table ({' '.join(str(error).split())[:100]})"
        ) from None
    return None


def samples(run: Result) -> Samples | None:
    """A run's samples in ms, those of the slowest rank in each iteration, by pass; None where there are none that can be read."""
    try:
        rows = table_of(run, "samples")
    except ValueError:
        return None
    by_rank: dict[int, Samples] = {}
    for row in sorted(rows or (), key=lambda row: row["iteration"]):
        by_rank.setdefault(row["rank"], {}).setdefault(row["pass"], []).append(row["ms"])
    try:
        return slowest(list(by_rank.values())) if by_rank else None
    except (KeyError, ValueError):  # ranks of other passes, or of another number of samples
        return None


if __name__ == "__main__":
    sys.exit(main())
