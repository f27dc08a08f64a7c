"""The table of a page: what it knows of each run, as columns that are small in JSON."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omegaconf import MISSING, OmegaConf

from runner.config.schema import RunConf, groups
from runner.output.columns import COLUMNS
from runner.output.reader import RESULT
from runner.reading import read_regular
from runner.report.charts import short
from runner.report.fair import spread
from runner.report.labels import labels, varying_options
from runner.report.runs import FACTS, Run
from runner.report.scaling import scaling
from runner.report.table import fact
from runner.report.tables import environment_facts, rate_title

GROUPS = ("attention", "config", "dtype", "hardware", "timing")  # whose members set values beside their name
LOG_LINES = 15
DATE = "%Y-%m-%d %H:%M UTC"
MOST_LOG_BYTES = 64 << 10  # of the end of a log
# where a run's output goes, which its repetition does not need
LEFT_OUT = ("output=", "hydra.", "resume=")
METRICS = [column.key for column in COLUMNS if column.page]


def columns(runs: Sequence[Run], sweeps: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """The columns of these runs that are not empty, as assets/runs.js reads them: each with its key, `group`, header and values.
    sweeps: the name of each run's sweep; out: the page's folder, from which files are linked."""
    named, varying, against = labels(runs), varying_options(runs), scaling(runs)
    headers: dict[str, dict[str, Any]] = {key: {"title": title} for key, title in FACTS.items()} | {
        "label": {"title": "run"}
    }
    headers |= {column.key: column.page._asdict() for column in COLUMNS if column.page}
    headers["tflops_per_device"]["title"] = rate_title(runs)

    def entry(run: Run, sweep: str) -> dict[str, dict[str, Any]]:
        """What is known of a run, by group: `fact` (text, to filter by), `metric` (a number), `spread` (of times), or where its
        details show it."""
        limits, gain = run.result.last_metrics, against.get(run)
        facts = {key: x if type(x := getattr(run, key)) is int else fact(run, key, varying) for key in FACTS}
        ends = {which: spread(run, which) or (None, None) for which in run.passes if run.ok}
        iqrs = {f"{which}_iqr": run.row[f"{which}_iqr"] for which in ends}
        return {
            "fact": {
                "label": named[run], "sweep": sweep if len({*sweeps}) > 1 else None, **facts,
                "limited by": limits and limits.limited_by, "status": run.status,
            },
            "metric": {key: run.row[key] for key in METRICS} | ({"speedup": gain.speedup, "efficiency": gain.efficiency} if gain else {}),
            "spread": iqrs | {f"{which}_{name}": ends[which][i] for which in ends for i, name in enumerate(("low", "high"))},
            "about": {
                "name": run.result.name, "reason": run.result.reason, "log": log_tail(run), "command": command(run),
                "files": files(run, out), "changed": changed(run.result.config),
            },
            "config": flat(run.result.config),
            "environment": environment_facts(run) | {"started": time.strftime(DATE, time.gmtime(run.environment.started_at))},
        }  # fmt: skip

    entries = [entry(run, sweep) for run, sweep in zip(runs, sweeps, strict=True)]
    kept = []
    for group in entries[0]:
        for key in dict.fromkeys(key for one in entries for key in one[group]):
            values = [None if (x := one[group].get(key)) in ("", {}) else x for one in entries]
            values = [short(x) if isinstance(x, float) else x for x in values]
            name = f"{group}.{key}" if group in ("config", "environment") else key
            if any(value is not None for value in values):
                kept.append(
                    {"key": name, "group": group, "title": key, **headers.get(name, {}), "data": packed(values)}
                )
    return kept


def changed(config: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration whose values differ from the defaults: those of the schema and of the chosen groups' files. `auto`
    and `none` are the members that a group has by default; an option of earlier versions was off by `false`."""
    defaults = dict(_schema())
    for group in GROUPS:
        value = config.get(group)
        name = (value.get("name") or value.get("method")) if isinstance(value, Mapping) else value
        defaults |= _file(group, name) if name in groups()[group] else {}
    return [
        key
        for key, text in flat(config).items()
        if defaults.get(key, text if text in ("auto", "none", "false") else None) != text
    ]


@cache
def _schema() -> dict[str, str]:
    values = flat(OmegaConf.to_container(OmegaConf.structured(RunConf)))  # type: ignore[arg-type]
    return {key: text for key, text in values.items() if text != MISSING}


@cache
def _file(group: str, name: str) -> dict[str, str]:
    """The values that the file of a group's member sets, flat."""
    path = Path(str(resources.files("runner.conf"))) / group / f"{name}.yaml"
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    return flat(values, "" if group == "config" else f"{group}.")


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
    about, seed = run.environment, run.result.asked.seed
    if not about.overrides:
        return f"python {shlex.join(about.argv)}" if about.argv else None
    overrides = [text for text in about.overrides if not text.startswith(LEFT_OUT)]
    if seed is not None and not any(text.startswith("seed=") for text in overrides):
        overrides.append(f"seed={seed}")
    return f"python -m runner {shlex.join(overrides)}"


def log_tail(run: Run) -> str | None:
    """The last lines of a failed run's log."""
    if run.status == "ok":
        return None
    if run.result.failure and run.result.failure.log_tail:
        return "\n".join(run.result.failure.log_tail)
    with suppress(OSError):
        end = read_regular(run.result.folder / "run.log", MOST_LOG_BYTES, follow=False, end=True)
        return "\n".join(end.decode(errors="replace").splitlines()[-LOG_LINES:]) or None
    return None


def files(run: Run, out: Path) -> dict[str, str]:
    """The links to a run's files that are there, relative to the page, by name."""
    folder = run.result.folder
    below = os.path.relpath(folder.resolve(), out.resolve())
    return {
        name: quote(os.path.join(below, file))
        for name, file in {"result": RESULT, **run.result.artifacts}.items()
        if (folder / file).is_file() and not (folder / file).is_symlink()
    }


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """The values of a column, small: {all} where they are the same, {of, at} with an index into the distinct ones where
    many repeat, else {each}."""
    texts = [json.dumps(value) for value in values]
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if len(place) == 1:
        return {"all": values[0]}
    if 2 * len(place) > len(texts):
        return {"each": list(values)}
    return {"of": [json.loads(text) for text in place], "at": [place[text] for text in texts]}
