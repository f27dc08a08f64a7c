"""The files that Hydra reads and writes: a YAML file is refused before it takes minutes or all memory, and nothing that looks like a
secret is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins import basic_sweeper, file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core import utils
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from runner.config.values import InvalidConfig, shown
from runner.reading import read_text
from runner.redaction import redacted

MOST_BYTES = 256 << 10  # of a YAML file
MOST_NODES = 100_000  # once its aliases are expanded


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra keeps the first class of this name as the source of files."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            check_yaml(path)
        return super().load_config(config_path)


def check_yaml(path: Path) -> None:
    """Raises InvalidConfig for a file that is too large, or becomes so by its aliases; one that cannot be parsed is left to
    Hydra."""
    try:
        root = yaml.compose(read_text(path, MOST_BYTES), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        nodes = _nodes(root, {}) if root else 0
    except OSError as error:
        raise InvalidConfig(f"{shown(str(path))}: {error.strerror}") from None
    except (RecursionError, yaml.YAMLError, ValueError):
        return
    if nodes > MOST_NODES:
        raise InvalidConfig(f"{shown(str(path))}: {nodes:g} values with its aliases expanded; at most {MOST_NODES:,}")


def _nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of nodes, each alias counted as what it stands for; infinite where one stands for what holds it."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        entries = [x for entry in below for x in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1.0 + sum(_nodes(x, known) for x in entries)
    return known[id(node)]


class RedactedOmegaConf(OmegaConf):
    """OmegaConf for Hydra's functions that write `.hydra/*.yaml` and `multirun.yaml`."""

    @staticmethod
    def to_yaml(cfg: Any, **_: Any) -> str:
        return yaml.safe_dump(
            redacted(OmegaConf.to_container(cfg, enum_to_str=True)), sort_keys=False, allow_unicode=True
        )

    @staticmethod
    def save(config: Any, f: Any, resolve: bool = False) -> None:
        Path(f).write_text(RedactedOmegaConf.to_yaml(config), encoding="utf-8")


def register() -> None:
    """Make Hydra of this process read and write so."""
    SourcesRegistry.instance().types["file"] = FileConfigSource
    for module in (utils, basic_sweeper):
        module.OmegaConf = RedactedOmegaConf  # type: ignore[attr-defined]
