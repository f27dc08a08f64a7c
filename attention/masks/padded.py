"""The mask of a sequence that was padded at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attention.masks.mask import Mask
from attention.masks.rectangles import Rectangles


@dataclass(frozen=True)
class Padded(Mask):
    """`mask` over all but the last `padding` tokens, which see nothing and which nothing sees."""

    mask: Mask
    padding: int

    name: ClassVar[str] = "padded"

    def describe(self) -> str:
        return f"{self.mask.describe()} with padding={self.padding}"

    def asked(self) -> str:
        return f"{self.mask.asked()} with padding={self.padding}"

    def build(self, tokens: int) -> Rectangles:
        return self.mask.rectangles(tokens - self.padding)
