"""Whole models around the attention functions: see `runner.models.transformer`. The sizes and presets import without
torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runner.models.config import PRESETS, SPARSE, Config, Kind, Latent, preset

if TYPE_CHECKING:
    from runner.models.batch import IGNORED, Batch, shard
    from runner.models import DilatedMultihead
    from attention.huggingface.gradients import reduce_gradients
    from runner.models.transformer import Transformer

__all__ = [
    "IGNORED",
    "PRESETS",
    "SPARSE",
    "Batch",
    "Config",
    "DilatedMultihead",
    "Kind",
    "Latent",
    "Transformer",
    "preset",
    "reduce_gradients",
    "shard",
]
_WITH_TORCH = {"IGNORED": "batch", "Batch": "batch", "shard": "batch", "Transformer": "transformer"}
_WITH_TORCH |= {"reduce_gradients": "gradients", "DilatedMultihead": "dilated"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"runner.models.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'runner.models' has no attribute {name!r}")
