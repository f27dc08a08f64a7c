"""Lengths of the documents of a packed batch, as training data has them: most are short, few are very long.

They are log-normal through two shares that were published for long-context training (the data of MagiAttention's
benchmark, SandAI, 2025): 71% of the documents have at most 1,024 tokens, and 0.4% more than 32,768. The median is then
411 tokens and the mean 1,605. No document is longer than a quarter of its batch: longer ones are left out before any is
drawn."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

SHORT, AT_MOST_SHORT = 1024, 0.71  # tokens, share of the documents
LONG, AT_MOST_LONG = 32768, 0.996
MOST_OF_A_BATCH = 4  # a document has at most a quarter of the tokens


def _logarithms() -> NormalDist:
    """The distribution of the logarithm of a length."""
    plain = NormalDist()
    low, high = plain.inv_cdf(AT_MOST_SHORT), plain.inv_cdf(AT_MOST_LONG)
    sigma = math.log(LONG / SHORT) / (high - low)
    return NormalDist(math.log(SHORT) - sigma * low, sigma)


LOGARITHMS = _logarithms()
MEAN = 1605  # tokens


def real_lengths(total: int, seed: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths that add up to `total`, drawn with `seed` and the same on every machine.

    multiple: each length is rounded up to a multiple of it. The last document is cut to the tokens that are left. Raises
    ValueError for a total that is no multiple, or less than four of them."""
    if total % multiple or total < MOST_OF_A_BATCH * multiple:
        raise ValueError(
            f"total={total}: must be a multiple of {multiple} and at least {MOST_OF_A_BATCH * multiple}, since no "
            "document is longer than a quarter of the batch"
        )
    longest = total // MOST_OF_A_BATCH // multiple * multiple
    share = LOGARITHMS.cdf(math.log(longest))  # of documents that are not too long
    draw = random.Random(seed)
    lengths: list[int] = []
    left = total
    while left:
        below = max(draw.random() * share, 1e-12)
        tokens = math.ceil(math.exp(LOGARITHMS.inv_cdf(below)))
        lengths.append(min(-(-tokens // multiple) * multiple, longest, left))
        left -= lengths[-1]
    return tuple(lengths)
