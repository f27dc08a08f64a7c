"""The table of a page: what it knows of each run, as columns that are small in JSON."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner.output.columns import COLUMNS
from runner.output.reader import RESULT
from runner.reading import read_regular
from runner.report.fair import spread
from runner.report.labels import varying_options
from runner.report.runs import FACTS, PASSES, Run
from runner.report.scaling import scaling
from runner.report.table import differing, fact
from runner.report.tables import environment_facts, rate_title

LOG_LINES = 15
MOST_LOG_BYTES = 64 << 10  # of the end of a log
# where a run's output goes, which its repetition does not need
LEFT_OUT = ("output=", "hydra.", "resume=")


@dataclass(frozen=True)
class Column:
    """A column: its title, and a value for each run, None where the run has none. `group`: `fact` (text, to filter by),
    `metric` (a number), or where the details of a run show it: `config`, `environment`, `about`.
    format: of a metric, how the page shows it. better: `lower`, `higher`, or empty where neither is.
    also: other columns that belong to it (`spread`, `low`, `high`), by what they are."""

    key: str
    title: str
    group: str
    values: list[Any]
    format: str = ""
    better: str = ""
    shown: bool = False
    also: Mapping[str, str] | None = None

    def plain(self) -> dict[str, Any]:
        about = {"key": self.key, "title": self.title, "group": self.group, "format": self.format}
        more = {"better": self.better, "shown": self.shown, "also": self.also}
        return about | {key: value for key, value in more.items() if value} | {"data": packed(self.values)}


def columns(runs: Sequence[Run], sweeps: Sequence[str], out: Path) -> list[Column]:
    """The columns of these runs that are not empty. sweeps: the name of each run's sweep; out: the page's folder, from
    which files are linked."""
    found = [*_facts(runs, sweeps), *_metrics(runs), *_details(runs, out)]
    return [column for column in found if any(value is not None for value in column.values)]


def _facts(runs: Sequence[Run], sweeps: Sequence[str]) -> list[Column]:
    varying, shown = varying_options(runs), set(differing(runs)) | {"attention"}

    def values(key: str) -> list[Any]:
        whole = [getattr(run, key) for run in runs]
        numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in whole if value is not None)
        return whole if numbers else [fact(run, key, varying) or None for run in runs]

    found = [Column("sweep", "sweep", "fact", list(sweeps), shown=True)] if len(set(sweeps)) > 1 else []
    found += [Column(key, title, "fact", values(key), shown=key in shown) for key, title in FACTS.items()]
    statuses = [run.status for run in runs]
    limited = [run.result.last_metrics.limited_by if run.result.last_metrics else None for run in runs]
    return [
        *found,
        Column("limited_by", "limited by", "fact", limited),
        Column("status", "status", "fact", statuses, shown=set(statuses) != {"ok"}),
    ]


def _metrics(runs: Sequence[Run]) -> list[Column]:
    against = scaling(runs)
    rows = [run.row for run in runs]
    found = []
    for key, page in ((column.key, column.page) for column in COLUMNS if column.page):
        values = [row[key] for row in rows]
        if key in ("speedup", "efficiency"):
            values = [getattr(against[run], key) if run in against else None for run in runs]
        if key.startswith("exposed_"):
            values = [x if run.ok and (run.world_size or 0) > 1 else None for x, run in zip(values, runs, strict=True)]
        which, also = key.removesuffix("_ms"), None
        if which in (*PASSES, "optimizer"):
            also = {"spread": f"{which}_iqr", "low": f"{which}_low", "high": f"{which}_high"}
            found += _spreads(runs, which, also)
        title = rate_title(runs) if key == "tflops_per_device" else page.title
        short = [_short(value) for value in values]
        found.append(Column(key, title, "metric", short, page.format, page.better, page.shown, also))
    return found


def _spreads(runs: Sequence[Run], which: str, keys: Mapping[str, str]) -> list[Column]:
    """IQR over median and the ends of the interval of the median, of a pass."""
    times = [run.passes.get(which) if run.ok else None for run in runs]
    ends = [spread(run, which) if found else None for run, found in zip(runs, times, strict=True)]
    iqr = [_short(found.iqr_over_median, 3) if found and found.n > 1 else None for found in times]
    return [
        Column(keys["spread"], f"{which} IQR", "spread", iqr, "percent"),
        Column(keys["low"], f"{which} low", "spread", [_short(pair[0]) if pair else None for pair in ends]),
        Column(keys["high"], f"{which} high", "spread", [_short(pair[1]) if pair else None for pair in ends]),
    ]


def _details(runs: Sequence[Run], out: Path) -> list[Column]:
    configs = [flat(run.result.config) for run in runs]
    places = [environment_facts(run) | {"started": _date(run.environment.started_at)} for run in runs]
    places = [{title: text or None for title, text in found.items()} for found in places]
    about: dict[str, Callable[[Run], Any]] = {
        "name": lambda run: run.result.name,
        "reason": lambda run: run.result.reason,
        "log": log_tail,
        "command": command,
        "files": lambda run: files(run, out) or None,
    }
    return [
        *(Column(key, key, "about", [value(run) for run in runs]) for key, value in about.items()),
        *_of_dicts("config", configs),
        *_of_dicts("environment", places),
    ]


def _of_dicts(group: str, found: Sequence[Mapping[str, Any]]) -> list[Column]:
    keys = dict.fromkeys(key for values in found for key in values)
    return [Column(f"{group}.{key}", key, group, [values.get(key) for values in found]) for key in keys]


def flat(value: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A nested configuration as `group.key` to text, without those that are null."""
    found: dict[str, str] = {}
    for key, below in value.items():
        if isinstance(below, Mapping):
            found |= flat(below, f"{above}{key}.")
        elif below is not None:
            found[f"{above}{key}"] = below if isinstance(below, str) else json.dumps(below)
    return found


