"""Records the launches of a call, for a `LaunchTrace` that replays them with other tensors.

Launches reach the recorder in two ways: through `submit`, and as PyTorch's own operators, which it intercepts. It
refuses, by name, what it cannot replay: an unknown operator, and a launch by Triton or the CUDA driver that did not go
through `submit`. Then there is no trace, and calls stay eager."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.runtime.launch_trace import (
    Allocation,
    LaunchTrace,
    Step,
    SubmittedLaunch,
    TensorLayout,
    TensorPlace,
    View,
    freeing,
)
from attention.runtime.private import triton_launches_watched
from attention.runtime.strategy import Run
from attention.runtime.submit import NO_POINTERS, Kept, Scope, check_submitted, recorded_by, submitting

aten = torch.ops.aten
ALLOCATES = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
             aten.new_empty_strided.default}  # fmt: skip
WRITES: dict[Any, Callable[..., object]] = {
    aten.copy_.default: Tensor.copy_,
    aten.zero_.default: Tensor.zero_,
    aten.fill_.Scalar: Tensor.fill_,
    aten.index_copy_.default: Tensor.index_copy_,
}


# operators that allocate and write their result: a function that writes to a given tensor, and its arguments
MAKES: dict[Any, tuple[Callable[..., object], Callable[..., tuple[Any, ...]]]] = {
    aten.cat.default: (lambda into, dim, *parts: torch.cat(parts, dim, out=into), lambda parts, dim=0: (dim, *parts)),
    aten.index_select.default: (
        lambda into, x, dim, index: torch.index_select(x, dim, index, out=into),
        lambda x, dim, index: (x, dim, index),
    ),
} | dict.fromkeys(
    (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), (Tensor.zero_, lambda *_, **__: ())
)


def shared(inputs: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """The strided inputs that share a storage, as queries, keys and values of one projection do: (number of the input,
    number of the first input in that storage, distance of their first bytes)."""
    first: dict[int, int] = {}
    found = []
    for i, x in enumerate(inputs):
        if not x.is_contiguous():
            j = first.setdefault(x.untyped_storage().data_ptr(), i)
            if j != i:
                found.append((i, j, x.data_ptr() - inputs[j].data_ptr()))
    return tuple(found)


class LaunchRecorder(TorchDispatchMode):
    """Records one call on `inputs`. stream: returns the identity of the current stream."""

    def __init__(self, inputs: Sequence[Tensor], stream: Callable[[], Hashable]):
        super().__init__()
        self.inputs, self.stream, self.first = tuple(inputs), stream, stream()
        self.allocations: list[Allocation] = []
        self.made: list[SubmittedLaunch | Allocation | View] = []
        self.count = 0
        self.views: dict[Hashable, int] = {}
        self.kept: list[Tensor] = []
        self.why: str | None = None
        for x in inputs:
            self._allocation(x, True)
        for i, j, _ in shared(inputs):
            one, base = self.allocations[i], self.allocations[j]
            base.low, base.high = min(base.low, one.low), max(base.high, one.high)
            one.low = one.high = 0
        ranges = sorted((x.low, x.high) for x in self.allocations if x.low < x.high)
        if any(a[1] > b[0] for a, b in pairwise(ranges)):
            self.refuse("an address may lie in two inputs")

    def record(self, run: Run) -> tuple[Tensor, ...]:
        with recorded_by(self), triton_launches_watched(check_submitted, self.refuse), self:
            return run(*self.inputs)

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def keep(self, tensors: Kept) -> None:
        for x in tensors:
            each_of = x if isinstance(x, tuple) else (x,)
            self.kept += [each for each in each_of if each.numel() and self._find(each.data_ptr()) is None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if submitting():
            return result  # part of the submitted launch
        if func in ALLOCATES:
            self.made.append(self._allocation(result, False))
        elif func in WRITES and not kwargs:
            if args[0].numel():
                self.launched(WRITES[func], args)
        elif func in MAKES:
            self.made.append(self._allocation(result, False))
            function, arguments = MAKES[func]
            self.launched(function, (result, *arguments(*args, **(kwargs or {}))))
        elif not getattr(func, "is_view", False):
            self.refuse(str(func))
        return result

    def _allocation(self, x: Tensor, given: bool) -> Allocation:
        low, high = _span(x)
        self.count += 1
        found = Allocation(self.count, TensorLayout.of(x), low, low, high, self.stream(), given)
        self.allocations.append(found)
        return found

    def launched(
        self,
        launch: Callable[..., object],
        arguments: Sequence[Any],
        pointers: range = NO_POINTERS,
        scope: Scope = "stream",
        cleanup: bool = False,
    ) -> None:
        used: list[Allocation] = []
        recorded = list(arguments)
        addresses: dict[int, Any] = {}
        for i, x in enumerate(recorded):
            if isinstance(x, Tensor):
                recorded[i] = self._tensor(x, used)
            elif i in pointers:
                many = isinstance(x, tuple)
                place = tuple([self._address(each, used) for each in x]) if many else self._address(x, used)
                if place != x:
                    addresses[i] = place
        for allocation in used:
            allocation.last = len(self.made), self.stream()
        self.made.append(SubmittedLaunch(launch, tuple(recorded), addresses, scope, cleanup))

    def _find(self, address: int, used: list[Allocation] | None = None) -> Allocation | None:
        """The newest allocation at that address, which is added to `used`: older ones were freed."""
        found = next((x for x in reversed(self.allocations) if x.low <= address < x.high), None)
        if found is not None and used is not None:
            used.append(found)
        return found

    def _address(self, address: int, used: list[Allocation]) -> TensorPlace | int:
        found = self._find(address, used)
        return address if found is None else TensorPlace(found.number, address - found.first)

    def _tensor(self, x: Tensor, used: list[Allocation]) -> TensorPlace | TensorLayout | Tensor:
        if not x.numel():
            return TensorLayout.of(x)  # an empty view may hold much memory
        found = self._find(x.data_ptr(), used)
        # a tensor from outside the call is held by the trace
        return x if found is None else TensorPlace(self._number(x, found))

    def _number(self, x: Tensor, allocation: Allocation) -> int:
        """The number of the tensor, or of the view that equals x."""
        layout, offset = TensorLayout.of(x), (x.data_ptr() - allocation.first) // x.element_size()
        if layout.dtype != allocation.layout.dtype:
            self.refuse(f"{layout.dtype} in memory of {allocation.layout.dtype}")
            return allocation.number
        if offset == 0 and layout == allocation.layout:
            return allocation.number
        key = allocation.number, layout, offset
        if key not in self.views:
            self.count += 1
            self.views[key] = self.count
            self.made.append(View(self.count, allocation.number, layout, offset))
        return self.views[key]

    def trace(self, results: Sequence[Tensor]) -> LaunchTrace | str:
        """The trace of the recorded call, or why there is none. results: the results of the call."""
        given = {id(x): i for i, x in enumerate(self.inputs)}
        wanted: list[tuple[bool, int]] = []
        returned: list[Allocation] = []
        for x in results:
            if id(x) in given:
                wanted.append((True, given[id(x)]))
            elif isinstance(place := self._tensor(x, returned), TensorPlace):
                wanted.append((False, place.number))
            else:
                self.refuse("a result was not made by this call")
        if self.why is not None:
            return self.why
        freed = self._freed(returned)
        steps: list[Step] = []
        cleanup: list[bool] = []
        for i in self._needed(returned):
            entry = self.made[i]
            steps.append(entry.step())
            cleanup.append(isinstance(entry, SubmittedLaunch) and entry.cleanup)
            if i in freed:
                steps.append(freeing(freed[i]))
                cleanup.append(False)
        return LaunchTrace(self.count, steps, cleanup, wanted, self.kept)

    def _freed(self, returned: Sequence[Allocation]) -> dict[int, list[int]]:
        """The numbers of the tensors that are freed after each entry of `made`."""
        views = [x for x in self.made if isinstance(x, View)]
        freed: dict[int, list[int]] = {}
        for x in self.allocations:
            # Memory is freed early only if the stream that allocated it also uses it last, having waited for the
            # other streams. All else is kept to the end, when the caller's stream has waited for all others.
            if not x.given and x not in returned and x.last is not None and x.last[1] == x.stream:
                numbers = [x.number, *(view.number for view in views if view.base == x.number)]
                freed.setdefault(x.last[0], []).extend(numbers)
        return freed

    def _needed(self, returned: Sequence[Allocation]) -> list[int]:
        """The indices of the entries of `made` that a replay needs: only allocations that are used, and only stream
        switches on which a later launch, a later allocation or the caller depends."""
        unused = {
            i for i, x in enumerate(self.made) if isinstance(x, Allocation) and x.last is None and x not in returned
        }
        switches = [i for i, x in enumerate(self.made) if isinstance(x, SubmittedLaunch) and x.scope == "switch"]
        now = self.first
        for i, end in pairwise([*switches, len(self.made)]):
            (stream,) = cast(SubmittedLaunch, self.made[i]).arguments
            last = end == len(self.made)
            if stream != now and (last or any(map(_on_current_stream, self.made[i + 1 : end]))):
                now = stream
            else:
                unused.add(i)
        return [i for i in range(len(self.made)) if i not in unused]


def _on_current_stream(x: SubmittedLaunch | Allocation | View) -> bool:
    return isinstance(x, Allocation) or (isinstance(x, SubmittedLaunch) and x.scope == "stream")


def _span(x: Tensor) -> tuple[int, int]:
    """The address range [first byte, end)."""
    if x.numel() == 0:
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
