"""The summary of a sweep: a flat row for each run, as summary.csv, summary.parquet and summary.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runner.output.fields import Method
from runner.output.reader import read_results, report_problems
from runner.output.record import Result
from runner.output.results import replacing, write_csv, write_text

# the column that tells the values of a key apart, where it has another name
COLUMN_OF = {"timing.layers": "timing", "timing.autograd_thread": "timing", "timing.new_packs": "seqlens"}
MOST_LENGTHS = 8  # a packed batch of more sequences is described, not listed
COLUMNS = (
    "name", "status", "model", "attention", "options", "config", "world_size", "device", "kernel", "transport", "batch", "seq_len",
    "heads", "kv_heads", "head_dim", "v_head_dim", "scale", "softcap", "sinks", "mask", "causal", "window", "q_len", "kv_lengths", "prefix", "seqlens", "dtype", "mode", "seed", "timing", "settings",
    "rounds", "forward_ms", "forward_iqr", "backward_ms", "backward_iqr", "optimizer_ms", "optimizer_iqr", "total_ms", "back_to_back_ms", "tokens_per_s",
    "tflops_per_device", "sol", "mfu", "parameters", "first_loss", "loss", "baseline_ms", "speedup", "efficiency", "flops", "density", "sparsity_ratio", "connections", "mask_build_ms", "exposed_forward_ms", "exposed_backward_ms", "kv_read_bytes", "kv_bytes_saved", "speedup_over_separate",
    "forward_memory_read_bytes", "forward_l2_read_bytes", "peak_bytes", "joules_per_token", "tflops_per_watt", "rel_l2_out", "reason",
)  # fmt: skip
# the columns of summary.md and of the printed table: title and format
SHOWN = (
    ("model", "model", "{}"), ("attention", "attention", "{}"), ("options", "options", "{}"), ("config", "config", "{}"), ("world_size", "W", "{}"),
    ("batch", "batch", "{}"), ("seq_len", "tokens", "{:,}"), ("q_len", "queries", "{}"),
    ("kv_lengths", "keys", "{}"), ("prefix", "prefix", "{:,}"), ("seqlens", "sequences", "{}"),
    ("heads", "heads", "{}"), ("kv_heads", "KV heads", "{}"), ("head_dim", "D", "{}"), ("v_head_dim", "Dv", "{}"),
    ("scale", "scale", "{:.4g}"), ("softcap", "softcap", "{:g}"), ("sinks", "sinks", "{}"), ("mask", "mask", "{}"),
    ("sparsity_ratio", "sparsity", "{:.1%}"), ("causal", "causal", "{}"),
    ("window", "window", "{}"), ("dtype", "dtype", "{}"), ("mode", "mode", "{}"), ("seed", "seed", "{}"),
    ("kernel", "kernel", "{}"), ("transport", "transport", "{}"), ("timing", "timing", "{}"), ("settings", "settings", "{}"),
    ("rounds", "rounds", "{}"), ("status", "status", "{}"), ("forward_ms", "fwd ms", "{:.3f}"),
    ("backward_ms", "bwd ms", "{:.3f}"), ("optimizer_ms", "step ms", "{:.3f}"), ("total_ms", "total ms", "{:.3f}"), ("tflops_per_device", "TFLOP/s", "{:.3g}"),
    ("mfu", "MFU", "{:.1%}"), ("parameters", "parameters", "{:,}"), ("first_loss", "first loss", "{:.3f}"), ("loss", "loss", "{:.3f}"),
    ("baseline_ms", "baseline ms", "{:.3f}"), ("speedup", "speedup", "{:.2f}"), ("efficiency", "eff.", "{:.0%}"), ("exposed_forward_ms", "exp. fwd", "{:.3f}"),
    ("exposed_backward_ms", "exp. bwd", "{:.3f}"), ("kv_read_bytes", "KV bytes, model", "{:,}"),
    ("kv_bytes_saved", "saved", "{:.1%}"), ("speedup_over_separate", "over separate", "{:.2f}"),
    ("forward_memory_read_bytes", "memory read", "{:,}"), ("forward_l2_read_bytes", "L2 read", "{:,}"),
    ("joules_per_token", "J/token", "{:.3g}"), ("tflops_per_watt", "TFLOP/s/W", "{:.3g}"), ("rel_l2_out", "rel L2", "{:.1e}"),
)  # fmt: skip
# an empty cell of these says that there is none
NONE_COUNTS = {"q_len", "kv_lengths", "prefix", "seqlens", "v_head_dim", "scale", "softcap", "sinks", "mask"}
# of those, the ones shown only where the runs differ in them
WHERE_DIFFERENT = {
    "batch", "q_len", "kv_lengths", "prefix", "seqlens", "heads", "kv_heads", "head_dim", "v_head_dim", "scale", "softcap", "sinks", "mask", "sparsity_ratio", "causal", "window", "mode", "seed",
    "transport",
}  # fmt: skip


def row(result: Result) -> dict[str, Any]:
    """A result as a row of COLUMNS. All columns but `settings`, which depends on the other runs of the sweep."""
    found = _asked(result) | {"name": result.name, "status": result.status, "reason": result.reason} | _measured(result)
    # parquet holds int64; a larger number was refused, and the reason names it
    large = {key for key, value in found.items() if isinstance(value, int) and not -(2**63) <= value < 2**63}
    return {column: None if column in large else found.get(column) for column in COLUMNS}


def _asked(result: Result) -> dict[str, Any]:
    asked, used = result.asked, result.chosen or result.experiment or result.asked
    options = result.taken or [f"{key}={value}" for key, value in asked.options.items()]
    return vars(asked) | {
        "options": " ".join([*options, "graphs=True"] if result.replay_taken and result.taken else options),
        "kernel": None if used.kernel == "auto" else used.kernel,
        "transport": None if used.transport == "auto" else used.transport,
        "window": "{},{}".format(*asked.window) if asked.window else None,
        "sinks": asked.sinks or None,
        "mask": asked.named_mask.text if asked.named_mask else None,
        "seqlens": _lengths(asked.seqlens, asked.timing.new_packs) if isinstance(asked.seqlens, list) else None,
        "kv_lengths": _lengths(asked.kv_lengths, False) if isinstance(asked.kv_lengths, list) else None,
        "timing": timing_text(asked.timing),
    }


def _measured(result: Result) -> dict[str, Any]:
    timing, metrics, last = result.timing, result.last_metrics, next(reversed(result.passes), "")
    found: dict[str, Any] = {f"exposed_{which}_ms": p.exposed_communication_ms for which, p in result.phases.items()}
    if result.correctness and "out" in result.correctness.tensors:
        found["rel_l2_out"] = result.correctness.tensors["out"].rel_l2
    if not timing or not metrics or not result.metrics:
        return found
    for which, times in timing.passes.items():
        found |= {f"{which}_ms": times.median, f"{which}_iqr": times.iqr_over_median}
    found |= {key: getattr(metrics, key) for key in ("tokens_per_s", "tflops_per_device", "sol", "mfu")}
    if model := result.model:
        found |= {"parameters": model.parameters, "loss": model.loss, "first_loss": next(iter(model.loss_curve), None)}
    found |= {"back_to_back_ms": timing.back_to_back_ms, "peak_bytes": result.peak_bytes}
    found |= {
        key: getattr(result.metrics, key) for key in ("density", "sparsity_ratio", "connections", "mask_build_ms")
    }
    if result.energy:
        found |= {key: getattr(result.energy, key) for key in ("joules_per_token", "tflops_per_watt")}
    found["rounds"] = timing.rounds.text
    if result.baseline and result.gain:
        found["baseline_ms"] = result.baseline.passes.get(last)
        found["speedup"], found["efficiency"] = result.gain
    if timing.counters and (counted := timing.counters.passes.get("forward")):
        found |= {f"forward_{key}": getattr(counted, key) for key in ("memory_read_bytes", "l2_read_bytes")}
    found["flops"] = result.metrics.flops.get(last)
    found["kv_read_bytes"] = max(result.metrics.kv_bytes_read_by_rank, default=0) or None  # of a grouping, by the model
    return found


def timing_text(timing: Method) -> str | None:
    """How a run is timed, in a few words."""
    if timing.method is None:
        return None
    layers = f" over {timing.layers} layers" if timing.layers > 1 else ""
    return timing.method + layers + (" with autograd's thread" if timing.autograd_thread else "")


def _lengths(seqlens: Sequence[int], new_order: bool) -> str:
    if new_order:
        return f"{len(seqlens)} sequences, in a new order each time"
    if len(seqlens) <= MOST_LENGTHS:
        return ",".join(map(str, seqlens))
    mean = sum(seqlens) / len(seqlens)
    return f"{len(seqlens)} sequences of {min(seqlens)} to {max(seqlens)}, {mean:.1f} on average"


def sweep_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a sweep's folder in the order in which its runs started. Files that are no results are named on
    stderr."""
    found, problems = read_results(folder, below=False)
    report_problems(problems)
    found.sort(key=lambda result: result.environment.started_at)
    rows = [row(result) for result in found]
    for entry, text in zip(rows, _settings(found, rows), strict=True):
        entry["settings"] = text
    _add_gain_over_separate(found, rows)
    return rows


