"""The mask of a run by its name and parameters, as conf/mask/ and results have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    """The mask with its open parameters (null) filled in for a sequence of so many tokens, in their order. lengths: of the
    sequences of a packed batch."""
    values, half = dict(parameters), tokens // 2

    def share(divisor: int, most: int = tokens) -> int:
        return min(max(1, tokens // divisor), most)

    def whole(key: str) -> list[int] | None:
        """The numbers of an earlier parameter; None for others, which are refused when the mask is made."""
        numbers = values.get(key)
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return numbers if all(isinstance(n, int) for n in numbers) else None

    def quarters(n: int) -> list[int]:
        return [(i + 1) * n // 4 - i * n // 4 for i in range(4)]

    dca = name == "dca"
    open_values: dict[str, Callable[[], Any]] = {
        "left": lambda: share(8),
        "chunk": lambda: share(4),
        "prefix": lambda: share(4),
        "lengths": lambda: list(lengths) if lengths else split(tokens),
        "prefixes": lambda: [n // 4 for n in whole("lengths") or []],
        "prompt": lambda: tokens - sum(whole("answers") or [tokens - half]),
        "answers": lambda: quarters(tokens - sum(whole("prompt") or [tokens])),
        "parts": lambda: [[[a, b], [a, b], [-1, -1]] for a, b in ((0, half), (half, tokens))],
        "window": lambda: share(4, 2048) if dca else share(8),
        "global_tokens": lambda: share(64, 128) if dca else share(64),
    }
    if dca:
        open_values["random"] = lambda: share(16, 512)
    for key in [key for key, value in parameters.items() if value is None and key in open_values]:
        values[key] = open_values[key]()
    return NamedMask(name, values)


def split(tokens: int) -> list[int]:
    """The lengths S/8, S/4, S/2 and the rest."""
    first = [tokens // 8, tokens // 4, tokens // 2]
    return [*first, tokens - sum(first)]
