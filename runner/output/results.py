"""What is written of a run, and a sweep's summary. Every file appears whole or not at all; `runner/output/record.py` reads."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runner.output.record import RESULT, SCHEMA_VERSION, STATUSES, Method, Result, name_problems, read_results

FIELDS = (
    "schema_version", "key", "name", "status", "reason", "failure", "config", "experiment", "chosen", "environment",
    "correctness", "timing", "metrics", "baseline", "memory", "phases", "comm", "profile", "artifacts",
)  # fmt: skip


def write_atomically(path: Path, text: str) -> None:
    """Raises OSError, and then leaves nothing behind, when the disk is full."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    return value


def result(**fields: Any) -> dict[str, Any]:
    """A result with every field of the schema, None where there is nothing to say."""
    unknown = set(fields) - set(FIELDS)
    assert not unknown, f"{unknown} not in the result schema"
    assert fields["status"] in STATUSES, fields["status"]
    return {"schema_version": SCHEMA_VERSION, **{name: fields.get(name) for name in FIELDS[1:]}}


def write_result(folder: Path, value: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RESULT, json.dumps(finite(value), indent=1) + "\n")


def write_samples(path: Path, samples: list[dict[str, list[float]]], rounds: Sequence[int] | None = None) -> None:
    """samples.parquet: iteration, round, rank, pass, ms. `samples` are each rank's by pass; `rounds` says how many of them
    each round has, null: one has all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [number for number, n in enumerate(rounds or ()) for _ in range(n)]
    rows = [
        (iteration, numbers[iteration] if numbers else 0, rank, which, ms)
        for rank, passes in enumerate(samples)
        for which, values in passes.items()
        for iteration, ms in enumerate(values)
    ]
    iteration, number, rank, which, ms = zip(*rows, strict=True)
    table = pa.table({
        "iteration": pa.array(iteration, pa.int32()),
        "round": pa.array(number, pa.int32()),
        "rank": pa.array(rank, pa.int32()),
        "pass": pa.array(which, pa.string()),
        "ms": pa.array(ms, pa.float64()),
    })  # fmt: skip
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, scratch)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_samples(path: Path) -> list[dict[str, list[float]]]:
    """Each rank's samples by pass. Raises OSError."""
    import pyarrow.parquet as pq

    columns = pq.read_table(path).to_pydict()
    found: list[dict[str, list[float]]] = [{} for _ in range(max(columns["rank"]) + 1)]
    for rank, which, ms in zip(columns["rank"], columns["pass"], columns["ms"], strict=True):
        found[rank].setdefault(which, []).append(ms)  # rows are in the order of iterations
    return found


