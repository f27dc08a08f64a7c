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
UNIONS = (types.UnionType, typing.Union)


class NewerSchema(ValueError):
    """A result that a later version of this program wrote."""


def decoded(text: str) -> Any:
    """The value of a JSON text. Raises ValueError also for what JSON or UTF-8 lacks: NaN, infinity, 1e999, a NUL, half of a
    surrogate pair."""

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"has the number {digits[:40]}, which is not finite")
        return value

    def whole(digits: str) -> int:
        number(digits)
        return int(digits)

    try:
        value = json.loads(text, parse_constant=number, parse_float=number, parse_int=whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error})") from None
    if _NUL.search(text):
        raise ValueError("has a NUL within a text")
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("has a text that is no Unicode: half of a surrogate pair") from None
    return value


def parsed(kind: Any, value: Any, at: str = "", strict: bool = False) -> Any:
    """A JSON value as the type `kind`; `at` is its path, for messages. Null, or no value, stands for a field's default: else
    for None, an empty list or object. Raises ValueError, which names the path and the value, and NewerSchema for a key that
    a dataclass lacks if `strict`; else such keys are ignored."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if value is None:
        return _empty(kind, at)
    if origin in UNIONS:
        return parsed(inner[0], value, at, strict)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _checked(dict, value, at, "an object"), at, strict)
    if origin is dict:
        items = _checked(dict, value, at, "an object").items()
        return {key: parsed(inner[1], x, f"{at}.{key}", strict) for key, x in items if x is not None or inner[1] is Any}
    if origin in (list, tuple):
        entries = _checked((list, tuple), value, at, "a list")
        if origin is tuple and len(entries) != len(inner):
            raise ValueError(f"{at} must have {len(inner)} values, is {shown(value)}")
        return origin(parsed(inner[0], x, f"{at}[{i}]", strict) for i, x in enumerate(entries))
    if isinstance(value, bool) != (kind is bool):  # Python counts bool as int, JSON does not
        raise ValueError(f"{at} must be {NAMES[kind]}, is {shown(value)}")
    return _checked((int, float) if kind is float else kind, value, at, NAMES[kind])


def what_parses(kind: Any, value: dict[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass `kind` from a JSON value that may be anything: one whose value has another type is empty."""
    fields = {}
    for name, (hint, _) in _fields(kind).items():
        fields[name] = _empty(hint, name)
        with suppress(ValueError):
            fields[name] = parsed(hint, value.get(name))
    return fields


def shown(value: Any) -> str:
    """A value in a message: JSON of at most 40 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _empty(kind: Any, at: str) -> Any:
    """What stands for no value of a type. Raises ValueError."""
    origin = typing.get_origin(kind)
    if origin in UNIONS or kind is Any:
        return None
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, {}, at, False)
    if origin in (list, dict):
        return origin()
    raise ValueError(f"{at} is missing")


def _checked(kind: Any, value: Any, at: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{at} must be {name}, is {shown(value)}")
    return value


def _dataclass(kind: Any, value: dict[str, Any], at: str, strict: bool) -> Any:
    start = f"{at}." if at else ""
    if strict and (unknown := value.keys() - _fields(kind).keys()):
        raise NewerSchema(f"{start}{min(unknown)} is not known to this version of the program")
    return kind(**{
        name: parsed(hint, value.get(name), f"{start}{name}", strict)
        for name, (hint, has_default) in _fields(kind).items()
        if value.get(name) is not None or not has_default
    })  # fmt: skip


@lru_cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass, and whether it has a default."""
    hints, none = typing.get_type_hints(kind), dataclasses.MISSING
    fields = (field for field in dataclasses.fields(kind) if field.init)
    return {f.name: (hints[f.name], f.default is not none or f.default_factory is not none) for f in fields}
