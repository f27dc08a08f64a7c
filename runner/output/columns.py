"""The one table of what is known of a run: a summary, a printed table, a page and a tracker each show some of these columns. A new
fact of a result is its field in `fields`, the line that measures it, and its column here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runner.output.terminal import gib
from runner.record.fields import NOISY, Method, digits
from runner.record.result import Result

BEYOND = ("v_head_dim", "scale", "softcap", "sinks", "prefix", "kv_lengths")  # plain attention
MOST_LENGTHS = 8  # a packed batch of more sequences is described, not listed


class OnPage(NamedTuple):
    """How the page shows a number. format: as `runs.js` knows it. better: `lower`, `higher`, or empty where neither is.
    shown: whether the table has the column, not only the details of a run."""

    title: str
    format: str
    better: str = ""
    shown: bool = True


@dataclass(frozen=True)
class Column:
    """key: its name in summary.csv. title, format: in tables; a column without a title is in files only. value: where a result has
    it, as the path of its fields, or a function of the result; by default what was asked. measured: not asked for, and
    empty where nothing was timed. swept: shown only where the runs differ in it. none: whether an empty cell says that
    there is none. drop: a narrow terminal leaves out first the columns of the smallest number; those of 0 stay."""

    key: str
    title: str = ""
    format: str = "{}"
    value: str | Callable[[Result], Any] = ""
    page: OnPage | None = None
    measured: bool = False
    swept: bool = False
    none: bool = False
    drop: int = 0
    left: bool = False
    wrapped: bool = False

    def text(self, row: dict[str, Any]) -> str:
        """The cell of a row; a time, or a ratio of times, has as many digits as its noise leaves, and `!` where it is noisy."""
        value = row.get(self.key)
        if value is None:
            return ""
        time = row.get(f"{self.key.removesuffix('_ms')}_iqr") if self.key.endswith("_ms") else None
        spreads = [row.get(key) for key in ("total_iqr" if row.get("total_ms") else "forward_iqr", "baseline_iqr")]
        noisy = (time or 0.0) > NOISY or (self.key == "speedup" and max(iqr or 0.0 for iqr in spreads) > NOISY)
        if time is not None or noisy:
            return f"{digits(value, noisy)}{'!' if noisy else ''}"
        return gib(value) if self.format == "bytes" else self.format.format(value)

    def of(self, result: Result) -> Any:
        return self.value(result) if callable(self.value) else _at(result, self.value or f"asked.{self.key}")


def _at(value: Any, path: str) -> Any:
    """The value at a path of fields and keys; None where a part of it is missing."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _used(result: Result, key: str) -> str | None:
    """The kernel or transport that ran, not `auto`."""
    name: str | None = getattr(result.chosen or result.asked, key)
    return None if name == "auto" else name


def _options(result: Result) -> str:
    options = result.taken or [f"{key}={value}" for key, value in result.asked.options.items()]
    return " ".join([*options, "graphs=True"] if result.replay_taken and result.taken else options)


def _sequences(result: Result) -> str | None:
    text = _listed(result.asked.seqlens)
    return f"{text}, in a new order each time" if text and result.asked.timing.new_packs else text


def _listed(value: Any) -> str | None:
    """Lengths in a few words; None for a text, which says how they are drawn."""
    if not isinstance(value, list):
        return None
    if len(value) <= MOST_LENGTHS:
        return ",".join(map(str, value))
    return f"{len(value)} sequences of {min(value)} to {max(value)}, {sum(value) / len(value):.1f} on average"


def timing_text(timing: Method) -> str | None:
    """How a run is timed, in a few words."""
    if timing.method is None:
        return None
    layers = f" over {timing.layers} layers" if timing.layers > 1 else ""
    return timing.method + layers + (" with autograd's thread" if timing.autograd_thread else "")


def _last(result: Result, path: str) -> Any:
    """Of the last pass."""
    return _at(result, f"{path}.{next(reversed(result.passes), '')}")


def _gain(result: Result, number: int) -> float | None:
    return result.gain[number] if result.gain else None


