"""A launch trace: the launches, allocations and views of one call, to be repeated on other inputs. A replay skips the
Python that decided what to launch. Unlike a CUDA graph it copies nothing and keeps no memory. On every rank and stream
it does what the eager call would do, so some ranks may replay a call that others run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from attention.runtime.submit import Scope

Step = Callable[[list[Any], list[int]], object]  # takes the tensors by number, and their addresses


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the current call, by its number, or the address `offset` bytes after its first."""

    number: int
    offset: int = 0


@dataclass(frozen=True)
class TensorLayout:
    """Shape, strides, dtype and device of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> TensorLayout:
        return TensorLayout(x.shape, x.stride(), x.dtype, x.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class View:
    """Tensor `number`: a view of tensor `base`, `offset` elements after its first."""

    number: int
    base: int
    layout: TensorLayout
    offset: int

    def step(self) -> Step:
        number, base, shape, stride, offset = self.number, self.base, self.layout.shape, self.layout.stride, self.offset

        def view(tensors: list[Any], starts: list[int]) -> None:
            x = tensors[base]
            tensors[number] = x.as_strided(shape, stride, x.storage_offset() + offset)

        return view


@dataclass(eq=False)
class Allocation:
    """An input (`given`) or a new tensor. first: its address when recorded. low, high: the range of its addresses.
    stream: the stream to which its memory belongs."""

    number: int
    layout: TensorLayout
    first: int
    low: int
    high: int
    stream: Hashable
    given: bool
    last: tuple[int, Hashable] | None = None  # the last launch that uses it, and its stream

    def step(self) -> Step:
        number, x = self.number, self.layout
        shape, stride, dtype, device = x.shape, x.stride, x.dtype, x.device

        def allocate(tensors: list[Any], starts: list[int]) -> None:
            x = tensors[number] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            starts[number] = x.data_ptr()

        return allocate


@dataclass
class SubmittedLaunch:
    """A submitted launch. arguments: with a `TensorPlace` for each tensor of the current call."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    addresses: dict[int, TensorPlace | tuple[TensorPlace | int, ...]]  # by position
    scope: Scope
    cleanup: bool

    def step(self) -> Step:
        function, arguments = self.function, [x.empty() if isinstance(x, TensorLayout) else x for x in self.arguments]
        if not (self.addresses or any(isinstance(x, TensorPlace) for x in arguments)):
            return lambda tensors, starts: function(*arguments)
        constants: list[Any] = []

        def constant(value: Any) -> str:
            constants.append(value)
            return f"c[{len(constants) - 1}]"

        def address(place: TensorPlace | int) -> str:
            if not isinstance(place, TensorPlace):
                return constant(place)
            return f"a[{place.number}]" + (f" + {constant(place.offset)}" if place.offset else "")

        words = []
        for i, x in enumerate(arguments):
            place = self.addresses.get(i)
            if isinstance(place, tuple):
                words.append(f"({''.join(address(y) + ',' for y in place)})")
            elif place is not None:
                words.append(address(place))
            else:
                words.append(f"t[{x.number}]" if isinstance(x, TensorPlace) else constant(x))
        return cast(Step, _compiled(f"lambda f, c: lambda t, a: f({', '.join(words)})")(function, constants))


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Callable[..., Any]:
    """Generated code, because it is faster than a loop over arguments. Traces have most of their texts in common."""
    return cast(Callable[..., Any], eval(text, {"__builtins__": {}}))


@dataclass
class LaunchTrace:
    """The trace of a call with `count` tensors; the inputs come first, from number 1 on.

    cleanup: which steps are also done after an exception.
    wanted: for each result (whether it is an input, its number among the inputs or the tensors).
    kept: tensors from outside the call that it reads by address."""

    count: int
    steps: list[Step]
    cleanup: list[bool]
    wanted: list[tuple[bool, int]]
    kept: list[Tensor]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        tensors: list[Any] = [None] * (self.count + 1)
        starts = [0] * (self.count + 1)
        with torch.no_grad():
            for i, x in enumerate(inputs, 1):
                tensors[i] = x.detach() if x.requires_grad else x
                starts[i] = x.data_ptr()
            steps = iter(self.steps)
            try:
                for step in steps:
                    step(tensors, starts)
            except BaseException:  # then other streams or ranks wait for some of the remaining steps
                left = list(steps)
                for step, wanted in zip(left, self.cleanup[len(self.cleanup) - len(left) :], strict=True):
                    if wanted:
                        with suppress(Exception):
                            step(tensors, starts)
                raise
        return tuple([inputs[i] if is_input else tensors[i] for is_input, i in self.wanted])


def freeing(numbers: Sequence[int]) -> Step:
    def free(tensors: list[Any], starts: list[int]) -> None:
        for number in numbers:
            tensors[number] = None

    return free
