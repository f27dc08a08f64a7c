"""JSON values as dataclasses, checked against the types of their fields."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from contextlib import suppress
from functools import lru_cache
from typing import Any

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def decoded(text: str) -> Any:
    """The value of a JSON text. Raises ValueError also for what JSON or UTF-8 lacks: NaN, infinity, 1e999, a NUL, half of a
    surrogate pair."""

    def number(digits: str) -> float:
        if not math.isfinite(found := float(digits)):
            raise ValueError(f"has the number {digits[:40]}, which is not finite")
        return found

    def whole(digits: str) -> int:
        number(digits)
        return int(digits)

    value = json.loads(text, parse_constant=number, parse_float=number, parse_int=whole)
    if _NUL.search(text):
        raise ValueError("has a NUL within a text")
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("has a text that is no Unicode: half of a surrogate pair") from None
    return value


def parsed(kind: Any, value: Any, at: str = "") -> Any:
    """A JSON value as the type `kind`; `at` is its path, for messages. Keys that a dataclass lacks are ignored, and
    null stands for a field's default. Raises ValueError, which names the path and the value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else parsed(next(x for x in inner if x is not type(None)), value, at)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _checked(dict, value, at, "an object"), at)
    if origin is dict:
        items = _checked(dict, value, at, "an object").items()
        return {key: parsed(inner[1], x, f"{at}.{key}") for key, x in items if x is not None or inner[1] is Any}
    if origin in (list, tuple):
        entries = _checked((list, tuple), value, at, "a list")
        if origin is tuple and len(entries) != len(inner):
            raise ValueError(f"{at} must have {len(inner)} values, is {shown(value)}")
        return origin(parsed(inner[0], x, f"{at}[{i}]") for i, x in enumerate(entries))
    if isinstance(value, bool) != (kind is bool):  # Python counts bool as int, JSON does not
        raise ValueError(f"{at} must be {NAMES[kind]}, is {shown(value)}")
    return _checked((int, float) if kind is float else kind, value, at, NAMES[kind])


def what_parses(kind: Any, value: Any) -> Any:
    """The dataclass `kind` from a JSON value that may be anything: a field whose value has another type keeps its
    default."""
    found = {}
    for name, (hint, _) in _fields(kind).items():
        entry = value.get(name) if isinstance(value, dict) else None
        if dataclasses.is_dataclass(hint):
            found[name] = what_parses(hint, entry)
        elif entry is not None:
            with suppress(ValueError):
                found[name] = parsed(hint, entry)
    return kind(**found)


def shown(value: Any) -> str:
    """A value in a message: JSON of at most 40 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _checked(kind: Any, value: Any, at: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{at} must be {name}, is {shown(value)}")
    return value


def _dataclass(kind: Any, value: dict[str, Any], at: str) -> Any:
    found = {}
    for name, (hint, required) in _fields(kind).items():
        path = f"{at}.{name}" if at else name
        if value.get(name) is not None:
            found[name] = parsed(hint, value[name], path)
        elif required:
            raise ValueError(f"{path} is missing")
    return kind(**found)


@lru_cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass, and whether it must be given."""
    hints, none = typing.get_type_hints(kind), dataclasses.MISSING
    return {f.name: (hints[f.name], f.default is none and f.default_factory is none) for f in dataclasses.fields(kind)}
