"""Checks of the parameters of masks. Each raises ValueError with the value, the rule and what would work."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from attention.errors import nearest
from attention.masks.rectangles import UNBOUNDED


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r}: must be a whole number; give for instance {name}={max(least, 64)}"
        ) from None
    if found < least:
        raise ValueError(f"{name}={found}: must be at least {least}")
    if found >= UNBOUNDED:
        hint = "; give -1 for a window without a bound" if least < 0 else ""
        raise ValueError(f"{name}={found}: must be less than {UNBOUNDED}{hint}")
    return found


def whole_numbers(name: str, values: Any, least: int = 0) -> tuple[int, ...]:
    """A list of ints of at least `least`."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r}: must be a list of whole numbers; give for instance {name}=[100,900,24]")
    return tuple(whole_number(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def set_whole(mask: object, *names: str, least: int = 0) -> None:
    """Makes these fields of a frozen dataclass ints of at least `least`."""
    for name in names:
        object.__setattr__(mask, name, whole_number(name, getattr(mask, name), least))


def set_flags(mask: object, *names: str) -> None:
    """Checks that these fields are true or false."""
    for name in names:
        value = getattr(mask, name)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}={value!r}: must be true or false")
        object.__setattr__(mask, name, bool(value))


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """`value` is one of the known names."""
    if value not in tuple(known):
        raise ValueError(f"{name}={value}: {nearest(str(value), known)}")


def within(name: str, value: int, tokens: int) -> None:
    """A number of tokens that is not more than the sequence has."""
    if value > tokens:
        raise ValueError(f"{name}={value}: the sequence has {tokens} tokens; give at most {name}={tokens}")


def covers(name: str, value: str, total: int, tokens: int) -> None:
    """Lengths that add up to the sequence."""
    if total != tokens:
        raise ValueError(
            f"{name}={value}: sums to {total}, but the sequence has {tokens} tokens; give lengths that sum to {tokens}"
        )
