"""Masks for tests, as values that JSON can hold."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from attention import masks
from attention.masks.mask import Mask
from attention.masks.rectangles import UNBOUNDED, Rectangles, rectangles
from tests.support.mask_definitions import DEFINITIONS, random_parameters

U = UNBOUNDED


@dataclass(frozen=True)
class Rows(Mask):
    """The rectangles as they are given."""

    rows: tuple[tuple[int, ...], ...]

    def build(self, tokens: int) -> Rectangles:
        return rectangles(self.rows)


def built(given: Any) -> Mask:
    """The mask of a list of rows, or of {"name": ..., parameters}. `inner` may be the (left, right) of a window."""
    if not isinstance(given, dict):
        return Rows(tuple(map(tuple, given)))
    if isinstance(given.get("inner"), (list, tuple)):
        given = {**given, "inner": masks.sliding_window(*given["inner"])}
    return masks.make(given["name"], **{name: value for name, value in given.items() if name != "name"})


def drawn(tokens: int, rng: random.Random) -> tuple[dict[str, Any], ...]:
    """One or two random masks; some are for another number of tokens."""
    tokens += rng.choice((0,) * 15 + (3,))
    names = [rng.choice(list(masks.names())) for _ in range(rng.choice((1, 1, 1, 2)))]
    return tuple({"name": name, **random_parameters(name, tokens, rng)} for name in names)


def intersection(given: Iterable[dict[str, Any]]) -> Mask | None:
    """The mask with the pairs that all of them keep; None for none."""
    found = [built(each) for each in given]
    return reduce(and_, found) if found else None


def dense(given: Iterable[dict[str, Any]], tokens: int) -> Tensor:
    """The pairs that all of them keep, bool `[tokens, tokens]`: by definitions that share no code with `attention`, where
    the mask is not a random one."""
    keep = torch.ones(tokens, tokens, dtype=torch.bool)
    for each in given:
        parameters = {name: value for name, value in each.items() if name != "name"}
        defined = DEFINITIONS.get(each["name"])
        keep &= built(each).dense(tokens) if defined is None else torch.from_numpy(defined(tokens, **parameters))
    return keep
