"""The summary of a sweep: a flat row for each run, as summary.csv, summary.parquet and summary.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.output.columns import KEYS, TABLE, Column, differ, row
from runner.output.reader import read_results, report_problems
from runner.output.results import replacing, write_csv, write_text
from runner.output.table import Table
from runner.record.result import Result

# the column that tells the values of a key apart, where it has another name
COLUMN_OF = {"timing.layers": "timing", "timing.autograd_thread": "timing", "timing.new_packs": "seqlens"}


def sweep_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a sweep's folder in the order in which its runs started. Files that are no results are named on
    stderr."""
    found, problems = read_results(folder, below=False)
    report_problems(problems)
    found.sort(key=lambda result: result.environment.started_at)
    return rows(found)


def rows(found: list[Result]) -> list[dict[str, Any]]:
    """The rows of these runs, with what only several show: the settings in which they differ, and a grouping's gain."""
    made = [row(result) for result in found]
    for entry, text in zip(made, _settings(found, made), strict=True):
        entry["settings"] = text
    add_gain_over_separate(found, made)
    return made


def add_gain_over_separate(found: list[Result], rows: list[dict[str, Any]]) -> None:
    """Adds to the row of each grouping the share of the modelled bytes that it saves, and its speedup, over the run with
    grouping=separate that is otherwise the same."""
    alike: dict[str, dict[str, dict[str, Any]]] = {}
    for result, entry in zip(found, rows, strict=True):
        options = dict(result.asked.options)
        if result.timed and entry["kv_read_bytes"] and "grouping" in options:
            grouping = options.pop("grouping")
            alike.setdefault(str(vars(result.asked) | {"options": options}), {})[grouping] = entry
    for entries in alike.values():
        separate = entries.get("separate", {})
        for entry in entries.values() if separate else ():
            ms = "total_ms" if entry["total_ms"] else "forward_ms"
            entry["speedup_over_separate"] = separate[ms] / entry[ms]
            entry["kv_bytes_saved"] = 1 - entry["kv_read_bytes"] / separate["kv_read_bytes"]


def _settings(found: list[Result], rows: list[dict[str, Any]]) -> list[str | None]:
    """For each run, the overrides in which the runs differ and which no column shows."""
    given: list[dict[str, str]] = []
    for result in found:  # older results have no overrides
        pairs = (text.replace("\\:", ":").split("=", 1) for text in result.environment.overrides if "=" in text)
        given.append({key.lstrip("+"): text for key, text in pairs})
    known = [(overrides, entry) for overrides, entry in zip(given, rows, strict=True) if overrides]
    swept = []
    for key in dict.fromkeys(key for overrides in given for key in overrides):
        if key.startswith(("attention.", "seqlens_", "hydra.")) or key in ("order", "output", "resume"):
            continue
        # a column may hold the same value for runs that asked for different ones: kernel=auto, and the kernel that it takes
        column = COLUMN_OF.get(key, key)
        in_column = len({entry[column] for _, entry in known}) if column in KEYS else 1
        if len({overrides.get(key) for overrides, _ in known}) > in_column:
            swept.append(key)
    return [" ".join(f"{key}={overrides[key]}" for key in swept if key in overrides) or None for overrides in given]


def summarize_sweep(folder: Path) -> list[dict[str, Any]]:
    """Write summary.csv, summary.parquet and summary.md from the results in a sweep's folder; returns the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sweep_rows(folder)
    if rows:
        write_csv(folder / "summary.csv", rows, KEYS)
        with replacing(folder / "summary.parquet") as scratch:
            pq.write_table(pa.Table.from_pylist(rows), scratch)
        write_text(folder / "summary.md", markdown(rows))
    return rows


def remarks(rows: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """The sentences that a reader needs to compare the rows, each with the titles of the columns that it is about."""
    ran = [entry for entry in rows if entry["status"] == "ok"]
    found: dict[str, tuple[str, ...]] = {}
    if {entry.get("seqlens") is None for entry in ran} == {True, False}:
        found["Rows with sequences are of packed batches: less work than one sequence of as many tokens."] = ()
    if dense := {
        f"{entry['mask']} at {entry['seq_len']:,} tokens"
        for entry in ran
        if entry["mask"] not in (None, "full", "causal") and entry["sparsity_ratio"] == 0
    }:
        found[
            f"Dense attention, as the mask removes no pair: {', '.join(sorted(dense))}; take more tokens or other parameters."
        ] = ()
    if any(entry.get("exposed_forward_ms") is not None for entry in ran):
        exposed = "exp. fwd", "exp. bwd"
        found[
            f"{', '.join(exposed)}: ms in which compute waits for communication, timed separately from fwd and bwd."
        ] = exposed
    return found


def shown(rows: list[dict[str, Any]]) -> list[Column]:
    """The columns of a table of these rows: without empty ones, and without settings that all rows share. A sparsity above 0 is
    shown always."""

    def told(column: Column) -> bool:
        values = [entry[column.key] for entry in rows]
        if not column.swept:
            return any(value is not None for value in values)
        return differ(rows, column) or (column.measured and any(values))

    return [column for column in TABLE if told(column)]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, then the reasons of the runs that are not ok."""
    columns = {column.title: [column.text(entry) for entry in rows] for column in shown(rows)}
    reasons = [f"- `{entry['name']}`: {entry['status']}: {entry['reason'] or ''}" for entry in rows if entry["reason"]]
    notes = [*remarks(rows), *(["\n".join(reasons)] if reasons else [])]
    return Table.of(columns, {column.title for column in TABLE if column.left}, notes).markdown()
