"""Composed configurations for tests, and a Python process."""

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from runner.config import resolve
from runner.config.experiment import Experiment
from runner.config.overrides import groups

resolve.register()
GROUPS = groups()
PARSER = OverridesParser.create()


@cache
def composed(*overrides: str, **options: bool) -> DictConfig:
    """A composed configuration. It is kept and shared: do not change it."""
    with initialize_config_module("runner.conf", version_base="1.3"):
        return compose("config", overrides=list(overrides), **options)


def configured(*overrides: str) -> DictConfig:
    """As `composed`, but only groups are composed; keys are set in a copy, which is much faster."""
    choices = [text for text in overrides if text.lstrip("+").partition("=")[0] in GROUPS]
    cfg = _chosen(*choices)
    for override in PARSER.parse_overrides([text for text in overrides if text not in choices]):
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=override.is_add())
    return cfg


def _chosen(*choices: str) -> DictConfig:
    """What groups' choices make. One `attention=NAME` replaces another's keys, unless the other choices changed some of
    them."""
    others = [text for text in choices if not text.startswith("attention=")]
    cfg = composed(*others)
    if len(choices) - len(others) != 1 or cfg.attention != composed(f"attention={cfg.attention.name}").attention:
        return copy.deepcopy(composed(*choices))
    (choice,) = set(choices) - set(others)
    cfg = copy.deepcopy(cfg)
    cfg.attention = composed(choice).attention
    return cfg


def resolved(*overrides: str, gpus: int = 0, seed: int = 7) -> Experiment:
    return resolve.experiment(configured(*overrides), gpus, seed)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own in the folder `cwd`; conftest puts this checkout on its path."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
