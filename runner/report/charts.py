"""The data of the charts: which runs go on which axes, and how many points and lines a panel shows.
`runner.report.drawing` draws them."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from runner.report.comparison import comparable
from runner.report.labels import labels
from runner.report.runs import PHRASES, WORKLOAD, Run, latest
from runner.report.table import fact

# charts that a section of a document may show; each is the name of a panel
KINDS = {"time": "Time of a step", "tflops": "Rate", "efficiency": "Efficiency against one device"}
OVER = {"seq_len": "sequence length, tokens", "world_size": "world size, ranks"}
OURS, EXTERNAL = "ours", "external"
MOST_LINES = 8  # of one panel: as many as there are colours
MOST_FACETS = 30  # of one chart
MOST_POINTS = 1500  # of one chart
TITLE = 44  # characters of a line of a facet's title
# how a facet names a fact that a run lacks
WITHOUT = {"pack": "one sequence", "features": "plain attention", "model": "attention alone", "q_len": "S queries"}

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Panel:
    """A chart of the page. `name` is its anchor and its PNG's name, unique in a report; `note` says in a sentence how to
    read it. `spec` is a Vega-Lite specification with its data; colours, fonts and light or dark are the page's."""

    name: str
    title: str
    note: str
    spec: dict[str, Any]


def missing() -> str | None:
    """Why no charts and no page can be made here, and how to get the packages; None where they can be."""
    names = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
    absent = [package for module, package in names.items() if importlib.util.find_spec(module) is None]
    return (
        f"no charts and no report.html without {' and '.join(absent)}: pip install -e '.[report]' in a checkout"
        if absent
        else None
    )


def timed(runs: Sequence[Run]) -> list[Run]:
    """The timed runs whose workload is known; of runs that are repeated, the latest."""
    runs = [run for run in comparable(runs) if run.ok]
    named = labels(runs)
    last = {*latest(runs, lambda run: (named[run], run.workload)).values()}
    return [run for run in runs if run in last]


def varying(runs: Iterable[Run], *without: str) -> list[str]:
    """The facts of the workload in which the runs differ."""
    return [key for key in WORKLOAD if key not in without and len({getattr(run, key) for run in runs}) > 1]


@dataclass(frozen=True)
class Axes:
    """The axes of a chart. `over` is the x axis, one of OVER, or None for bars. `panel` has the other facts of the
    workload that vary: each combination has its own panel. `weak` is the number of tokens of each rank, where all runs
    have the same."""

    over: str | None
    panel: tuple[str, ...]
    weak: int | None = None

    @staticmethod
    def of(runs: Sequence[Run], over: str | None = None) -> Axes:
        """Over `over` or, without it, over the fact that most lines have several values of; None where few lines have."""
        keys, named = varying(runs), labels(runs)
        shares = {(run.seq_len or 0) / (run.world_size or 1) for run in runs}
        if len(shares) == 1 and {*OVER} <= {*keys}:
            return Axes("world_size", tuple(key for key in keys if key not in OVER), int(shares.pop()))

        def several(key: str) -> float:
            """The share of lines with several points, where a line has the runs that differ in `key` only."""
            lines = defaultdict(set)
            for run in runs:
                lines[named[run], *(getattr(run, other) for other in keys if other != key)].add(getattr(run, key))
            return sum(len(places) > 1 for places in lines.values()) / len(lines)

        over = over or max((key for key in OVER if key in keys and several(key) >= 0.5), key=several, default=None)
        return Axes(over, tuple(key for key in keys if key != over))


def place(run: Run, keys: Iterable[str]) -> str:
    """The facts of `keys` as the title of a facet, in lines."""
    texts = ((key, fact(run, key)) for key in keys)
    title = joined(*(PHRASES.get(key, "{}").format(text) if text else WITHOUT.get(key, "") for key, text in texts))
    return textwrap.fill(title, TITLE, break_long_words=False, break_on_hyphens=False)


def joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def short(value: float | None, digits: int = 5) -> float | None:
    """With so many digits: a page has many numbers."""
    return None if value is None else float(f"{value:.{digits}g}")


def point(run: Run, label: str, panel: str, which: str, **more: Any) -> Row:
    """The row of a timed run: the line and the panel that it belongs to, its time and rate of `which`, and `more`. A run
    without a backward has those of its forward."""
    measured = which if which in run.passes else "forward"
    times, metrics = run.passes[measured], run.result.metrics
    rate = metrics.passes[measured].tflops_per_device if metrics else None
    return {
        "label": label, "whose": EXTERNAL if run.external else OURS, "panel": panel, "kernel": str(run.kernel),
        "pass": measured, "time": short(times.median), "p10": short(times.p10), "p90": short(times.p90),
        "tflops": short(rate), **more,
    }  # fmt: skip