def _nothing(result: Result) -> None:
    """Of a column that depends on the other runs of a sweep."""


def _swept(key: str, title: str, format: str = "{}", value: Any = "", none: bool = False, **more: Any) -> Column:
    return Column(key, title, format, value, swept=True, none=none, **more)


def _measured(key: str, title: str, format: str, value: Any, page: OnPage | None = None, **more: Any) -> Column:
    return Column(key, title, format, value, page, measured=True, **more)


def _times(which: str, title: str, drop: int = 0) -> list[Column]:
    page, at = OnPage(f"{which} ms", "ms", "lower"), f"passes.{which}"
    return [
        _measured(f"{which}_ms", title, "{:.3f}", f"{at}.median", page, drop=drop),
        _measured(f"{which}_iqr", f"{title.removesuffix(' ms')} IQR", "{:.1%}", f"{at}.iqr_over_median", drop=2),
    ]


def _exposed(which: str, title: str, drop: int) -> Column:
    path, page = f"phases.{which}.exposed_communication_ms", OnPage(f"exposed comm. {which} ms", "ms", "lower")
    return Column(f"exposed_{which}_ms", title, "{:.3f}", path, page, measured=True, drop=drop)


def _counted(key: str, title: str, page: str, drop: int) -> Column:
    path = f"timing.counters.passes.forward.{key}"
    return _measured(f"forward_{key}", title, "{:,}", path, OnPage(page, "bytes", "lower", False), drop=drop)


