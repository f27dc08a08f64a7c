"""From `causal`, `window` and `cu_seqlens` to a mask, and back from a mask to the one band within every sequence, if it
is that. cu_seqlens are the cumulative lengths of the sequences of a packed batch, (0, tokens) for one sequence."""

from __future__ import annotations

from itertools import pairwise

from attention.masks.band import Band
from attention.masks.documents import Documents
from attention.masks.mask import Banded, Mask, narrower


def of_sequences(band: Band, cu_seqlens: tuple[int, ...]) -> Mask:
    """The mask of one band within every sequence of a packed batch, or of one sequence."""
    if len(cu_seqlens) == 2:
        return Banded.of(band)
    return Documents(tuple(b - a for a, b in pairwise(cu_seqlens)), Banded.of(band), packed=True)


def one_band(mask: Mask, cu_seqlens: tuple[int, ...]) -> Band | Mask:
    """The band within every sequence, where the mask is that; else the mask."""
    if len(cu_seqlens) == 2:
        return mask if mask.band is None else mask.band
    if isinstance(mask, Documents) and mask.lengths == tuple(b - a for a, b in pairwise(cu_seqlens)):
        return mask if mask.inner.band is None else mask.inner.band
    return mask


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
