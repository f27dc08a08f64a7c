"""A launch trace: the launches, allocations and views of one call, to be repeated on other inputs. A replay skips the
Python that decided what to launch. Unlike a CUDA graph it copies nothing and keeps no memory. On every rank and stream
it does what the eager call would do, so some ranks may replay a call that others run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from attention.runtime.submit import Scope

Step = Callable[[list[Any], list[int]], object]  # takes the tensors by number, and their addresses


@dataclass(frozen=True)
class Place:
    """A tensor of the current call, by its number, or the address `offset` bytes after its first."""

    number: int
    offset: int = 0


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Layout:
        return Layout(x.shape, x.stride(), x.dtype, x.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class View:
    """Tensor `number`: a view of tensor `base`, `offset` elements after its first. of_input: whether the base is an
    input, which may itself begin within its storage."""

    number: int
    base: int
    layout: Layout
    offset: int
    of_input: bool


@dataclass(eq=False)
class Allocation:
    """An input (`given`) or a new tensor. first: its address when recorded. low, high: the range of its addresses.
    stream: the stream to which its memory belongs."""

    number: int
    layout: Layout
    first: int
    low: int
    high: int
    stream: Hashable
    given: bool
    last: tuple[int, Hashable] | None = None  # the last launch that uses it, and its stream


@dataclass
class Launch:
    """A submitted launch. arguments: with a `Place` for each tensor of the current call."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    addresses: dict[int, Place | tuple[Place | int, ...]]  # by position
    scope: Scope
    cleanup: bool


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
            except BaseException:
                self._clean_up(list(steps), tensors, starts)
                raise
        return tuple([inputs[i] if is_input else tensors[i] for is_input, i in self.wanted])

    def _clean_up(self, left: list[Step], tensors: list[Any], starts: list[int]) -> None:
        """After an exception, does the remaining steps for which other streams or ranks wait."""
        for step, wanted in zip(left, self.cleanup[len(self.cleanup) - len(left) :], strict=True):
            if wanted:
                with suppress(Exception):
                    step(tensors, starts)


def trace_of(
    count: int,
    made: Sequence[Launch | Allocation | View],
    freed: Mapping[int, Sequence[int]],
    wanted: list[tuple[bool, int]],
    kept: list[Tensor],
) -> LaunchTrace:
    """The trace of recorded entries. freed: by the identity of an entry, the numbers of the tensors that nothing uses
    after it."""
    steps: list[Step] = []
    cleanup: list[bool] = []
    for each in made:
        steps.append(_step(each))
        cleanup.append(isinstance(each, Launch) and each.cleanup)
        if id(each) in freed:
            steps.append(_freeing(freed[id(each)]))
            cleanup.append(False)
    return LaunchTrace(count, steps, cleanup, wanted, kept)


def _step(x: Launch | Allocation | View) -> Step:
    if isinstance(x, Allocation):
        return _allocation(x.number, x.layout)
    if isinstance(x, View):
        return _view(x)
    arguments = [each.empty() if isinstance(each, Layout) else each for each in x.arguments]
    if not (x.addresses or any(isinstance(each, Place) for each in arguments)):
        return _constant(x.function, tuple(arguments))
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    def address(place: Place | int) -> str:
        if not isinstance(place, Place):
            return constant(place)
        return f"a[{place.number}]" + (f" + {constant(place.offset)}" if place.offset else "")

    words = []
    for i, each in enumerate(arguments):
        place = x.addresses.get(i)
        if isinstance(place, tuple):
            words.append(f"({''.join(address(y) + ',' for y in place)})")
        elif place is not None:
            words.append(address(place))
        else:
            words.append(f"t[{each.number}]" if isinstance(each, Place) else constant(each))
    return cast(Step, _compiled(f"lambda f, c: lambda t, a: f({', '.join(words)})")(x.function, constants))


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Callable[..., Any]:
    """Generated code, because it is faster than a loop over arguments. Cached: traces have most of their texts in
    common."""
    return cast(Callable[..., Any], eval(text, {"__builtins__": {}}))


def _allocation(number: int, layout: Layout) -> Step:
    shape, stride, dtype, device = layout.shape, layout.stride, layout.dtype, layout.device

    def allocate(tensors: list[Any], starts: list[int]) -> None:
        x = tensors[number] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        starts[number] = x.data_ptr()

    return allocate


def _view(x: View) -> Step:
    number, of, shape, stride, offset = x.number, x.base, x.layout.shape, x.layout.stride, x.offset

    def view(tensors: list[Any], starts: list[int]) -> None:
        tensors[number] = tensors[of].as_strided(shape, stride, offset)

    def view_of_input(tensors: list[Any], starts: list[int]) -> None:
        base = tensors[of]
        tensors[number] = base.as_strided(shape, stride, base.storage_offset() + offset)

    return view_of_input if x.of_input else view


def _freeing(numbers: Sequence[int]) -> Step:
    def free(tensors: list[Any], starts: list[int]) -> None:
        for number in numbers:
            tensors[number] = None

    return free


def _constant(function: Callable[..., object], arguments: tuple[Any, ...]) -> Step:
    return lambda tensors, starts: function(*arguments)
