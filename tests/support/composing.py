"""Composed configurations for tests, and a Python process."""

import copy
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config import resolve
from runner.config.experiment import Experiment
from runner.config.schema import groups

GROUPS = groups()
PARSER = OverridesParser.create()


OWN = {
    group for group in GROUPS if group not in ("config", "experiment", "mask", "model")
}  # whose choices set no other group's keys


def apart(lines):
    """The overrides of command lines."""
    return [text for line in lines for text in re.split(r"\s+(?=\S+=)", line) if text]


@cache
def composed(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """The composed configuration of one or several overrides a text. It is kept and shared: do not change it."""
    overrides = apart(overrides)
    if not return_hydra_config:
        cfg = copy.deepcopy(composed(*overrides, return_hydra_config=True))
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg
    with initialize_config_module("runner.conf", version_base="1.3"):
        return compose("config", overrides=overrides, return_hydra_config=True)


def configured(*overrides: str) -> DictConfig:
    """As `composed`, but only groups are composed; keys are set in a copy, which is much faster."""
    overrides = apart(overrides)
    choices = [text for text in overrides if text.lstrip("+").partition("=")[0] in GROUPS]
    cfg = _chosen(*choices)
    for override in PARSER.parse_overrides([text for text in overrides if text not in choices]):
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=override.is_add())
    return cfg


def _chosen(*choices: str) -> DictConfig:
    """What groups' choices make. A choice of a group of its own keys replaces what the other choices took, unless they
    changed some of these keys."""
    others = [text for text in choices if text.partition("=")[0] not in OWN]
    base = composed(*others)
    cfg = copy.deepcopy(base)
    taken = composed(*others, return_hydra_config=True).hydra.runtime.choices
    for text in (text for text in choices if text not in others):  # the last one of a group holds
        group = text.partition("=")[0]
        if base[group] != composed(f"{group}={taken[group]}")[group]:
            return copy.deepcopy(composed(*choices))
        cfg[group] = composed(text)[group]
    return cfg


def resolved(*overrides: str, gpus: int = 0, seed: int = 7) -> Experiment:
    return resolve.experiment(configured(*overrides), gpus, seed)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own in the folder `cwd`; conftest puts this checkout on its path."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
