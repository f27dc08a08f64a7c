"""Command-line overrides, looked at before Hydra composes anything: an unknown name or a wrong type gets one clear line
with the nearest names, for every value of a sweep at once."""

from __future__ import annotations

from importlib import resources
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attention.variants import nearest


def groups() -> dict[str, list[str]]:
    """Every config group's choices."""
    root = resources.files("runner.conf")
    found = {}
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in ("hydra", "__pycache__"):
            found[folder.name] = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
    return found


def problem(arguments: list[str]) -> str | None:
    """What is wrong with the overrides, in one line, or None."""
    parser = OverridesParser.create()
    known = groups()
    keys = []
    chosen = []
    for text in arguments:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            return f"{text}: not an override ({str(error).splitlines()[0]}); write key=value"
        name = override.key_or_group
        if name.startswith("hydra") or override.is_delete():
            continue
        if name in known:
            for value in _values(override):
                if value not in known[name]:
                    return f"{name}={value}: not a choice of {name}; {nearest(str(value), known[name])}"
            chosen.append(f"{'+' if override.is_add() else ''}{name}={next(iter(_values(override)))}")
        else:
            keys.append(override)
    return _check_keys(keys, chosen) if keys else None


def _check_keys(keys: list[Override], chosen: list[str]) -> str | None:
    with initialize_config_module("runner.conf", version_base="1.3"):
        try:
            cfg = compose("config", overrides=chosen)
        except HydraException as error:
            return " ".join(str(error).split())
    known = list(_paths(OmegaConf.to_container(cfg)))
    for override in keys:
        name = override.key_or_group
        if name not in known and not override.is_add() and not override.is_force_add():
            if name.startswith("attention."):
                options = [k for k in known if k.startswith("attention.") and k != "attention.name"]
                return f"{name}: attention={cfg.attention.name} has no such option; its options: {', '.join(options) or 'none'}"
            return f"{name}: not a key; {nearest(name, [*known, *groups()])}"
        for value in _values(override):
            try:
                OmegaConf.update(cfg, name, value, force_add=True)
            except (OmegaConfBaseException, ValueError) as error:
                return f"{name}={value}: {str(error).splitlines()[0]}"
    return None


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator())
    return [override.value()]


def _paths(tree: Any, prefix: str = "") -> Any:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
