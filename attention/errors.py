"""What a call that cannot be done raises, and words for error messages."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable


class UnsupportedCall(ValueError):
    """The kernel exists but cannot do this call, or cannot run on this machine."""


def warn(message: str) -> None:
    """Warns at the line of the caller's program that led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("attention", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


# names that were once known
GONE = {
    "cudnn_block_sparse": "it is gone; use cudnn_flex or flash4",
    "hierarchical": "it is gone; use packed, or null for the best",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known ones, else all of them. Of `a` and `a.b` the hint gives `a` alone."""
    if name in GONE:
        return GONE[name]
    known = sorted(set(known))
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    close = [one for one in close if one.rpartition(".")[0] not in close]
    if not close:
        return f"known are {', '.join(known)}"
    *others, last = close
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
