"""How a call's launches are made. A strategy takes a key, the function `run`, and its inputs, and returns what
`run(*inputs)` returns. `eager` calls it. `LaunchReplay` and `GraphReplay` call it the first times, and then repeat its
launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Key:
    """Everything besides the inputs' shapes and strides that decides the launches of a call.

    owner: the plan, by identity, held weakly. stage: forward or backward. state: of the transport (`Transport.state`);
    None: do not replay. begin: what the transport does before each call, for a replay that skips it."""

    owner: Any
    stage: Hashable
    state: Hashable = None
    begin: Callable[[], object] = field(default=lambda: None, compare=False)


Strategy = Callable[[Key, Run, Sequence[Tensor]], tuple[Tensor, ...]]


def eager(key: Key, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return run(*inputs)
