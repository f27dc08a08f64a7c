"""Command-line overrides, looked at before Hydra composes anything: an unknown name or a wrong type gets one clear line
with the nearest names, for every value of a sweep at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import resources
from itertools import product
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from attention.variants import nearest
from runner import schema

# Hydra's flags that take a value
VALUED = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--info",
    "-i",
)

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers",
}

# where the value that a key has, or what null stands for, would say little
EXAMPLES = {"window": [512, 0], "mode": "forward", "launch.fault": "1:timing:raise", "launch.endpoint": "node0:29500"}

# keys that one may look for, and why there is none
LEFT_OUT = {"dropout": "not supported by any variant; leave it out"}


def of(arguments: list[str]) -> list[str]:
    """The overrides among a command line's arguments, without Hydra's flags and their values."""
    found = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument.startswith("-"):
            skip = argument in VALUED
        else:
            found.append(argument)
    return found


def groups() -> dict[str, list[str]]:
    """Every config group's choices."""
    root = resources.files("runner.conf")
    found = {}
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in ("hydra", "__pycache__"):
            found[folder.name] = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
    return found


def problem(arguments: list[str], multirun: bool = True) -> str | None:
    """What is wrong with the overrides, in one line, or None."""
    parser = OverridesParser.create()
    known = groups()
    keys: list[Override] = []
    choices: list[list[str]] = []
    sweeps = multirun or any(a.startswith(("+experiment=", "hydra.mode=")) for a in arguments)
    for text in arguments:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            return f"{text}: not an override ({str(error).splitlines()[0]}); write key=value"
        name = override.key_or_group
        if name.startswith("hydra"):
            continue
        if override.is_delete():
            return f"{text}: every key has a value and none can be taken out; give it another, {name}=VALUE"
        if override.is_sweep_override() and not sweeps:
            return f"{text}: several values are a sweep; add -m"
        if name in known:
            if name == "experiment" and not override.is_add():
                return f"{text}: an experiment is added to the defaults; write +{text}"
            if name != "experiment" and (override.is_add() or override.is_force_add()):
                return f"{text}: every run has a {name}, of which there is one; write {text.lstrip('+')}"
            values = _values(override, known[name])
            for value in values:
                if value not in known[name]:
                    return f"{name}={value}: not a choice of {name}; {nearest(str(value), known[name])}"
            choices.append([f"{'+' if override.is_add() else ''}{name}={value}" for value in values])
        else:
            keys.append(override)
    return _check_keys(keys, choices, known) if keys else None


def _check_keys(keys: list[Override], choices: list[list[str]], known: dict[str, list[str]]) -> str | None:
    # a variant's options differ: each variant of a sweep is composed, of the other groups the first choice
    varied = [c if c[0].startswith("attention=") else c[:1] for c in choices]
    with initialize_config_module("runner.conf", version_base="1.3"):
        for chosen in product(*varied):
            try:
                cfg = compose("config", overrides=list(chosen))
            except HydraException as error:
                return " ".join(str(error).split())
            found = _against(cfg, keys, known)
            if found is not None:
                return found
    return None


def _against(cfg: Any, keys: list[Override], known: dict[str, list[str]]) -> str | None:
    paths = list(_paths(OmegaConf.to_container(cfg)))  # type: ignore[arg-type]
    for override in keys:
        name = override.key_or_group
        if name not in paths:
            if name.startswith("attention."):
                options = [p for p in paths if p.startswith("attention.") and p != "attention.name"]
                said = ", ".join(options) or "none"
                return f"{name}: attention={cfg.attention.name} has no such option; its options: {said}"
            if name in LEFT_OUT:
                return f"{name}: {LEFT_OUT[name]}"
            return f"{name}: not a key; {nearest(name, [*paths, *known])}"
        for value in _values(override, []):
            try:
                OmegaConf.update(cfg, name, value)
            except GrammarParseError:
                return f"{name}={value}: not an interpolation; write ${{KEY}} for another key's value"
            except (OmegaConfBaseException, ValueError):
                return f"{name}={_written(value)}: {_expected(name, OmegaConf.select(cfg, name))}"
    return None


def _expected(name: str, value: Any) -> str:
    """What the schema wants of a key that now has this value, with an example."""
    kind: Any = schema.RunConf
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    if is_dataclass(kind):
        key, default = next(iter(value.items()))
        return f"has keys of its own; give one of {', '.join(value)}, for instance {name}.{key}={_written(default)}"
    kinds = [k for k in get_args(kind) if k is not NoneType] if NoneType in get_args(kind) else [kind]
    said = " or ".join([*(KINDS[k] for k in kinds), *(["null"] if kinds != [kind] else [])])
    example = EXAMPLES.get(name, value)
    if example is None:  # what null stands for
        key = name.rpartition(".")[2]
        example = {**schema.DEFAULT_SIZES["cpu"], **schema.TIMING_DEFAULTS["cuda"]}.get(key, 1)
    return f"must be {said}; for instance {name}={_written(example)}"


def _written(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_written(x)}' for k, x in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _values(override: Override, choices: list[str]) -> list[Any]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(choices) or [str(value)]
    return list(override.sweep_iterator()) if override.is_sweep_override() else [value]


def _paths(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
