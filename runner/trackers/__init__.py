"""Results sent to an experiment tracker, beside their folders: `tracker=NAME`. A tracker that fails, or is not installed, says
so in one line and fails no run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.output.record import Result
from runner.output.summary import COLUMNS, row
from runner.redaction import redacted

NONE = "none"
TRACKERS = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}  # by name, the extra that installs it
# columns of a summary that are asked for, not measured
ASKED = (*COLUMNS[COLUMNS.index("status") : COLUMNS.index("forward_ms")], "reason")


@dataclass(frozen=True)
class Tracked:
    """What a tracker gets of a run, without secrets: its name, what was asked, what was measured, tags, and its folder."""

    name: str
    parameters: dict[str, str | int | float | bool]
    metrics: dict[str, float]
    tags: dict[str, str]
    folder: Path
    seconds: tuple[float, float]  # begin and end, Unix time

    @staticmethod
    def of(value: dict[str, Any], folder: Path) -> Tracked:
        flat = {key: found for key, found in row(Result.of(redacted(value), folder)).items() if found is not None}
        numbers = {key: float(x) for key, x in flat.items() if isinstance(x, (int, float)) and key not in ASKED}
        environment = value["environment"]
        tags = {
            "key": value["key"],
            "host": environment.get("host"),
            "commit": environment.get("git", {}).get("commit"),
        }
        return Tracked(
            name=value["name"],
            parameters={key: flat[key] for key in ASKED if key in flat},
            metrics=numbers,
            tags={key: str(x) for key, x in tags.items() if x},
            folder=folder,
            seconds=(environment["started_at"], environment["started_at"] + environment["seconds"]),
        )


def track(value: dict[str, Any], folder: Path) -> str | None:
    """Send a result, as `result.json` has it, to the tracker of its configuration. Returns why that failed, in one line, or
    None."""
    options = value["config"].get("tracker") or {"name": NONE}  # results of earlier versions have none
    name = options.get("name") if isinstance(options, dict) else None
    if name not in [*TRACKERS]:  # none, or one for which the run was refused
        return None
    try:
        log = importlib.import_module(f"runner.trackers.to_{name}").log
        log(Tracked.of(value, folder), options, Path(value["config"]["output"]))
    except ImportError as error:
        return f"tracker={name}: not installed ({error}); pip install -e '.[{TRACKERS[name]}]'; the result is in its folder"
    except Exception as error:  # whatever another package raises
        why = redacted(" ".join(str(error).split()))[:300] or "no message"
        return f"tracker={name}: {type(error).__name__}: {why}; the result is in its folder"
    return None
