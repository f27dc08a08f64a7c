"""Masks for tests, as values that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attention.masks.mask import Mask
from attention.masks.rectangles import UNBOUNDED, Rectangles, rectangles

U = UNBOUNDED


@dataclass(frozen=True)
class Rows(Mask):
    """The rectangles as they are given."""

    rows: tuple[tuple[int, ...], ...]
    name: ClassVar[str] = "rows"

    def build(self, tokens: int) -> Rectangles:
        return rectangles(self.rows)


def built(given: Any) -> Mask:
    """The mask of a list of rows, or of {"name": ..., parameters}."""
    if isinstance(given, dict):
        from attention import masks

        return masks.make(**given)
    return Rows(tuple(map(tuple, given)))
