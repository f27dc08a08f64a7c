"""Damage to the files of a sweep."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, 3, -1, 1e308, "", "x", "<!--<script>alert(1)</script>", "a|b", "../../x", [], [None], [[]], {}, {"x": None},
    "é\n", 2**80, "9" * 5000,
)  # fmt: skip
WAYS = ("value", "value", "value", "value", "no key", "whole", "cut", "empty", "bytes", "gone", "folder", "link")


def damage(sweep: Path, rng: random.Random) -> tuple[Path, str]:
    """Damage one file of a sweep, mostly a result. Returns the file and what was done."""
    result = rng.choice(sorted(sweep.glob("*/result.json")))
    every = sorted(path for path in sweep.rglob("*") if path.is_file() and path.name != "result.json")
    path, way = rng.choice([result, result, result, rng.choice(every)]), rng.choice(WAYS)
    if path != result and way in WAYS[:6]:
        way = "cut"
    content = path.read_bytes()
    if way in ("value", "no key"):
        return path, _changed(path, json.loads(content), way, rng)
    path.unlink()
    if way == "whole":
        path.write_text(json.dumps(rng.choice(VALUES)))
    elif way == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif way == "empty":
        path.touch()
    elif way == "bytes":
        path.write_bytes(rng.randbytes(rng.randrange(1, 5000)))
    elif way == "folder":
        path.mkdir()
    elif way == "link":
        path.symlink_to("nowhere")
    return path, way


def _changed(path: Path, whole: Any, way: str, rng: random.Random) -> str:
    """One value of a result replaced or taken away."""
    places = list(_places(whole))
    holder, key, name = rng.choice(
        [place for place in places if place[2].count(".") < 2] if rng.random() < 0.5 else places
    )
    if way == "no key":
        del holder[key]
        said = f"without {name}"
    else:
        holder[key] = rng.choice(VALUES)
        said = f"{name}={str(holder[key])[:30]!r}"
    path.write_text(json.dumps(whole))
    return said


def _places(value: Any, name: str = "") -> Any:
    """Every place in a JSON value: what holds it, its key, its name."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        below = f"{name}.{key}" if name else str(key)
        yield value, key, below
        yield from _places(value[key], below)
