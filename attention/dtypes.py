"""The dtype of accumulators."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are summed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