def command(run: Run) -> str | None:
    """The command that repeats the run with the same inputs; that of its whole sweep where its overrides are not
    recorded."""
    about = run.environment
    if not about.overrides:
        return f"python {shlex.join(about.argv)}" if about.argv else None
    given = [text for text in about.overrides if not text.startswith(LEFT_OUT)]
    seed = run.result.asked.seed
    if seed is not None and not any(text.startswith("seed=") for text in given):
        given.append(f"seed={seed}")
    return f"python -m runner {shlex.join(given)}"


def log_tail(run: Run) -> str | None:
    """The last lines of a failed run's log."""
    if run.status == "ok":
        return None
    if run.result.failure and run.result.failure.log_tail:
        return "\n".join(run.result.failure.log_tail)
    try:
        end = read_regular(run.result.folder / "run.log", MOST_LOG_BYTES, follow=False, end=True)
        lines = end.decode(errors="replace").splitlines()
    except OSError:
        return None
    return "\n".join(lines[-LOG_LINES:]) or None


def files(run: Run, out: Path) -> dict[str, str]:
    """The links to a run's files that are there, relative to the page, by name."""
    folder = run.result.folder
    if not folder.is_dir():
        return {}
    named = {"result": RESULT, **run.result.artifacts}
    below = os.path.relpath(folder.resolve(), out.resolve())
    return {
        name: quote(os.path.join(below, file))
        for name, file in named.items()
        if (folder / file).is_file() and not (folder / file).is_symlink()
    }


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """The values of a column, small: {all} where they are the same, {of, at} with an index into the distinct ones where
    many repeat, else {each}."""
    texts = [json.dumps(value) for value in values]
    distinct = list(dict.fromkeys(texts))
    if len(distinct) == 1:
        return {"all": values[0]}
    if 2 * len(distinct) > len(texts):
        return {"each": list(values)}
    place = {text: i for i, text in enumerate(distinct)}
    return {"of": [json.loads(text) for text in distinct], "at": [place[text] for text in texts]}


def _short(value: Any, digits: int = 5) -> Any:
    """A number with so many digits."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _date(at: float) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)) if at else None
