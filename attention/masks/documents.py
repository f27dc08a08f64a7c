"""Masks of packed documents: each token belongs to one document, and documents follow each other in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from attention.masks.checks import covers, set_whole, whole_numbers
from attention.masks.mask import Banded, Mask, short
from attention.masks.rectangles import UNBOUNDED, Rectangles, from_columns

CAUSAL = Banded(-1, 0)


def documents(lengths: Sequence[int], inner: Mask = CAUSAL) -> Mask:
    """document(k) == document(q), and the inner mask within the document

    inner: full, causal or a sliding window, in positions of the document. A document may have length 0. Raises
    ValueError for another inner mask and for a negative length; when built, for lengths that do not sum to the
    sequence."""
    return Documents(whole_numbers("lengths", lengths), inner)


def prefix_lm_documents(lengths: Sequence[int], prefixes: Sequence[int]) -> Mask:
    """document(k) == document(q), and k <= q or k is within the document's prefix

    prefixes: a number of tokens for each document. Raises ValueError for a prefix that is longer than its document;
    when built, for lengths that do not sum to the sequence."""
    return PrefixLMDocuments(whole_numbers("lengths", lengths), whole_numbers("prefixes", prefixes))


def block_causal_documents(lengths: Sequence[int]) -> Mask:
    """document(k) <= document(q)

    Raises ValueError for a negative length; when built, for lengths that do not sum to the sequence."""
    return BlockCausalDocuments(whole_numbers("lengths", lengths))


def shared_prompt(prompt: int, answers: Sequence[int]) -> Mask:
    """k <= q, and k is in the prompt or in the answer of q

    prompt, answers: numbers of tokens; the prompt comes first, then one answer after the other. Raises ValueError for a
    negative length; when built, where prompt and answers do not sum to the sequence."""
    return SharedPrompt(prompt, whole_numbers("answers", answers))


@dataclass(frozen=True)
class Documents(Mask):
    """packed: whether these are the sequences of a packed batch, which the caller gave by cu_seqlens."""

    lengths: tuple[int, ...]
    inner: Mask = CAUSAL
    packed: bool = field(default=False, compare=False, repr=False)

    name: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Mask) or self.inner.band is None:
            raise ValueError(f"inner={self.inner}: must be full(), causal() or sliding_window(left, right)")

    def build(self, tokens: int) -> Rectangles:
        start, stop = _borders(self.lengths, tokens)
        band = self.inner.band
        assert band is not None
        lo = max(-band.left, -UNBOUNDED) if band.left >= 0 else -UNBOUNDED
        return from_columns(start, stop, start, stop, lo, min(band.right, UNBOUNDED) if band.right >= 0 else UNBOUNDED)

    def asked(self) -> str:
        if not self.packed:
            return super().asked()
        return f"{self.inner.describe()} attention with cu_seqlens={short((0, *accumulate(self.lengths)))}"


@dataclass(frozen=True)
class PrefixLMDocuments(Mask):
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    name: ClassVar[str] = "prefix_lm_documents"

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.prefixes):
            raise ValueError(
                f"prefixes={short(self.prefixes)}: there are {len(self.prefixes)} for {len(self.lengths)} documents; "
                "give one for each, 0 for none"
            )
        for number, (length, prefix) in enumerate(zip(self.lengths, self.prefixes, strict=True)):
            if prefix > length:
                raise ValueError(
                    f"prefixes[{number}]={prefix}: document {number} has {length} tokens; give at most {length}"
                )

    def build(self, tokens: int) -> Rectangles:
        start, stop = _borders(self.lengths, tokens)
        middle = start + np.array(self.prefixes, np.int64)
        prefixes = from_columns(start, middle, start, middle)
        return np.concatenate([prefixes, from_columns(middle, stop, start, stop, hi=0)])


@dataclass(frozen=True)
class BlockCausalDocuments(Mask):
    lengths: tuple[int, ...]

    name: ClassVar[str] = "block_causal_documents"

    def build(self, tokens: int) -> Rectangles:
        start, stop = _borders(self.lengths, tokens)
        return from_columns(start, stop, 0, stop)


@dataclass(frozen=True)
class SharedPrompt(Mask):
    prompt: int
    answers: tuple[int, ...]

    name: ClassVar[str] = "shared_prompt"

    def __post_init__(self) -> None:
        set_whole(self, "prompt")

    def build(self, tokens: int) -> Rectangles:
        total = self.prompt + sum(self.answers)
        covers("prompt+answers", f"{self.prompt}+{short(self.answers)}", total, tokens)
        start, stop = _borders((self.prompt, *self.answers), tokens)
        itself = from_columns(start, stop, start, stop, hi=0)
        return np.concatenate([itself, from_columns(start[1:], stop[1:], 0, self.prompt)])


def _borders(lengths: tuple[int, ...], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each document starts and stops."""
    each = np.array(lengths, np.int64)
    stops = np.cumsum(each)
    covers("lengths", short(lengths), int(each.sum()), tokens)
    return stops - each, stops
