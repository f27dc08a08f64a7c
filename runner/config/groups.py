"""The config groups: the folders of conf/, each with a file a choice."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def groups() -> dict[str, list[str]]:
    """Every config group's choices; topologies, which `runner.predict` reads, are none. Not to be changed."""
    root = resources.files("runner.conf")
    return {
        folder.name: sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
        for folder in root.iterdir()
        if folder.is_dir() and folder.name not in ("hydra", "topology", "__pycache__")
    }
