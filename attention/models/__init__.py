"""Whole models around the attention functions: see `attention.models.transformer`."""

from __future__ import annotations

from attention.models.batch import IGNORED, Batch, shard
from attention.models.config import PRESETS, SPARSE, Config, Kind, Latent, preset
from attention.models.dilated import DilatedMultihead
from attention.models.transformer import Transformer, reduce_gradients

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
