"""Masks of packed documents: each token belongs to one document, and documents follow each other in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from attention.masks.band import CAUSAL
from attention.masks.checks import Count, Counts, within
from attention.masks.mask import Banded, FamilyMask, Mask, family, short
from attention.masks.rectangles import Column, Rectangles, from_columns

INNER = Banded(CAUSAL)


def _banded(name: str, value: Any) -> Mask:
    if not isinstance(value, Mask) or value.band is None:
        raise ValueError(f"{name}={value}: must be full(), causal() or sliding_window(left, right)")
    return value


@family
def documents(tokens: int, lengths: Counts, inner: Annotated[Mask, _banded] = INNER) -> Rectangles:
    """document(k) == document(q), and the inner mask within the document

    inner: full, causal or a sliding window, in positions of the document. A document may have length 0. Raises
    ValueError for another inner mask and for a negative length; when built, for lengths that do not sum to the
    sequence."""
    start, stop = _borders(lengths, tokens)
    assert inner.band is not None
    return from_columns(start, stop, start, stop, *inner.band.bounds())


@family
def prefix_lm_documents(tokens: int, lengths: Counts, prefixes: Counts) -> Rectangles:
    """document(k) == document(q), and k <= q or k is within the document's prefix

    prefixes: a number of tokens for each document. Raises ValueError for a negative number; when built, for a prefix
    that is longer than its document, and for lengths that do not sum to the sequence."""
    if len(lengths) != len(prefixes):
        raise ValueError(
            f"prefixes={short(prefixes)}: there are {len(prefixes)} for {len(lengths)} documents; "
            "give one for each, 0 for none"
        )
    start, stop = _borders(lengths, tokens)
    middle = start + np.array(prefixes, np.int64)
    if lengths:
        number = int(np.argmax(middle - stop))  # the longest beside its document
        within(f"prefixes[{number}]", prefixes[number], lengths[number], f"document {number}")
    return np.concatenate([from_columns(start, middle, start, middle), from_columns(middle, stop, start, stop, hi=0)])


@family
def block_causal_documents(tokens: int, lengths: Counts) -> Rectangles:
    """document(k) <= document(q)

    Raises ValueError for a negative length; when built, for lengths that do not sum to the sequence."""
    start, stop = _borders(lengths, tokens)
    return from_columns(start, stop, 0, stop)


@family
def shared_prompt(tokens: int, prompt: Count, answers: Counts) -> Rectangles:
    """k <= q, and k is in the prompt or in the answer of q

    prompt, answers: numbers of tokens; the prompt comes first, then one answer after the other. Raises ValueError for a
    negative length; when built, where prompt and answers do not sum to the sequence."""
    start, stop = _borders((prompt, *answers), tokens, f"prompt+answers={prompt}+{short(answers)}")
    itself = from_columns(start, stop, start, stop, hi=0)
    return np.concatenate([itself, from_columns(start[1:], stop[1:], 0, prompt)])


def as_documents(mask: Mask, tokens: int) -> tuple[tuple[int, ...], Mask]:
    """(the lengths, the mask within each) of `documents`; any other mask is that of one document."""
    if isinstance(mask, FamilyMask) and mask.family is documents:
        (_, lengths), (_, inner) = mask.parameters
        return lengths, inner
    return (tokens,), mask


def _borders(lengths: Sequence[int], tokens: int, argument: str = "") -> tuple[Column, Column]:
    """Where each document starts and stops. argument: the one in the message for another sum."""
    sizes = np.array(lengths, np.int64)
    stops = np.cumsum(sizes)
    if (total := int(sizes.sum())) != tokens:
        raise ValueError(
            f"{argument or f'lengths={short(lengths)}'}: sums to {total}, but the sequence has {tokens} tokens; "
            f"give lengths that sum to {tokens}"
        )
    return stops - sizes, stops
