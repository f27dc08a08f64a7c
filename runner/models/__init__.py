"""Whole models around the attention functions: see `runner.models.transformer`. The sizes and presets import without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runner.models.config import PRESETS, SPARSE, Config, Kind, Latent, preset

if TYPE_CHECKING:
    from runner.models.batch import IGNORED, Batch, reduce_gradients, shard
    from runner.models.transformer import Transformer

__all__ = [
    "IGNORED",
    "PRESETS",
    "SPARSE",
    "Batch",
    "Config",
    "Kind",
    "Latent",
    "Transformer",
    "preset",
    "reduce_gradients",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module(f"runner.models.{'transformer' if name == 'Transformer' else 'batch'}"), name
    )
