"""The table of a page: what it knows of each run, as columns that are small in JSON."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omegaconf import MISSING, OmegaConf

from runner.config.schema import RunConf
from runner.output.columns import COLUMNS
from runner.output.reader import RESULT
from runner.output.record import Result
from runner.reading import read_regular
from runner.report.fair import spread
from runner.report.labels import labels, varying_options
from runner.report.runs import FACTS, PASSES, Run
from runner.report.scaling import scaling
from runner.report.table import fact
from runner.report.tables import environment_facts, rate_title

LOG_LINES = 15
MOST_LOG_BYTES = 64 << 10  # of the end of a log
# where a run's output goes, which its repetition does not need
LEFT_OUT = ("output=", "hydra.", "resume=")


@dataclass(frozen=True)
class Column:
    """A column: its title, and a value for each run, None where the run has none. `group`: `fact` (text, to filter by),
    `metric` (a number), or where the details of a run show it: `config`, `environment`, `about`, `spread`.
    format: of a number, how the page shows it. better: `lower`, `higher`, or empty where neither is. shown: whether the table
    has it where its runs differ in it. also: other columns that belong to it (`spread`, `low`, `high`), by what they are."""

    key: str
    title: str
    group: str
    values: list[Any]
    format: str = ""
    better: str = ""
    shown: bool = False
    also: Mapping[str, str] | None = None

    def plain(self) -> dict[str, Any]:
        """As in the page's JSON, without what is empty."""
        about = {key: value for key, value in vars(self).items() if value and key != "values"}
        return about | {"data": packed(self.values)}


def columns(runs: Sequence[Run], sweeps: Sequence[str], out: Path) -> list[Column]:
    """The columns of these runs that are not empty. sweeps: the name of each run's sweep; out: the page's folder, from
    which files are linked."""
    every = [*_facts(runs, sweeps), *_metrics(runs), *_details(runs, out)]
    return [column for column in every if any(value is not None for value in column.values)]


def _facts(runs: Sequence[Run], sweeps: Sequence[str]) -> Iterator[Column]:
    varying, named = varying_options(runs), labels(runs)
    yield Column("label", "run", "fact", [named[run] for run in runs])
    if len(set(sweeps)) > 1:
        yield Column("sweep", "sweep", "fact", list(sweeps), shown=True)
    for key, title in FACTS.items():
        values = [getattr(run, key) for run in runs]
        if not all(type(value) in (int, type(None)) for value in values):
            values = [fact(run, key, varying) or None for run in runs]
        # the label has the variant, and the options in which its runs differ
        yield Column(key, title, "fact", values, shown=key not in ("attention", "options"))
    limited = [run.result.last_metrics.limited_by if run.result.last_metrics else None for run in runs]
    yield Column("limited_by", "limited by", "fact", limited)
    yield Column("status", "status", "fact", [run.status for run in runs], shown=True)


def _metrics(runs: Sequence[Run]) -> Iterator[Column]:
    against = scaling(runs)
    for key, page in ((column.key, column.page) for column in COLUMNS if column.page):
        values = [run.row[key] for run in runs]
        if key in ("speedup", "efficiency"):
            values = [getattr(against[run], key) if run in against else None for run in runs]
        if key.startswith("exposed_"):
            values = [run.exposed(key.split("_")[1]) for run in runs]
        which, also = key.removesuffix("_ms"), None
        if which in (*PASSES, "optimizer"):
            also = {about: f"{which}_{about}" for about in ("spread", "low", "high")}
            times = [run.passes.get(which) if run.ok else None for run in runs]
            ends = [spread(run, which) if run.ok and which in run.passes else None for run in runs]
            iqr = [_short(of.iqr_over_median, 3) if of and of.n > 1 else None for of in times]
            yield Column(also["spread"], f"{which} IQR", "spread", iqr, "percent")
            for i, about in enumerate(("low", "high")):
                yield Column(
                    also[about], f"{which} {about}", "spread", [_short(pair[i]) if pair else None for pair in ends]
                )
        title = rate_title(runs) if key == "tflops_per_device" else page.title
        yield Column(
            key, title, "metric", [_short(value) for value in values], page.format, page.better, page.shown, also
        )


def _details(runs: Sequence[Run], out: Path) -> Iterator[Column]:
    about: dict[str, Callable[[Run], Any]] = {
        "name": lambda run: run.result.name,
        "reason": lambda run: run.result.reason,
        "log": log_tail,
        "command": command,
        "files": lambda run: files(run, out) or None,
        "changed": lambda run: changed(run.result),
    }
    for key, value in about.items():
        yield Column(key, key, "about", [value(run) for run in runs])
    places = [environment_facts(run) | {"started": _date(run.environment.started_at)} for run in runs]
    for group, dicts in (("config", [flat(run.result.config) for run in runs]), ("environment", places)):
        for key in dict.fromkeys(key for values in dicts for key in values):
            yield Column(f"{group}.{key}", key, group, [values.get(key) or None for values in dicts])


def changed(result: Result) -> list[str]:
    """The keys of a configuration whose values differ from the defaults: those of the schema and of the chosen groups."""
    config = flat(result.config)
    defaults = dict(_defaults(None, ""))
    for group in ("attention", "timing", "dtype", "hardware", "config"):
        name = result.config.get("config") if group == "config" else result.group(group).get("name")
        defaults |= _defaults(group, str(name or result.group(group).get("method")))
    for key in config.keys() - defaults.keys():  # `auto` and `none` are the members that a group has by default
        defaults[key] = "auto" if config[key] == "auto" else "none"
    return [key for key, text in config.items() if defaults[key] != text and not key.startswith(("output", "resume"))]


@cache
def _defaults(group: str | None, name: str) -> dict[str, str]:
    """The values that the file of a group's member sets, flat; without a group, those of the schema."""
    if group is None:
        values = flat(OmegaConf.to_container(OmegaConf.structured(RunConf)))  # type: ignore[arg-type]
        return {key: text for key, text in values.items() if text != MISSING}
    path = Path(str(resources.files("runner.conf"))) / group / f"{name}.yaml"
    chosen: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    return flat(chosen, "" if group == "config" else f"{group}.")


def flat(value: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A nested configuration as `group.key` to text, without those that are null."""
    texts: dict[str, str] = {}
    for key, below in value.items():
        if isinstance(below, Mapping):
            texts |= flat(below, f"{above}{key}.")
        elif below is not None:
            texts[f"{above}{key}"] = below if isinstance(below, str) else json.dumps(below)
    return texts


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