def _add_gain_over_separate(found: list[Result], rows: list[dict[str, Any]]) -> None:
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
        in_column = len({entry[column] for _, entry in known}) if column in COLUMNS else 1
        if len({overrides.get(key) for overrides, _ in known}) > in_column:
            swept.append(key)
    return [" ".join(f"{key}={overrides[key]}" for key in swept if key in overrides) or None for overrides in given]


def summarize_sweep(folder: Path) -> list[dict[str, Any]]:
    """Write summary.csv, summary.parquet and summary.md from the results in a sweep's folder; returns the rows."""
    rows = sweep_rows(folder)
    if rows:
        write_csv(folder / "summary.csv", rows, COLUMNS)
        write_parquet(folder / "summary.parquet", rows)
        write_text(folder / "summary.md", markdown(rows))
    return rows


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows), scratch)


def differ(rows: list[dict[str, Any]], key: str) -> bool:
    """Whether the runs differ in a column. An empty cell is a value in `NONE_COUNTS`, and means unknown elsewhere."""
    found = {entry.get(key) for entry in rows if entry.get("device") is not None or entry.get(key) is not None}
    return len(found if key in NONE_COUNTS else found - {None}) > 1


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """The sentences that a reader needs to compare the rows."""
    ran = [entry for entry in rows if entry["status"] == "ok"]
    found = []
    if {entry.get("seqlens") is None for entry in ran} == {True, False}:
        found.append("Rows with sequences are of packed batches: less work than one sequence of as many tokens.")
    if any(entry.get("exposed_forward_ms") is not None for entry in ran):
        found.append(
            "exp. fwd, exp. bwd: ms in which compute waits for communication, timed separately from fwd and bwd."
        )
    return found


def cells(entry: dict[str, Any]) -> list[str]:
    """A row as the texts of SHOWN."""
    return [template.format(entry[key]) if entry.get(key) is not None else "" for key, _, template in SHOWN]


def escaped(text: str) -> str:
    """The text as one line of Markdown, with any HTML in it shown as it is."""
    return re.sub(r"[\r\n]+", " ", text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_row(texts: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(escaped(text).replace("|", "\\|") for text in texts) + " |"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of the columns that are not empty, then the reasons of the runs that are not ok."""
    filled = [key for key, *_ in SHOWN if any(entry.get(key) is not None for entry in rows)]
    shown = [i for i, (key, *_) in enumerate(SHOWN) if (differ(rows, key) if key in WHERE_DIFFERENT else key in filled)]
    lines = [markdown_row(SHOWN[i][1] for i in shown), "|" + " --- |" * len(shown)]
    lines += [markdown_row(cells(entry)[i] for i in shown) for entry in rows]
    lines += [f"\n{remark}" for remark in remarks(rows)]
    explained = [entry for entry in rows if entry["status"] != "ok" or entry["reason"]]
    reasons = [f"- `{entry['name']}`: {entry['status']}: {escaped(entry['reason'] or '')}" for entry in explained]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])]) + "\n"
