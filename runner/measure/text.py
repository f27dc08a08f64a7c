"""The text that models are trained on: bytes of the first scenes of Coriolanus (William Shakespeare, about 1608; public domain, in
the wording of the Globe edition of 1864)."""

from __future__ import annotations

from functools import cache
from importlib import resources

import torch
from torch import Tensor

NAME = "coriolanus.txt"


@cache
def text() -> Tensor:
    """The bytes, int64 `[n]`. Not to be changed."""
    found = resources.files("runner.measure").joinpath(NAME).read_bytes()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long()


def excerpts(number: int, batch: int, tokens: int) -> Tensor:
    """The `number`-th global batch of `batch` excerpts of `tokens` bytes, `[batch, tokens]`. Each begins where the one
    before ends, and after the end of the text comes its beginning."""
    whole = text()
    starts = (number * batch + torch.arange(batch)) * tokens
    return whole[(starts[:, None] + torch.arange(tokens)) % len(whole)]
