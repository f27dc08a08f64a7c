"""The data of the charts: which runs go on which axes, and how many points and lines a panel shows.
`runner.report.drawing` draws them."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from runner.report.comparison import comparable
from runner.report.labels import labels
from runner.report.runs import PHRASES, WORKLOAD, Run, latest
from runner.report.table import fact

# charts that a section of a document may show; each is the name of a panel
KINDS = {"time": "Time of a step", "tflops": "Rate", "efficiency": "Efficiency against one device"}
OVER = {"seq_len": "sequence length, tokens", "world_size": "world size, ranks"}
MOST_LINES = 8  # in the theme's colours
LEAST_POINTS = 1.5  # of a line, on average
MOST_FACETS = 30  # of one chart
MOST_POINTS = 1500  # of one chart
TITLE = 44  # characters of a line of a facet's title
# how a facet names a fact that a run lacks
WITHOUT = {"pack": "one sequence", "features": "plain attention", "model": "attention alone", "q_len": "S queries"}

Row = dict[str, Any]


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
        """Over `over` or, without it, over the fact by which lines have most points; None where most have one."""
        keys, named = varying(runs), labels(runs)
        shares = {(run.seq_len or 0) / (run.world_size or 1) for run in runs}
        if len(shares) == 1 and {*OVER} <= {*keys}:
            return Axes("world_size", tuple(key for key in keys if key not in OVER), int(shares.pop()))

        def points(key: str) -> float:
            """Of a line, which has the runs that differ in `key` only."""
            lines = {(named[run], *(getattr(run, other) for other in keys if other != key)) for run in runs}
            return len(runs) / len(lines)

        over = over or max((key for key in OVER if points(key) >= LEAST_POINTS), key=points, default=None)
        return Axes(over, tuple(key for key in keys if key != over))


def place(run: Run, keys: Iterable[str]) -> str:
    """The facts of `keys` as the title of a facet, in lines."""
    texts = ((key, fact(run, key)) for key in keys)
    title = joined(*(PHRASES.get(key, "{}").format(text) if text else WITHOUT.get(key, "") for key, text in texts))
    return textwrap.fill(title, TITLE, break_long_words=False, break_on_hyphens=False)


def asset(name: str) -> str:
    """The text of a file of the page."""
    return (resources.files("runner.report") / "assets" / name).read_text(encoding="utf-8")


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
        "label": label, "external": run.external, "panel": panel, "variant": str(run.attention),
        "kernel": str(run.kernel), "pass": measured, "time": short(times.median), "p10": short(times.p10), "p90": short(times.p90),
        "tflops": short(rate), **more,
    }  # fmt: skip


def plotted(runs: Sequence[Run], keys: Iterable[str], which: str, more: Callable[[Run], Row]) -> list[Row]:
    """A row for each run, in a panel for each combination of `keys`, with `more` of the run."""
    named, keys = labels(runs), list(keys)
    return [point(run, named[run], place(run, keys), which, **more(run)) for run in runs]


def points(runs: Sequence[Run], axes: Axes, which: str = "total") -> list[Row]:
    """A row for each run, and one for each place of the dense attention that was timed beside sparse runs: its time
    alone."""
    rows = plotted(runs, axes.panel, which, lambda run: {"over": getattr(run, axes.over) if axes.over else None})
    dense: dict[tuple[Any, ...], Row] = {}
    for run, row in zip(runs, rows, strict=True):
        if (ms := run.dense_ms.get(row["pass"])) is not None:
            name = dict.fromkeys(("label", "variant"), "dense attention")
            dense[row["panel"], row["over"]] = (
                row | name | {"time": short(ms), "p10": None, "p90": None, "tflops": None}
            )
    return [*rows, *dense.values()]


def several(rows: Sequence[Row], field: str) -> list[Row]:
    """The rows of lines that have several values of `field`."""
    values = defaultdict(set)
    for row in rows:
        values[row["label"], row["panel"]].add(row[field])
    return [row for row in rows if len(values[row["label"], row["panel"]]) > 1]


def few(items: Sequence[Any], most: int, noun: str) -> tuple[list[Any], str]:
    """At most so many of the items, evenly picked in their order, and a sentence that says it where some are left out."""
    if len(items) <= most:
        return list(items), ""
    kept = [items[i * len(items) // most] for i in range(most)]
    return kept, f"{most:,} of {len(items):,} {noun}, evenly picked; the table below has all runs."


def thinned(rows: list[Row], x: str) -> tuple[list[Row], str]:
    """At most MOST_FACETS facets and some MOST_POINTS points, of which all lines keep those at the same places on the x axis;
    and what is left out, in a sentence or two."""
    facets, note = few([*dict.fromkeys(row["facet"] for row in rows)], MOST_FACETS, "panels")
    rows = [row for row in rows if row["facet"] in facets]
    if len(rows) > MOST_POINTS:
        places = sorted({(row["facet"], row[x]) for row in rows}, reverse=True)  # the largest is kept
        kept, fewer = few(places, max(1, MOST_POINTS * len(places) // len(rows)), "places on the x axis")
        rows, note = [row for row in rows if (row["facet"], row[x]) in {*kept}], f"{note} {fewer}"
    return rows, note.strip()


def faceted(rows: Iterable[Row], most: int = MOST_LINES) -> list[Row]:
    """The rows with the `facet` that each stands in: its panel. Of one label in at most so many panels, each panel is a label. Of more
    labels than that, each variant that has several on average has a facet of its own."""
    rows = [row | {"facet": row["panel"]} for row in rows]
    labels, panels, variants = ({row[key] for row in rows} for key in ("label", "panel", "variant"))
    if len(labels) == 1 and 1 < len(panels) <= most:
        return [row | {"label": row["panel"].replace("\n", " "), "facet": ""} for row in rows]
    if most < len(labels) >= 2 * len(variants) > 2:
        for row in rows:
            row["facet"] = joined(row["panel"], row["variant"])
            row["label"] = row["label"].removeprefix(row["variant"]).strip() or "no setting"
    return rows
