"""What a call that cannot be done raises, and words for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnsupportedCall(ValueError):
    """The kernel exists but cannot do this call, or cannot run on this machine."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known ones, else all of them. Of `a` and `a.b` the hint gives `a` alone."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close = [one for one in close if one.rpartition(".")[0] not in close]
    if not close:
        return f"known are {', '.join(known)}"
    *others, last = close
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