def write_csv(path: Path, rows: Iterable[dict[str, Any]], columns: list[str]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


TOLD_BY = {"timing.layers": "timing", "timing.autograd_thread": "timing", "timing.new_packs": "seqlens"}
MOST_LENGTHS = 8  # of a pack that are written out
COLUMNS = (
    "name", "status", "attention", "options", "config", "world_size", "device", "kernel", "transport", "batch", "seq_len", "heads",
    "kv_heads", "head_dim", "causal", "window", "q_len", "seqlens", "dtype", "mode", "seed", "timing", "settings", "rounds", "forward_ms", "forward_iqr", "backward_ms",
    "backward_iqr", "total_ms", "back_to_back_ms", "tokens_per_s", "tflops_per_device", "sol", "speedup", "efficiency",
    "exposed_forward_ms", "exposed_backward_ms", "kv_read_bytes",
    "forward_memory_read_bytes", "forward_l2_read_bytes", "peak_bytes", "rel_l2_out", "reason",
)  # fmt: skip


def row(result: Result) -> dict[str, Any]:
    """One result as a flat row of the summary."""
    found: dict[str, Any] = {"name": result.name, "status": result.status, "reason": result.reason}
    experiment, chosen, timing = result.experiment, result.chosen, result.timing
    found["config"] = text(result.config.get("config"))
    found["attention"] = text(result.group("attention").get("name"))
    if experiment:
        work = experiment.workload
        found |= {key: value for key, value in vars(work).items() if key not in ("window", "seqlens")}
        found["window"] = "{},{}".format(*work.window)
        found["seqlens"] = _lengths(work.seqlens)
        if experiment.timing.new_packs:
            found["seqlens"] = f"{len(work.seqlens or ())} sequences, in a new order each time"
        found["options"] = " ".join(f"{k}={v}" for k, v in experiment.options.items() if v is not None)
        for key in ("mode", "seed", "world_size", "device", "kernel", "transport"):
            found[key] = getattr(experiment, key)
        found["timing"] = timed(experiment.timing)
    else:
        found |= _asked(result)
    if chosen:
        found |= {"kernel": chosen.kernel, "transport": chosen.transport}
        if chosen.variant is not None:  # by attention=auto
            replayed = "graphs=True" if result.config.get("graphs") == "auto" and chosen.graphs else ""
            found["options"] = " ".join(filter(None, [chosen.variant, found.get("options"), replayed]))
    if timing and result.metrics and result.memory:
        for which, summary in timing.passes.items():
            found[f"{which}_ms"] = summary.median
            found[f"{which}_iqr"] = summary.iqr_over_median
        found["back_to_back_ms"] = timing.back_to_back_ms
        found["rounds"] = timing.rounds.unfinished and f"{timing.rounds.done} of {timing.rounds.of}"
        last = list(timing.passes)[-1]
        entry = result.metrics.passes[last]
        found |= {key: getattr(entry, key) for key in ("tokens_per_s", "tflops_per_device", "sol")}
        counted = timing.counters.passes.get("forward") if timing.counters else None
        if counted:  # beside what the model says
            found["kv_read_bytes"] = max(result.metrics.kv_bytes_read_by_rank, default=0) or None
            found |= {f"forward_{key}": getattr(counted, key) for key in ("memory_read_bytes", "l2_read_bytes")}
        found["peak_bytes"] = max(rank.peak for rank in result.memory.by_rank)
        several = experiment is not None and experiment.world_size > 1  # one rank against one device says nothing
        if several and result.baseline and last in result.baseline.speedup:
            found["speedup"] = result.baseline.speedup[last]
            found["efficiency"] = result.baseline.efficiency[last]
    for which, phases in result.phases.items():
        found[f"exposed_{which}_ms"] = phases.exposed_communication_ms
    if result.correctness and "out" in result.correctness.tensors:
        found["rel_l2_out"] = result.correctness.tensors["out"].rel_l2
    return {column: _storable(found.get(column)) for column in COLUMNS}


def _storable(value: Any) -> Any:
    """What a parquet column can hold: a whole number beyond int64, of a refused run, is left out. The reason names it."""
    return None if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def timed(timing: Method) -> str:
    """How a run was timed, in a few words."""
    said = str(timing.method)
    if timing.layers > 1:
        said += f" over {timing.layers} layers"
    return said + (" with autograd's thread" if timing.autograd_thread else "")


def _asked(result: Result) -> dict[str, Any]:
    """What a refused run's configuration says of it, as far as it is of the right type."""
    config = result.config
    kinds = {
        int: ("world_size", "batch", "seq_len", "heads", "kv_heads", "head_dim", "q_len", "seed"),
        bool: ("causal",),
        str: ("mode",),
    }
    found = {key: config[key] for kind, keys in kinds.items() for key in keys if type(config.get(key)) is kind}
    for key, named in (("kernel", "name"), ("transport", "name"), ("dtype", "name"), ("timing", "method")):
        name = text(result.group(key).get(named))
        if name is not None and name != "auto":
            found[key] = name
    if options := result.group("attention"):
        found["options"] = " ".join(f"{k}={v}" for k, v in options.items() if k != "name" and v is not None)
    return found


def _lengths(seqlens: Sequence[int] | None) -> str | None:
    if not seqlens:
        return None
    if len(seqlens) <= MOST_LENGTHS:
        return ",".join(map(str, seqlens))
    mean = sum(seqlens) / len(seqlens)
    return f"{len(seqlens)} sequences of {min(seqlens)} to {max(seqlens)}, {mean:.1f} on average"


def sweep_rows(folder: Path) -> list[dict[str, Any]]:
    """The results in a sweep's folder as the rows of its summary, in the order in which they were run. Files that are no
    results are named on stderr."""
    found, problems = read_results(folder, below=False)
    name_problems(problems)
    found.sort(key=lambda result: result.environment.started_at)
    rows = [row(result) for result in found]
    for entry, text in zip(rows, _settings(found, rows), strict=True):
        entry["settings"] = text
    return rows


def _settings(values: list[Result], rows: list[dict[str, Any]]) -> list[str | None]:
    """Of each run, the overrides in which the runs differ and which no column of its row tells apart."""
    given: list[dict[str, str]] = []
    for value in values:
        # none in those of earlier versions
        pairs = (text.replace("\\:", ":").split("=", 1) for text in value.environment.overrides if "=" in text)
        given.append({key.lstrip("+"): text for key, text in pairs})
    known = [(one, entry) for one, entry in zip(given, rows, strict=True) if one]
    swept = []
    for key in dict.fromkeys(key for one in given for key in one):
        texts = {one.get(key) for one, _ in known}
        # a column may hold what was taken, the same for auto and for its choice
        column = TOLD_BY.get(key, key)
        told = len({entry[column] for _, entry in known}) if column in COLUMNS else 1
        if (
            len(texts) > told
            and not key.startswith(("attention.", "seqlens_", "hydra."))
            and key not in ("order", "output", "resume")
        ):
            swept.append(key)
    return [" ".join(f"{key}={one[key]}" for key in swept if key in one) or None for one in given]


def summarize_sweep(folder: Path) -> list[dict[str, Any]]:
    """Bring a sweep's summary.csv, .parquet and .md up to date with the results in its folder; returns the rows."""
    rows = sweep_rows(folder)
    if not rows:
        return rows
    write_csv(folder / "summary.csv", rows, list(COLUMNS))
    _write_parquet(folder / "summary.parquet", rows)
    write_atomically(folder / "summary.md", markdown(rows))
    return rows


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows), scratch)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


