"""The one table of what is known of a run (columns.yaml), and its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attention.masks.band import Band
from runner.output.terminal import gib
from runner.reading import read_yaml
from runner.record.fields import NOISY, Method, NamedMask, digits
from runner.record.result import Asked, Result

BEYOND = ("v_head_dim", "scale", "softcap", "sinks", "prefix", "kv_lengths")  # plain attention
MOST_LENGTHS = 8  # a packed batch of more sequences is described, not listed


class OnPage(NamedTuple):
    """How the page shows a number, as in columns.yaml."""

    title: str
    format: str
    better: str = ""
    shown: bool = True


@dataclass(frozen=True)
class Column:
    """As in columns.yaml."""

    key: str
    title: str = ""
    format: str = "{}"
    value: str = ""
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
        made = VALUES.get(self.key)
        return made(result) if made else _at(result, self.value or f"asked.{self.key}")


def _at(result: Result, path: str) -> Any:
    """The value at a path of fields and keys; None where a part of it is missing."""
    value: Any = result
    for name in path.format(last=next(reversed(result.passes), "")).split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _used(result: Result, key: str) -> str | None:
    """The kernel or transport that ran, not `auto`."""
    name: str | None = getattr(result.chosen or result.asked, key)
    return None if name == "auto" else name


def _options(result: Result) -> str:
    options = result.taken or [f"{key}={value}" for key, value in result.asked.options.items()]
    return " ".join([*options, "graphs=True"] if result.replay_taken and result.taken else options)


def mask_text(asked: Asked, named: NamedMask | None) -> str | None:
    """The mask by name and the band of causal and window, where it hides anything. Raises ValueError for a band that is none."""
    if asked.causal is None or asked.window is None:
        return None
    parts = ["" if named is None else named.text, Band.of(asked.causal, asked.window).describe()]
    return " & ".join(dict.fromkeys(part for part in parts if part not in ("", "full"))) or "full"


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


VALUES: dict[str, Callable[[Result], Any]] = {  # of columns that are no field
    "options": _options,
    "kv_lengths": lambda run: _listed(run.asked.kv_lengths),
    "seqlens": _sequences,
    "sinks": lambda run: run.asked.sinks or None,
    "window": lambda run: "{},{}".format(*run.asked.window) if run.asked.window else None,
    "kernel": lambda run: _used(run, "kernel"),
    "transport": lambda run: _used(run, "transport"),
    "timing": lambda run: timing_text(run.asked.timing),
    "baseline_ms": lambda run: _at(run, "baseline.passes.{last}") if run.gain else None,
    "speedup": lambda run: run.gain and run.gain[0],
    "efficiency": lambda run: run.gain and run.gain[1],
}
COLUMNS = tuple(
    Column(**row | {"page": OnPage(*row["page"])} if "page" in row else row)
    for row in read_yaml(Path(__file__).with_name("columns.yaml"))
)
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
    shown = ((title, "" if text == "True" else text) for title, text in texts.items() if text)
    return [text if title in text else f"{title} {text}".strip() for title, text in shown]


def differ(rows: Sequence[dict[str, Any]], column: Column) -> bool:
    """Whether the runs differ in a column."""
    key = column.key
    values = {row.get(key) for row in rows if row.get("device") is not None or row.get(key) is not None}
    return len(values if column.none else values - {None}) > 1
