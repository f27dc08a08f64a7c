"""The executors, by the exchange that a variant names. A module here may be imported without torch; an executor needs
it, so each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

    from attention.executors.plan import Plan

NAMES = ("ring", "gather", "all_to_all", "tree", "dilated")  # each a module of this package


class Executor(Protocol):
    """q, k and v are this rank's shards; `saved` is what the backward needs of the forward."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(out, lse, saved); sinks `[H]` are applied to both, and saved as the last of a pass's tensors."""

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...], plan: Plan) -> tuple[Tensor, ...]:
        """(dq, dk, dv), and with sinks their gradient from this rank's queries."""


_loaded: dict[str, Executor] = {}


def executor(exchange: str) -> Executor:
    """The executor of one of NAMES. Raises KeyError for another name."""
    if exchange not in _loaded:
        if exchange not in NAMES:
            raise KeyError(f"{exchange!r} is not an executor; the executors are {', '.join(NAMES)}")
        _loaded[exchange] = cast(Executor, import_module(f"{__name__}.{exchange}"))
    return _loaded[exchange]