def points(runs: Sequence[Run], axes: Axes, which: str = "total") -> list[Row]:
    """A row for each run, and one for each place of the dense attention that was timed beside sparse runs: its time
    alone."""
    named = labels(runs)
    rows: list[Row] = []
    dense: dict[tuple[Any, ...], Row] = {}
    for run in runs:
        over = getattr(run, axes.over) if axes.over else None
        rows.append(row := point(run, named[run], place(run, axes.panel), which, over=over))
        if (ms := run.dense_ms.get(row["pass"])) is not None:
            time = {"label": "dense attention", "time": short(ms), **dict.fromkeys(("p10", "p90", "tflops"))}
            dense[row["panel"], over] = row | time
    return [*rows, *dense.values()]


def several(rows: Sequence[Row], field: str, *by: str) -> list[Row]:
    """The rows whose group, of one value of each of `by`, has several values of `field`."""
    values = defaultdict(set)
    for row in rows:
        values[*(row[key] for key in by)].add(row[field])
    return [row for row in rows if len(values[*(row[key] for key in by)]) > 1]


def few(items: Sequence[Item], most: int, noun: str) -> tuple[list[Item], str]:
    """At most so many of the items, evenly picked in their order, and a sentence that says it where some are left out."""
    if len(items) <= most:
        return list(items), ""
    kept = [items[i * len(items) // most] for i in range(most)]
    return kept, f"{most:,} of {len(items):,} {noun}, evenly picked; the table below has all runs."


def shown(rows: list[Row], x: str = "over") -> tuple[list[Row], str]:
    """Rows as lines or points: at most MOST_LINES a panel, MOST_FACETS panels and some MOST_POINTS points, of which all lines keep
    those at the same places on the x axis; and what is left out, in a sentence or two."""
    rows = few_lines(rows)
    facets, note = few([*dict.fromkeys(row["panel"] for row in rows)], MOST_FACETS, "panels")
    rows = [row for row in rows if row["panel"] in facets]
    if len(rows) > MOST_POINTS:
        places = sorted({(row["panel"], row[x]) for row in rows}, reverse=True)  # the largest is kept
        kept, thinned = few(places, max(1, MOST_POINTS * len(places) // len(rows)), "places on the x axis")
        rows, note = [row for row in rows if (row["panel"], row[x]) in {*kept}], f"{note} {thinned}"
    return rows, note.strip()


def few_lines(rows: list[Row]) -> list[Row]:
    """The rows with at most MOST_LINES labels a panel: with ours and external packages apart, or a panel for each value
    of one word of the labels, else for every MOST_LINES labels."""
    if not rows or max(map(len, _lines(rows).values())) <= MOST_LINES:
        return rows
    words = [row["label"].split() for row in rows]
    splits = [[(row["label"], row["whose"]) for row in rows]]
    for i in range(max(map(len, words))):
        splits.append([(" ".join(text[:i] + text[i + 1 :]), " ".join(text[i : i + 1])) for text in words])
    splits.append([(text[0], " ".join(text[1:]) or "no setting") for text in words])
    fitting = [moved for split in splits if _fits(moved := _moved(rows, split))]
    return min(fitting, key=lambda moved: len(_lines(moved)), default=None) or _in_parts(rows)


def one_panel(rows: list[Row], most: int) -> list[Row]:
    """Rows of one label in at most so many panels as labels in one panel."""
    names = {row["panel"]: row["panel"].replace("\n", " ") for row in rows}
    if len({row["label"] for row in rows}) > 1 or not 1 < len(names) <= most:
        return rows
    return [row | {"label": names[row["panel"]], "panel": ""} for row in rows]


def _moved(rows: list[Row], to: Iterable[tuple[str, str]]) -> list[Row]:
    """The rows with the label and the addition to the panel that `to` has for each."""
    return [
        row | {"label": label or row["label"], "panel": joined(row["panel"], panel)}
        for row, (label, panel) in zip(rows, to, strict=True)
    ]


def _lines(rows: list[Row]) -> dict[str, dict[str, None]]:
    """The labels of each panel, in their order."""
    labels: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        labels[row["panel"]][row["label"]] = None
    return labels


def _fits(rows: list[Row]) -> bool:
    """Few lines a panel, and not a panel for each line."""
    counts = [*map(len, _lines(rows).values())]
    return max(counts) <= MOST_LINES and 2 * len(counts) <= sum(counts)


def _in_parts(rows: list[Row]) -> list[Row]:
    """A panel for every MOST_LINES labels, in their order."""
    parts: dict[tuple[str, str], str] = {}
    for panel, names in _lines(rows).items():
        n = -(-len(names) // MOST_LINES)
        parts |= {(panel, name): f"{i * n // len(names) + 1} of {n}" for i, name in enumerate(names) if n > 1}
    return _moved(rows, ((row["label"], parts.get((row["panel"], row["label"]), "")) for row in rows))