COLUMNS = (
    Column("name", value="name"),
    Column("model", "model"),
    Column("attention", "attention", left=True),
    Column("options", "options", value=_options, wrapped=True),
    Column("config", "config", left=True, drop=16),
    Column("world_size", "W"),
    Column("device"),
    _swept("batch", "batch"),
    Column("seq_len", "tokens", "{:,}"),
    _swept("q_len", "queries", none=True),
    _swept("kv_lengths", "keys", value=lambda run: _listed(run.asked.kv_lengths), none=True),
    _swept("prefix", "prefix", "{:,}", none=True),
    _swept("seqlens", "sequences", value=_sequences, none=True, drop=8, wrapped=True),
    _swept("heads", "heads"),
    _swept("kv_heads", "KV heads"),
    _swept("head_dim", "D"),
    _swept("v_head_dim", "Dv", none=True),
    _swept("scale", "scale", "{:.4g}", none=True),
    _swept("softcap", "softcap", "{:g}", none=True),
    _swept("sinks", "sinks", value=lambda run: run.asked.sinks or None, none=True),
    _swept("mask", "mask", value="asked.named_mask.text", none=True),
    _measured("sparsity_ratio", "sparsity", "{:.1%}", "metrics.sparsity_ratio", swept=True),
    _swept("causal", "causal"),
    _swept("window", "window", value=lambda run: "{},{}".format(*run.asked.window) if run.asked.window else None),
    Column("dtype", "dtype", drop=9),
    _swept("mode", "mode", drop=11),
    _swept("seed", "seed", drop=1),
    Column("kernel", "kernel", value=lambda run: _used(run, "kernel"), left=True, drop=19),
    _swept("transport", "transport", value=lambda run: _used(run, "transport"), drop=12),
    Column("timing", "timing", value=lambda run: timing_text(run.asked.timing), drop=10, wrapped=True),
    Column("settings", "settings", value=_nothing, left=True, wrapped=True),
    Column("rounds", "rounds", value="timing.rounds.text"),
    Column("status", "status", value="status", left=True, drop=20),
    *_times("forward", "fwd ms", drop=18),
    *_times("backward", "bwd ms", drop=17),
    *_times("optimizer", "step ms"),
    *_times("total", "total ms"),
    _measured("back_to_back_ms", "", "", "timing.back_to_back_ms", OnPage("back to back ms", "ms", "lower", False)),
    _measured("tokens_per_s", "tokens/s", "{:,.0f}", "last_metrics.tokens_per_s", OnPage("tokens/s", "count", "higher", False), drop=11),
    _measured("tflops_per_device", "TFLOP/s", "{:.3g}", "last_metrics.tflops_per_device", OnPage("TFLOP/s a rank", "number", "higher"), drop=21),
    _measured("sol", "", "", "last_metrics.sol", OnPage("of limit", "percent", "higher")),
    _measured("mfu", "MFU", "{:.1%}", "last_metrics.mfu", OnPage("MFU", "percent", "higher")),
    _measured("parameters", "parameters", "{:,}", "model.parameters", OnPage("parameters", "count", shown=False)),
    _measured("first_loss", "first loss", "{:.3f}", "model.first_loss", OnPage("first loss", "number", shown=False)),
    _measured("loss", "loss", "{:.3f}", "model.loss", OnPage("last loss", "number", "lower", False)),
    _measured("baseline_ms", "baseline ms", "{:.3f}", lambda run: _last(run, "baseline.passes") if run.gain else None, drop=13),
    _measured("baseline_iqr", "", "", lambda run: _last(run, "baseline.iqr_over_median")),
    _measured("speedup", "speedup", "{:.2f}", lambda run: _gain(run, 0), OnPage("speedup", "number", "higher"), drop=14),
    _measured("efficiency", "eff.", "{:.0%}", lambda run: _gain(run, 1), OnPage("efficiency", "percent", "higher"), drop=15),
    _measured("flops", "", "", lambda run: _last(run, "metrics.flops")),
    _measured("density", "", "", "metrics.density", OnPage("mask density", "percent", shown=False)),
    _measured("connections", "", "", "metrics.connections"),
    _measured("mask_build_ms", "", "", "metrics.mask_build_ms", OnPage("mask build ms", "ms", "lower", False)),
    _exposed("forward", "exp. fwd", drop=8),
    _exposed("backward", "exp. bwd", drop=7),
    _measured("kv_read_bytes", "KV bytes, model", "{:,}", "metrics.kv_read_bytes", OnPage("KV bytes, model", "bytes", "lower", False), drop=6),
    _measured("kv_bytes_saved", "saved", "{:.1%}", _nothing),
    _measured("speedup_over_separate", "over separate", "{:.2f}", _nothing),
    _counted("memory_read_bytes", "memory read", "memory read, forward", drop=5),
    _counted("l2_read_bytes", "L2 read", "L2 read, forward", drop=4),
    _measured("peak_bytes", "peak memory", "bytes", "peak_bytes", OnPage("peak memory a rank", "bytes", "lower"), drop=5),
    _measured("joules_per_token", "J/token", "{:.3g}", "energy.joules_per_token"),
    _measured("tflops_per_watt", "TFLOP/s/W", "{:.3g}", "energy.tflops_per_watt"),
    _measured("rel_l2_out", "rel L2", "{:.1e}", "correctness.tensors.out.rel_l2", OnPage("rel L2 of out", "power", "lower", False), drop=3),
    Column("reason", value="reason"),
)  # fmt: skip
TABLE = tuple(column for column in COLUMNS if column.title)  # of summary.md and of the printed table
KEYS = tuple(column.key for column in COLUMNS)


def row(result: Result) -> dict[str, Any]:
    """A result by the keys of COLUMNS. Parquet holds int64: a larger number, which was refused, is left out, and the reason names
    it."""
    values = {column.key: column.of(result) for column in COLUMNS}
    return {
        key: None if isinstance(value, int) and not -(2**63) <= value < 2**63 else value
        for key, value in values.items()
    }


def features(row: dict[str, Any], keys: Sequence[str] = (*BEYOND, "seqlens")) -> list[str]:
    """What a run's call has beyond plain attention, in a few words each."""
    texts = {column.title: column.text(row) for column in TABLE if column.key in keys}
    return [title if text == "True" else f"{title} {text}" for title, text in texts.items() if text]


def differ(rows: Sequence[dict[str, Any]], column: Column) -> bool:
    """Whether the runs differ in a column."""
    key = column.key
    values = {row.get(key) for row in rows if row.get("device") is not None or row.get(key) is not None}
    return len(values if column.none else values - {None}) > 1
