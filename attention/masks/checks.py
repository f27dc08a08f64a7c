"""Checks of the parameters of masks. Each returns the value to keep, or raises ValueError with the value, the rule and
what would work. A mask's parameters name their checks in their types."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from attention.errors import nearest
from attention.masks.rectangles import UNBOUNDED


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r}: must be a whole number; give for instance {name}={max(least, 64)}"
        ) from None
    if number < least:
        raise ValueError(f"{name}={number}: must be at least {least}")
    if number >= UNBOUNDED:
        hint = "; give -1 for a window without a bound" if least < 0 else ""
        raise ValueError(f"{name}={number}: must be less than {UNBOUNDED}{hint}")
    return number


def whole_numbers(name: str, values: Any, least: int = 0) -> tuple[int, ...]:
    """A list of ints of at least `least`."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r}: must be a list of whole numbers; give for instance {name}=[100,900,24]")
    return tuple([whole_number(f"{name}[{i}]", value, least) for i, value in enumerate(values)])


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r}: must be true or false")
    return bool(value)


def one_of(*known: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value not in known:
            raise ValueError(f"{name}={value}: {nearest(str(value), known)}")
        return value

    return check


Count = Annotated[int, whole_number]
Positive = Annotated[int, partial(whole_number, least=1)]
Counts = Annotated[Sequence[int], whole_numbers]
Flag = Annotated[bool, flag]


def within(name: str, value: int, tokens: int, whole: str = "the sequence") -> None:
    """A number of tokens that is not more than the whole has."""
    if value > tokens:
        raise ValueError(f"{name}={value}: {whole} has {tokens} tokens; give at most {name}={tokens}")
