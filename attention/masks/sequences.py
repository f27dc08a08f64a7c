"""From `causal`, `window` and `cu_seqlens` to a mask, and back from a mask to the one band within every sequence, if it
is that. cu_seqlens are the cumulative lengths of the sequences of a packed batch, (0, tokens) for one sequence."""

from __future__ import annotations

from itertools import pairwise

from attention.masks.band import Band, narrower
from attention.masks.documents import as_documents, documents
from attention.masks.mask import Banded, FamilyMask, Mask, short


def of_sequences(band: Band, cu_seqlens: tuple[int, ...]) -> Mask:
    """The mask of one band within every sequence of a packed batch, or of one sequence."""
    inner = Banded(band)
    if len(cu_seqlens) == 2:
        return inner
    request = f"{inner} attention with cu_seqlens={short(cu_seqlens)}"
    return FamilyMask("documents", (("lengths", _lengths(cu_seqlens)), ("inner", inner)), documents, request)


def one_band(mask: Mask, cu_seqlens: tuple[int, ...]) -> Band | Mask:
    """The band within every sequence, where the mask is that; else the mask."""
    lengths, inner = as_documents(mask, cu_seqlens[-1])
    return mask if inner.band is None or lengths != _lengths(cu_seqlens) else inner.band


def _lengths(cu_seqlens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([b - a for a, b in pairwise(cu_seqlens)])


def mask_of(band: Band, cu_seqlens: tuple[int, ...], mask: Mask | None) -> Band | Mask:
    """What `causal`, `window` and `cu_seqlens` leave of a mask: no query sees another sequence's keys, and the band
    holds, too. The band within every sequence where it is that."""
    if mask is None:
        return band
    if mask.band is not None:
        return narrower(mask.band, band)
    if len(cu_seqlens) == 2 and band.full:
        return one_band(mask, cu_seqlens)
    within = of_sequences(band, cu_seqlens)
    return one_band(mask if within == mask else mask & within, cu_seqlens)
