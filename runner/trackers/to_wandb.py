"""Weights & Biases (https://docs.wandb.ai/ref/python)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.trackers import Tracked


def log(run: Tracked, options: dict[str, Any], output: Path) -> None:
    import wandb

    about: Any = {"project": options["project"], "entity": options["entity"], "mode": options["mode"]}
    tags = {"config": {**run.parameters, **run.tags, "folder": str(run.folder)}, "name": run.name, "dir": str(output)}
    with wandb.init(**about, **tags, reinit=True) as made:
        made.log(run.metrics)
        made.summary["status"] = run.parameters["status"]