SHOWN = (
    ("attention", "attention", "{}"),
    ("options", "options", "{}"),
    ("config", "config", "{}"),
    ("world_size", "W", "{}"),
    ("batch", "batch", "{}"),
    ("seq_len", "tokens", "{:,}"),
    ("q_len", "queries", "{}"),
    ("seqlens", "sequences", "{}"),
    ("heads", "heads", "{}"),
    ("kv_heads", "KV heads", "{}"),
    ("head_dim", "D", "{}"),
    ("causal", "causal", "{}"),
    ("window", "window", "{}"),
    ("dtype", "dtype", "{}"),
    ("mode", "mode", "{}"),
    ("seed", "seed", "{}"),
    ("kernel", "kernel", "{}"),
    ("transport", "transport", "{}"),
    ("timing", "timing", "{}"),
    ("settings", "settings", "{}"),
    ("rounds", "rounds", "{}"),
    ("status", "status", "{}"),
    ("forward_ms", "fwd ms", "{:.3f}"),
    ("backward_ms", "bwd ms", "{:.3f}"),
    ("total_ms", "total ms", "{:.3f}"),
    ("tflops_per_device", "TFLOP/s", "{:.3g}"),
    ("efficiency", "eff.", "{:.0%}"),
    ("exposed_forward_ms", "exp. fwd", "{:.3f}"),
    ("exposed_backward_ms", "exp. bwd", "{:.3f}"),
    ("kv_read_bytes", "KV bytes, model", "{:,}"),
    ("forward_memory_read_bytes", "memory read", "{:,}"),
    ("forward_l2_read_bytes", "L2 read", "{:,}"),
    ("rel_l2_out", "rel L2", "{:.1e}"),
)


# shown of a sweep only where its runs differ in it
WHERE_DIFFERENT = {
    "batch", "q_len", "seqlens", "heads", "kv_heads", "head_dim", "causal", "window", "mode", "seed", "transport",
}  # fmt: skip


def differ(rows: list[dict[str, Any]], key: str) -> bool:
    """Whether the runs that got so far differ in it. To be no pack, or no decode, is to differ from one."""
    found = {entry.get(key) for entry in rows if entry.get("device") is not None or entry.get(key) is not None}
    return len(found if key in ("q_len", "seqlens") else found - {None}) > 1


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """What a reader who compares the rows must know."""
    ran = [entry for entry in rows if entry["status"] == "ok"]
    if {entry.get("seqlens") is None for entry in ran} == {True, False}:
        return ["Rows with sequences are of packs, which are less work than single sequences of as many tokens."]
    return []


def cells(entry: dict[str, Any]) -> list[str]:
    return [template.format(entry[key]) if entry.get(key) is not None else "" for key, _, template in SHOWN]


def escaped(text: str) -> str:
    """One line of Markdown that shows the text, whatever HTML is in it."""
    return re.sub(r"[\r\n]+", " ", text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_row(texts: Iterable[str]) -> str:
    """A row of a Markdown table; what is in a cell stays in it."""
    return "| " + " | ".join(escaped(text).replace("|", "\\|") for text in texts) + " |"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The columns in which any run has something, and of some those in which the runs differ."""
    shown = [
        i
        for i, (key, *_) in enumerate(SHOWN)
        if (differ(rows, key) if key in WHERE_DIFFERENT else any(entry.get(key) is not None for entry in rows))
    ]
    lines = [markdown_row(SHOWN[i][1] for i in shown), "|" + " --- |" * len(shown)]
    lines += [markdown_row(cells(entry)[i] for i in shown) for entry in rows]
    lines += [f"\n{remark}" for remark in remarks(rows)]
    told = [entry for entry in rows if entry["status"] != "ok" or entry["reason"]]
    said = [f"- `{entry['name']}`: {entry['status']}: {escaped(entry['reason'] or '')}" for entry in told]
    lines += ["", *said] if said else []
    return "\n".join(lines) + "\n"
