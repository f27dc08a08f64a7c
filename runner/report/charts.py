"""The data of the charts: which runs go on which axes. `runner.report.drawing` draws them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.labels import labels
from runner.report.runs import FACTS, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import fact

KINDS = {"time": "Time of a step", "tflops": "Rate", "efficiency": "Efficiency against one device"}
OVER = {"seq_len": "sequence length, tokens", "world_size": "world size, ranks"}
OURS, EXTERNAL = "ours", "external"
MOST_LINES = 6  # of one panel


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
        shares = {(run.seq_len or 0) / (run.world_size or 1) for run in runs}
        if set(OVER) <= set(varying) and len(shares) == 1:
            return Axes("world_size", tuple(key for key in varying if key not in OVER), int(shares.pop()))
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


def points(runs: Sequence[Run], axes: Axes, which: str = "total") -> list[dict[str, Any]]:
    """A row for each run that is ok, with its time and rate of `which`; of a run without a backward, of its forward."""
    named, against = labels(runs), scaling(runs)
    rows = []
    for run in runs:
        if not run.ok or not run.result.metrics:
            continue
        measured = which if which in run.passes else "forward"
        times = run.passes[measured]
        rows.append({
            "label": named[run],
            "variant": str(run.attention),
            "whose": EXTERNAL if run.external else OURS,
            "kernel": run.kernel,
            "panel": ", ".join(f"{FACTS[key]} {fact(run, key) or 'none'}" for key in axes.panel),
            "pass": measured,
            "over": getattr(run, axes.over) if axes.over else None,
            "time": times.median,
            "p10": times.p10,
            "p90": times.p90,
            "tflops": (rate := run.result.metrics.passes[measured].tflops_per_device),
            "tflops_p10": rate * times.median / times.p90 if times.p90 else None,
            "tflops_p90": rate * times.median / times.p10 if times.p10 else None,
            "efficiency": against[run].efficiency if run in against else None,
        })  # fmt: skip
    return rows


def few_lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with at most MOST_LINES labels a panel where that can be: our variants and external packages apart, or a
    panel for each setting beside the variant. Rows have label, variant, whose and panel."""
    if _most_lines(rows) <= MOST_LINES:
        return rows
    apart = [row | {"panel": _joined(row["panel"], row["whose"])} for row in rows]
    if _most_lines(apart) <= MOST_LINES:
        return apart
    if len({row["variant"] for row in rows}) == 1:
        return rows
    split = [
        row
        | {"label": row["variant"], "panel": _joined(row["panel"], row["label"].removeprefix(row["variant"]).strip())}
        for row in rows
    ]
    if _most_lines(split) <= MOST_LINES:
        return split
    return [row | {"panel": _joined(row["panel"], row["whose"])} for row in split]


def _most_lines(rows: list[dict[str, Any]]) -> int:
    lines = Counter(panel for panel, _ in {(row["panel"], row["label"]) for row in rows})
    return max(lines.values(), default=0)


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))
