"""What the tests of the configuration share: composing as the program does, and its command line."""

import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from runner import schema

schema.register()


def composed(*overrides: str, **options: bool) -> DictConfig:
    with initialize_config_module("runner.conf", version_base="1.3"):
        return compose("config", overrides=list(overrides), **options)


def resolved(*overrides: str, gpus: int = 0, seed: int = 7) -> schema.Experiment:
    return schema.experiment(composed(*overrides), gpus, seed)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own in the folder `cwd`; conftest puts this checkout on its path."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
