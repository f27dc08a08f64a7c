"""The mask of a run by its name and parameters, as conf/mask/ and results have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from attention import masks
from attention.masks.mask import Mask

NONE = "none"  # no mask by name: `causal` and `window` say what a query sees


@dataclass(frozen=True)
class NamedMask:
    """A name of `attention.masks` and its parameters, which are JSON."""

    name: str
    parameters: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, json.dumps(self.parameters, sort_keys=True)))

    def make(self) -> Mask:
        """Raises ValueError for an unknown name or a bad parameter."""
        return masks.make(self.name, **self.parameters)


def named(name: str, parameters: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> NamedMask:
    """The mask with its open parameters (null) filled in for a sequence of so many tokens. lengths: of the sequences of
    a packed batch."""
    found, values = dict(parameters), _OPEN | _OPEN_OF.get(name, {})
    for key, value in parameters.items():
        if value is None and key in values:
            found[key] = values[key](found, tokens, lengths)
    return NamedMask(name, found)


def split(tokens: int) -> list[int]:
    """The lengths S/8, S/4, S/2 and the rest."""
    first = [tokens // 8, tokens // 4, tokens // 2]
    return [*first, tokens - sum(first)]


def _lengths(found: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> list[int]:
    return list(lengths) if lengths else split(tokens)


def _prefixes(found: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> Any:
    given = found.get("lengths")
    return [n // 4 for n in given] if _are_whole(given) else []


def _prompt(found: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> int:
    answers = found.get("answers")
    return tokens - sum(answers) if _are_whole(answers) else tokens // 2


def _answers(found: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> list[int]:
    rest = tokens - found["prompt"] if _are_whole([found.get("prompt")]) else 0
    return [(i + 1) * rest // 4 - i * rest // 4 for i in range(4)]


def _halves(found: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> list[Any]:
    half = tokens // 2
    return [[[a, b], [a, b], [-1, -1]] for a, b in ((0, half), (half, tokens))]


def _are_whole(values: Any) -> TypeGuard[list[int]]:
    """Whether these are whole numbers; other values are refused when the mask is made."""
    return isinstance(values, list) and all(isinstance(n, int) for n in values)


Open = Callable[[dict[str, Any], int, Sequence[int] | None], Any]


def _share(of: int, most: int | None = None) -> Open:
    return lambda found, tokens, lengths: min(max(1, tokens // of), most or tokens)


# what null stands for, by parameter, from the parameters so far, the tokens, and the lengths of a packed batch
_OPEN: dict[str, Open] = {
    "left": _share(8),
    "chunk": _share(4),
    "prefix": _share(4),
    "lengths": _lengths,
    "prefixes": _prefixes,
    "prompt": _prompt,
    "answers": _answers,
    "parts": _halves,
    "window": _share(8),
    "global_tokens": _share(64),
}
_OPEN_OF: dict[str, dict[str, Open]] = {
    "dca": {"window": _share(4, 2048), "global_tokens": _share(64, 128), "random": _share(16, 512)}
}
