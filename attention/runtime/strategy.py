"""How a call's launches are made. A strategy takes a key, the function `run`, and its inputs, and gives what `run(*inputs)` gives:
`eager` calls it; `LaunchReplay` and `GraphReplay` call it the first times, and repeat its launches from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]


def _nothing() -> None: ...


@dataclass(frozen=True)
class Key:
    """What the launches of a call depend on, beside the inputs' forms. owner: what planned them, by identity; it is held weakly; stage:
    which part of the call; state: of the transport, None where its launches may depend on more. begin: what the transport does before
    each call, for a replay that does not do it."""

    owner: Any
    stage: Hashable
    state: Hashable = None
    begin: Callable[[], None] = field(default=_nothing, compare=False)


class Strategy(Protocol):
    def __call__(self, key: Key, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


def eager(key: Key, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return run(*inputs)
