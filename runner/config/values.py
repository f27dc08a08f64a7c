"""Values that a user gave: how a message shows one, rules for a single value, and secrets. What looks like a secret is written nowhere:
neither into results, logs and Hydra's files, nor to a tracker or in messages."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf

from attention.errors import nearest

LARGEST = (1 << 31) - 1  # of any whole number here
FINITE = sys.float_info.max
LONGEST = 80  # characters of a value in a message
LONGEST_MESSAGE = 1000  # characters of another package's message


class Refusal(ValueError):
    """What a user gave cannot be used. The message, one line, gives it, the rule and the way out. Any other ValueError is a defect."""


class InvalidConfig(Refusal):
    """A value of a configuration breaks a rule."""


class UnsupportedHere(Refusal):
    """A valid experiment that this machine or these packages cannot run."""


class CannotWrite(OSError):
    """A file or folder of a run cannot be written. The message gives the path, the cause and the way out."""


def message(error: BaseException) -> str:
    """The error's message in one line. One without a message, as Hydra raises while it composes, gives that of its
    cause."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    text = redacted(" ".join(str(error).split())) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_MESSAGE])


def plain(node: Any) -> dict[str, Any]:
    """A group of a configuration as a dict, its interpolations resolved."""
    return {str(k): v for k, v in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{written(x)}' for k, x in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 1000:  # Python writes no int of more than 4,300 digits
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
    return "null" if value is None else str(value)


def shown(value: Any) -> str:
    """A value for a message: as `written`, without secrets, on one line, shortened in the middle."""
    text: str = redacted(written(value))
    cut = len(text) - LONGEST
    if cut > 0:
        text = f"{text[: LONGEST // 2]} ...{cut:,} more characters... {text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python keeps a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def one_of(key: str, value: Any, known: Iterable[str]) -> str:
    """Raises InvalidConfig unless the value is one of these names."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise InvalidConfig(f"{key}={shown(value)}: {nearest(str(shown(value)), known)}")
    return value


def whole(key: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """Raises InvalidConfig unless the value is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(f"{key}={shown(value)}: must be a whole number of at least {least}")
    if value > most:
        raise InvalidConfig(f"{key}={shown(value)}: must be at most {most}")
    return value


def above_zero(key: str, value: Any, way_out: str, most: float = math.inf) -> None:
    """Raises InvalidConfig unless the value is None or a number above 0, at most `most`."""
    if value is None:
        return
    text = f"{value:g}" if isinstance(value, float) else shown(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidConfig(f"{key}={text}: must be above 0; {way_out}")
    if value > most:
        raise InvalidConfig(f"{key}={text}: must be at most {most:g}; {way_out}")


MARK = "<secret>"
# of a key or a variable whose value is a secret
SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|TOKEN(?![A-Z])|[_-](?:KEY|PASS|PWD|AUTH)(?![A-Z])", re.IGNORECASE
)
NO_SECRETS = ("token", "token losses", "joules_per_token")  # fields of results that SECRET_NAME matches
SHORTEST = 8  # characters of a variable's value; a shorter one stands in other texts by chance
# the rest of the line is the value: where it ends, only the parser of that text knows
_ASSIGNED = re.compile(
    rf"((?:{SECRET_NAME.pattern})[\w.-]*[\"']?\s*(?:=|:(?=\S|\s+[\"']))\s*)(?!\s|{MARK}).+", re.IGNORECASE
)
_LOGIN = re.compile(r"://(?:[^\s/]*|[^\s/:@\"',]+:[^\s@\"',]*)@")
_SHAPES = re.compile(
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{20,}|(?:github_pat_|glpat-|sk-|pypi-|xox[abprs]-|AIza)[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*|Bearer\s+[\w.~+/=-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END|\Z)"
)


def redacted(value: Any) -> Any:
    """The JSON value, or text, with `MARK` instead of the values of keys that `SECRET_NAME` matches, logins in URLs, tokens of known
    shapes, and values of environment variables with such names."""
    variables = {x for name, x in os.environ.items() if SECRET_NAME.search(name) and len(x) >= SHORTEST}
    return _redacted(value, sorted(variables, key=len, reverse=True))


def _redacted(value: Any, variables: list[str]) -> Any:
    if isinstance(value, str):
        for secret in variables:
            value = value.replace(secret, MARK)
        return _ASSIGNED.sub(rf"\1{MARK}", _SHAPES.sub(MARK, _LOGIN.sub(f"://{MARK}@", value)))
    if isinstance(value, dict):
        return {
            _redacted(key, variables): MARK if _is_secret(key, x) else _redacted(x, variables)
            for key, x in value.items()
        }
    return [_redacted(x, variables) for x in value] if isinstance(value, (list, tuple)) else value


def _is_secret(key: Any, value: Any) -> bool:
    scalar = value is not None and not isinstance(value, (bool, dict, list, tuple))
    return scalar and isinstance(key, str) and key not in NO_SECRETS and SECRET_NAME.search(key) is not None
