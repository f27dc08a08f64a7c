"""What looks like a secret is written nowhere: neither into results, logs and Hydra's files, nor to a tracker or in messages."""

from __future__ import annotations

import os
import re
from typing import Any

MARK = "<secret>"
# of a key or a variable whose value is a secret
NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|TOKEN(?![A-Z])|[_-](?:KEY|PASS|PWD|AUTH)(?![A-Z])", re.IGNORECASE
)
NO_SECRETS = ("token", "token losses", "joules_per_token")  # fields of results that NAME matches
SHORTEST = 8  # characters of a variable's value; a shorter one stands in other texts by chance
# the rest of the line is the value: where it ends, only the parser of that text knows
_ASSIGNED = re.compile(rf"((?:{NAME.pattern})[\w.-]*[\"']?\s*(?:=|:(?=\S|\s+[\"']))\s*)(?!\s|{MARK}).+", re.IGNORECASE)
_LOGIN = re.compile(r"://(?:[^\s/]*|[^\s/:@\"',]+:[^\s@\"',]*)@")
_SHAPES = re.compile(
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{20,}|(?:github_pat_|glpat-|sk-|pypi-|xox[abprs]-|AIza)[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*|Bearer\s+[\w.~+/=-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END|\Z)"
)


def redacted(value: Any) -> Any:
    """The JSON value, or text, with `MARK` instead of the values of keys that `NAME` matches, logins in URLs, tokens of known
    shapes, and values of environment variables with such names."""
    variables = {x for name, x in os.environ.items() if NAME.search(name) and len(x) >= SHORTEST}
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
    return scalar and isinstance(key, str) and key not in NO_SECRETS and NAME.search(key) is not None
