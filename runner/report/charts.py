"""The data of the charts: which runs go on which axes, and how many points and lines a panel shows.
`runner.report.drawing` draws them."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from runner.report.labels import labels
from runner.report.runs import PHRASES, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import fact

# charts that a section of a document may show; each is the name of a panel
KINDS = {"time": "Time of a step", "tflops": "Rate", "efficiency": "Efficiency against one device"}
OVER = {"seq_len": "sequence length, tokens", "world_size": "world size, ranks"}
OURS, EXTERNAL = "ours", "external"
MOST_LINES = 6  # of one panel
MOST_FACETS = 30  # of one chart
MOST_POINTS = 1500  # of one chart
TITLE = 44  # characters of a line of a facet's title
# how a facet names a fact that a run lacks
WITHOUT = {"pack": "one sequence", "features": "plain attention", "model": "attention alone", "q_len": "S queries"}

Row = dict[str, Any]
Item = TypeVar("Item")


def missing() -> str | None:
    """Why no charts and no page can be made here, and how to get the packages; None where they can be."""
    names = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
    absent = [package for module, package in names.items() if importlib.util.find_spec(module) is None]
    return (
        f"no charts and no report.html without {' and '.join(absent)}: pip install -e '.[report]' in a checkout"
        if absent
        else None
    )


@dataclass(frozen=True)
class Axes:
    """The axes of a chart. `over` is the x axis, one of OVER, or None for bars. `panel` has the other facts of the
    workload that vary: each combination has its own panel. `weak` is the number of tokens of each rank, where all runs
    have the same."""

    over: str | None
    panel: tuple[str, ...]
    weak: int | None = None

    @staticmethod
    def of(runs: Sequence[Run]) -> Axes:
        varying = [key for key in WORKLOAD if len({getattr(run, key) for run in runs}) > 1]
        if weak := Axes._weak(runs, varying):
            return weak
        named = labels(runs)

        def lines(key: str) -> float:
            """The share of lines with several points, where a line has the runs that differ in `key` only."""
            rest = [other for other in varying if other != key]
            places = {(named[run], *(getattr(run, other) for other in rest), getattr(run, key)) for run in runs}
            points = Counter(place[:-1] for place in places)
            return sum(n > 1 for n in points.values()) / len(points)

        over = max((key for key in OVER if key in varying), key=lines, default=None)
        if over is not None and lines(over) < 0.5:  # most lines would be a single point
            over = None
        return Axes(over, tuple(key for key in varying if key != over))

    @staticmethod
    def over_ranks(runs: Sequence[Run]) -> Axes:
        """Over the world size, whatever else varies."""
        varying = [key for key in WORKLOAD if len({getattr(run, key) for run in runs}) > 1]
        return Axes._weak(runs, varying) or Axes("world_size", tuple(key for key in varying if key != "world_size"))

    @staticmethod
    def _weak(runs: Sequence[Run], varying: Sequence[str]) -> Axes | None:
        shares = {(run.seq_len or 0) / (run.world_size or 1) for run in runs}
        if not set(OVER) <= set(varying) or len(shares) > 1:
            return None
        return Axes("world_size", tuple(key for key in varying if key not in OVER), int(shares.pop()))


def place(run: Run, keys: Iterable[str]) -> str:
    """The facts of `keys` as the title of a facet, in lines."""
    texts = ((key, fact(run, key)) for key in keys)
    title = joined(*(PHRASES.get(key, "{}").format(text) if text else WITHOUT.get(key, "") for key, text in texts))
    return textwrap.fill(title, TITLE, break_long_words=False, break_on_hyphens=False)


def joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def line(run: Run, label: str, keys: Iterable[str]) -> Row:
    """What the row of a run says of the line and the panel that it belongs to."""
    whose = EXTERNAL if run.external else OURS
    return {"label": label, "variant": str(run.attention), "whose": whose, "panel": place(run, keys)}


def short(value: float | None, digits: int = 5) -> float | None:
    """With so many digits: a page has many numbers."""
    return None if value is None else float(f"{value:.{digits}g}")


def points(runs: Sequence[Run], axes: Axes, which: str = "total") -> list[Row]:
    """A row for each label, panel and place on the x axis, with its time and rate of `which`; of a run without a
    backward, of its forward. Of runs that are repeated, the latest."""
    named, against = labels(runs), scaling(runs)
    found: dict[tuple[Any, ...], Row] = {}
    for run in sorted(runs, key=lambda run: -run.environment.started_at):
        if not run.ok or not run.result.metrics:
            continue
        about = line(run, named[run], axes.panel)
        measured = which if which in run.passes else "forward"
        times = run.passes[measured]
        spread = {"p10": times.p10, "time": times.median, "p90": times.p90}
        rate = run.result.metrics.passes[measured].tflops_per_device
        efficiency = against[run].efficiency if run in against else None
        row = about | {"kernel": run.kernel, "pass": measured, "over": getattr(run, axes.over) if axes.over else None}
        row |= {key: short(ms) for key, ms in spread.items()}
        for key, value in (("tflops", rate), ("efficiency", efficiency)):
            row[key] = short(value)
            row |= {
                f"{key}_{end}": short(value * times.median / ms) if value is not None and ms else None
                for end, ms in (("p10", times.p10), ("p90", times.p90))
            }
        found.setdefault((row["label"], row["panel"], row["over"]), row)
    order = {(named[run], place(run, axes.panel), getattr(run, axes.over) if axes.over else None): None for run in runs}
    return [found[key] for key in order if key in found]


def dense_points(runs: Sequence[Run], axes: Axes, which: str) -> list[Row]:
    """As `points`, of the dense attention that was timed beside sparse runs: its times alone."""
    found: dict[tuple[Any, ...], Row] = {}
    for run in sorted(runs, key=lambda run: -run.environment.started_at):
        measured = which if which in run.passes else "forward"
        if (ms := run.dense_ms.get(measured)) is not None:
            over = getattr(run, axes.over) if axes.over else None
            row = line(run, "dense attention", axes.panel) | {"kernel": run.kernel, "pass": measured, "over": over}
            row |= {"time": short(ms)} | dict.fromkeys(("p10", "p90", "tflops", "tflops_p10", "tflops_p90"))
            found.setdefault((row["panel"], over), row)
    return list(found.values())


@dataclass(frozen=True)
class Shown(Generic[Item]):
    """What a chart shows: rows or runs. `note` says in a sentence what it leaves out, and is empty where that is nothing."""

    rows: list[Item]
    note: str = ""


def shown(rows: list[Row], x: str = "over") -> Shown[Row]:
    """Rows as lines: at most MOST_LINES a panel, MOST_FACETS panels and MOST_POINTS points, of which every line of a
    panel keeps those at the same places on the x axis."""
    rows, notes = few_lines(rows), []
    facets = list(dict.fromkeys(row["panel"] for row in rows))
    if len(facets) > MOST_FACETS:
        kept = set(facets[:MOST_FACETS])
        rows = [row for row in rows if row["panel"] in kept]
        notes.append(f"The first {MOST_FACETS} of {len(facets)} panels; the table below has all runs.")
    if (total := len(rows)) > MOST_POINTS:
        places: dict[str, set[Any]] = {}
        for row in rows:
            places.setdefault(row["panel"], set()).add(row[x])
        every = -(-total // MOST_POINTS)
        picked = {panel: {*sorted(of)[::every], max(of)} for panel, of in places.items()}
        rows = [row for row in rows if row[x] in picked[row["panel"]]]
        notes.append(
            f"{len(rows):,} of {total:,} points: one place of {every} on the x axis; the table below has all runs."
        )
    return Shown(rows, " ".join(notes))


def few_points(rows: list[Item], most: int = MOST_POINTS) -> Shown[Item]:
    """At most so many rows or runs, evenly picked in their order."""
    if len(rows) <= most:
        return Shown(rows)
    kept = [rows[i * len(rows) // most] for i in range(most)]
    return Shown(kept, f"{most:,} of {len(rows):,} runs, picked evenly; the table below has all runs.")


def few_lines(rows: list[Row]) -> list[Row]:
    """The rows with at most MOST_LINES labels a panel: with ours and external packages apart, or a panel for each value
    of one setting, else a panel for every six labels. Several panels of one label are one panel with a line for each."""
    if facets := _as_lines(rows):
        return facets
    if _most_lines(rows) <= MOST_LINES:
        return rows
    several = len({row["variant"] for row in rows}) > 1
    splits = [_by_whose(rows), *((_by_setting(rows), _by_variant(rows)) if several else ()), *_by_word(rows)]
    return next((found for found in splits if _fits(found)), None) or _by_six(_by_whose(rows))


def _fits(rows: list[Row]) -> bool:
    """Few lines a panel, and not a panel for each line."""
    return _most_lines(rows) <= MOST_LINES and 2 * len(_panels(rows)) <= len(_lines(rows))


def one_panel(rows: list[Row]) -> list[Row] | None:
    """Rows of one label in several panels as several labels in one panel."""
    if len({row["label"] for row in rows}) > 1:
        return None
    return [row | {"label": row["panel"].replace("\n", " ") or row["label"], "panel": ""} for row in rows]


def _as_lines(rows: list[Row]) -> list[Row] | None:
    panels = {row["panel"] for row in rows}
    return one_panel(rows) if 1 < len(panels) <= MOST_LINES and max(map(len, panels)) <= 60 else None


def _by_whose(rows: list[Row]) -> list[Row]:
    if len({row["whose"] for row in rows}) == 1:
        return rows
    return [row | {"panel": joined(row["panel"], row["whose"])} for row in rows]


def _by_setting(rows: list[Row]) -> list[Row]:
    """A panel for each setting beside the variant."""
    return _moved(rows, lambda row: (row["variant"], _beside(row) or "no setting"))


def _by_variant(rows: list[Row]) -> list[Row]:
    return _moved(rows, lambda row: (_beside(row), row["variant"]))


def _by_word(rows: list[Row]) -> list[list[Row]]:
    """A panel for each value of one word of the labels, those of the fewest panels first."""
    words = {row["label"]: row["label"].split() for row in rows}
    if len({len(each) for each in words.values()}) != 1:
        return []

    def by(i: int) -> list[Row]:
        return _moved(rows, lambda row: (" ".join(_without(words[row["label"]], i)), words[row["label"]][i]))

    return sorted((by(i) for i in range(len(next(iter(words.values()))))), key=lambda found: len(_panels(found)))


def _by_six(rows: list[Row]) -> list[Row]:
    """A panel for every six labels, in their order."""
    of: dict[str, dict[str, int]] = {}
    for row in rows:
        labelled = of.setdefault(row["panel"], {})
        labelled.setdefault(row["label"], len(labelled))

    def part(row: Row) -> str:
        lines = len(of[row["panel"]])
        parts = -(-lines // MOST_LINES)
        return f"{of[row['panel']][row['label']] // -(-lines // parts) + 1} of {parts}" if parts > 1 else ""

    return [row | {"panel": joined(row["panel"], part(row))} for row in rows]


def _moved(rows: list[Row], to: Callable[[Row], tuple[str, str]]) -> list[Row]:
    """The rows with the label and the addition to the panel that `to` gives."""
    return [row | {"label": to(row)[0] or row["label"], "panel": joined(row["panel"], to(row)[1])} for row in rows]


def _beside(row: Row) -> str:
    return str(row["label"]).removeprefix(row["variant"]).strip()


def _without(words: list[str], i: int) -> list[str]:
    return words[:i] + words[i + 1 :]


def _panels(rows: list[Row]) -> set[str]:
    return {row["panel"] for row in rows}


def _lines(rows: list[Row]) -> set[tuple[str, str]]:
    return {(row["panel"], row["label"]) for row in rows}


def _most_lines(rows: list[Row]) -> int:
    return max(Counter(panel for panel, _ in _lines(rows)).values(), default=0)
