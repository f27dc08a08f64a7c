"""Launched passes played from a tape. What a pass launches depends on its plan and its inputs' shapes alone, but finding it out takes
the host longer than the launches do: the schedule's steps, the views, what waits for what. So a pass is recorded as it is run
the second time, every launch, copy, flag and event of it with where its tensors lie, and from then on only these calls are made
again, on the inputs of the day and on newly allocated memory. Unlike a CUDA graph's replay that copies nothing, keeps no memory, and
does on every rank and stream what running the pass would do, so that some ranks may run what others play.

What launches something tells the tape (`did`); what PyTorch allocates, views or copies the tape sees itself. A pass that does
anything else is run each time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Run = Callable[..., tuple[Tensor, ...]]
Function = Callable[..., object]
Step = Callable[[list[Any], list[int]], object]  # of the tensors, and where they begin

aten = torch.ops.aten
ALLOCATES = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
             aten.new_empty_strided.default}  # fmt: skip
WRITES: dict[Any, Function] = {
    aten.copy_.default: Tensor.copy_,
    aten.zero_.default: Tensor.zero_,
    aten.fill_.Scalar: Tensor.fill_,
    aten.index_copy_.default: Tensor.index_copy_,
}


def _cat(into: Tensor, dim: int, *parts: Tensor) -> None:
    torch.cat(parts, dim, out=into)


def _index_select(into: Tensor, x: Tensor, dim: int, index: Tensor) -> None:
    torch.index_select(x, dim, index, out=into)


# what makes a tensor and writes it: what writes one that is there, and its arguments of those
MAKES: dict[Any, tuple[Function, Callable[..., tuple[Any, ...]]]] = {
    aten.cat.default: (_cat, lambda parts, dim=0: (dim, *parts)),
    aten.index_select.default: (_index_select, lambda x, dim, index: (x, dim, index)),
    aten.zeros.default: (Tensor.zero_, lambda *_, **__: ()),
    aten.new_zeros.default: (Tensor.zero_, lambda *_, **__: ()),
    aten.zeros_like.default: (Tensor.zero_, lambda *_, **__: ()),
}


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def did(
    function: Function,
    *arguments: Any,
    addresses: tuple[int, int] = (0, 0),
    always: bool = False,
    anywhere: bool = False,
    switches: bool = False,
    keep: Iterable[Tensor | tuple[Tensor, ...]] = (),
) -> None:
    """`function(*arguments)` was just called, which starts something on the GPU or orders what is started. Its tensors may be those
    of the day; so may be the addresses (or tuples of them) at the places `addresses` of the arguments, from and up to. Those that
    are not stay what they are: their tensors are in `keep`, unless something else holds them for as long as the pass's state is the
    same. `always`: it is to be called where the pass ended by an exception, too, because others wait for it. `anywhere`: it does not
    depend on the current stream, as it was told its own or needs none; `switches`: it makes its one argument the current one."""
    if _local.recorder is not None:
        _local.recorder.add(function, arguments, addresses, always, anywhere, switches)
        _local.recorder.keep(keep)


def recording() -> bool:
    """Whether a tape is to be told."""
    return _local.recorder is not None


@contextmanager
def unseen() -> Iterator[None]:
    """What is done within is not the pass's, but is kept for those that come: no tape is told, and what PyTorch does is not seen."""
    if _local.recorder is None:
        yield
        return
    before, _local.recorder = _local.recorder, None
    try:
        with _disable_current_modes():
            yield
    finally:
        _local.recorder = before


def cannot(why: str) -> None:
    """What is done now can't be played."""
    if _local.recorder is not None:
        _local.recorder.refuse(why)


def _span(x: Tensor) -> tuple[int, int]:
    if x.numel() == 0:
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def shared(inputs: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Of the inputs that are strided and lie in another's memory, as queries, keys and values of one projection do: their number, that
    of the first there, and how many bytes behind it they begin."""
    first: dict[int, int] = {}
    found = []
    for i, x in enumerate(inputs):
        if not x.is_contiguous():
            j = first.setdefault(x.untyped_storage().data_ptr(), i)
            if j != i:
                found.append((i, j, x.data_ptr() - inputs[j].data_ptr()))
    return tuple(found)


@dataclass(frozen=True)
class _Place:
    """A tensor of the day by its number, or an address so many bytes behind where it begins."""

    number: int
    offset: int = 0


@dataclass(frozen=True)
class _Like:
    """A tensor without its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> _Like:
        return _Like(x.shape, x.stride(), x.dtype, x.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _View:
    """Number `number` is `like` that, from so many elements behind number `base` on, which may be `given`: begin within its memory."""

    number: int
    base: int
    like: _Like
    offset: int
    given: bool


@dataclass(eq=False)
class _Slot:
    """An input or an allocation, as `like` it was: where it lay, from which address up to which it is looked for, and in which
    stream's memory."""

    number: int
    like: _Like
    first: int
    low: int
    high: int
    stream: Hashable
    given: bool
    last: tuple[int, Hashable] | None = None  # the last call that uses it, and that one's stream


@dataclass
class _Call:
    function: Function
    arguments: tuple[Any, ...]  # with a `_Place` for each tensor of the day
    addresses: dict[int, _Place | tuple[_Place | int, ...]]
    always: bool
    anywhere: bool
    switches: bool


def _of_current_stream(x: _Call | _Slot | _View) -> bool:
    return isinstance(x, _Slot) or (isinstance(x, _Call) and not x.anywhere)


class Recorder(TorchDispatchMode):
    """Keeps what is called while a pass runs. `stream` tells the current one, as those that switch it name it."""

    def __init__(self, inputs: Sequence[Tensor], stream: Callable[[], Hashable]):
        super().__init__()
        self.inputs, self.stream, self.first = tuple(inputs), stream, stream()
        self.slots: list[_Slot] = []
        self.made: list[_Call | _Slot | _View] = []
        self.count = 0
        self.views: dict[Hashable, int] = {}
        self.kept: list[Tensor] = []
        self.why: str | None = None
        for x in inputs:
            self._slot(x, True)
        for i, j, _ in shared(inputs):
            slot, base = self.slots[i], self.slots[j]
            base.low, base.high = min(base.low, slot.low), max(base.high, slot.high)
            slot.low = slot.high = 0
        ranges = sorted((slot.low, slot.high) for slot in self.slots if slot.low < slot.high)
        if any(a[1] > b[0] for a, b in pairwise(ranges)):
            self.refuse("an address may lie in two inputs")

    def record(self, run: Run) -> tuple[Tensor, ...]:
        before, _local.recorder = _local.recorder, self
        try:
            with self:
                return run(*self.inputs)
        finally:
            _local.recorder = before

    def keep(self, tensors: Iterable[Tensor | tuple[Tensor, ...]]) -> None:
        for x in tensors:
            each_of = x if isinstance(x, tuple) else (x,)
            self.kept += [each for each in each_of if each.numel() and self._find(each.data_ptr()) is None]

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATES:
            self.made.append(self._slot(result, False))
        elif func in WRITES and not kwargs:
            if args[0].numel():
                self.add(WRITES[func], args)
        elif func in MAKES:
            self.made.append(self._slot(result, False))
            function, arguments = MAKES[func]
            self.add(function, (result, *arguments(*args, **(kwargs or {}))))
        elif not getattr(func, "is_view", False):
            self.refuse(str(func))
        return result

    def _slot(self, x: Tensor, given: bool) -> _Slot:
        low, high = _span(x)
        self.count += 1
        self.slots.append(_Slot(self.count, _Like.of(x), low, low, high, self.stream(), given))
        return self.slots[-1]

    def add(
        self,
        function: Function,
        arguments: Sequence[Any],
        addresses: tuple[int, int] = (0, 0),
        always: bool = False,
        anywhere: bool = False,
        switches: bool = False,
    ) -> None:
        used: list[_Slot] = []
        given = list(arguments)
        found: dict[int, Any] = {}
        for i, x in enumerate(given):
            if isinstance(x, Tensor):
                given[i] = self._tensor(x, used)
            elif addresses[0] <= i < addresses[1]:
                place = (
                    tuple([self._address(each, used) for each in x]) if isinstance(x, tuple) else self._address(x, used)
                )
                if place != x:
                    found[i] = place
        for slot in used:
            slot.last = len(self.made), self.stream()
        self.made.append(_Call(function, tuple(given), found, always, anywhere, switches))

    def _find(self, address: int) -> _Slot | None:
        """The newest there: what lay there before is no more."""
        return next((slot for slot in reversed(self.slots) if slot.low <= address < slot.high), None)

    def _address(self, address: int, used: list[_Slot]) -> _Place | int:
        slot = self._find(address)
        if slot is None:
            return address
        used.append(slot)
        return _Place(slot.number, address - slot.first)

    def _tensor(self, x: Tensor, used: list[_Slot]) -> _Place | _Like | Tensor:
        if not x.numel():
            return _Like.of(x)  # itself it may be a view that holds much
        slot = self._find(x.data_ptr())
        if slot is None:
            return x  # which is kept
        used.append(slot)
        return _Place(self._number(x, slot))

    def _number(self, x: Tensor, slot: _Slot) -> int:
        """Of the tensor itself, or of a view of it."""
        like, offset = _Like.of(x), (x.data_ptr() - slot.first) // x.element_size()
        if like.dtype != slot.like.dtype:
            self.refuse(f"{like.dtype} in memory of {slot.like.dtype}")
            return slot.number
        if offset == 0 and like == slot.like:
            return slot.number
        key = slot.number, like, offset
        if key not in self.views:
            self.count += 1
            self.views[key] = self.count
            self.made.append(_View(self.count, slot.number, like, offset, slot.given))
        return self.views[key]

    def _switched_to(self) -> set[int]:
        """The switches of the current stream that something depends on, or the caller."""
        switches = [i for i, made in enumerate(self.made) if isinstance(made, _Call) and made.switches]
        kept, now = set(), self.first
        for i, end in pairwise([*switches, len(self.made)]):
            (stream,) = cast(_Call, self.made[i]).arguments
            last = end == len(self.made)
            if stream != now and (last or any(map(_of_current_stream, self.made[i + 1 : end]))):
                kept.add(i)
                now = stream
        return kept

    def tape(self, results: Sequence[Tensor]) -> Tape | str:
        """What was recorded, or why it can't be played."""
        given = {id(x): i for i, x in enumerate(self.inputs)}
        wanted: list[tuple[bool, int]] = []
        returned: list[_Slot] = []
        for x in results:
            if id(x) in given:
                wanted.append((True, given[id(x)]))
                continue
            place = self._tensor(x, returned)
            if not isinstance(place, _Place):
                self.refuse("a result is not of this pass")
                continue
            wanted.append((False, place.number))
        if self.why is not None:
            return self.why
        views = [x for x in self.made if isinstance(x, _View)]
        done: dict[int, list[_Slot]] = {}
        for slot in self.slots:
            # what another stream uses last is kept to the end of the pass, when the caller's has waited for all of them; what another
            # one used before, the stream has waited for, or could not use it
            if not slot.given and slot not in returned and slot.last is not None and slot.last[1] == slot.stream:
                done.setdefault(slot.last[0], []).append(slot)
        steps: list[Step] = []
        always: list[bool] = []
        kept = self._switched_to()
        for i, made in enumerate(self.made):
            if isinstance(made, _Slot) and made.last is None and made not in returned:
                continue  # which nothing uses
            if not (isinstance(made, _Call) and made.switches) or i in kept:
                steps.append(_step(made))
                always.append(isinstance(made, _Call) and made.always)
            if i in done:
                numbers = {slot.number for slot in done[i]}
                steps.append(_letting_go([*numbers, *(view.number for view in views if view.base in numbers)]))
                always.append(False)
        return Tape(self.count, steps, always, wanted, self.kept)


@dataclass
class Tape:
    """Of a pass with `count` tensors, of which its inputs are the first, from number 1 on. always: whether a step is to be done
    behind an exception, too. wanted: of each result whether it is an input, and which of these or of the tensors."""

    count: int
    steps: list[Step]
    always: list[bool]
    wanted: list[tuple[bool, int]]
    kept: list[Tensor]

    def play(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
                self._end(list(steps), tensors, starts)
                raise
        return tuple([inputs[i] if is_input else tensors[i] for is_input, i in self.wanted])

    def _end(self, left: list[Step], tensors: list[Any], starts: list[int]) -> None:
        """What others wait for, of the steps that an exception left."""
        for step, wanted in zip(left, self.always[len(self.always) - len(left) :], strict=True):
            if wanted:
                with suppress(Exception):
                    step(tensors, starts)


def _step(x: _Call | _Slot | _View) -> Step:
    if isinstance(x, _Slot):
        return _allocation(x.number, x.like)
    if isinstance(x, _View):
        return _as_view(x)
    arguments = [each.empty() if isinstance(each, _Like) else each for each in x.arguments]
    if not (x.addresses or any(isinstance(each, _Place) for each in arguments)):
        return _again(x.function, tuple(arguments))
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    def address(place: _Place | int) -> str:
        if not isinstance(place, _Place):
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
            words.append(f"t[{each.number}]" if isinstance(each, _Place) else constant(each))
    return cast(Step, _written(f"lambda f, c: lambda t, a: f({', '.join(words)})")(x.function, constants))


@lru_cache(maxsize=4096)
def _written(text: str) -> Callable[..., Any]:
    """Tapes of one variant's packs have most of their steps in common."""
    return cast(Callable[..., Any], eval(text, {"__builtins__": {}}))


def _allocation(number: int, like: _Like) -> Step:
    shape, stride, dtype, device = like.shape, like.stride, like.dtype, like.device

    def allocate(tensors: list[Any], starts: list[int]) -> None:
        x = tensors[number] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        starts[number] = x.data_ptr()

    return allocate


def _as_view(x: _View) -> Step:
    number, of, shape, stride, behind = x.number, x.base, x.like.shape, x.like.stride, x.offset

    def view(tensors: list[Any], starts: list[int]) -> None:
        tensors[number] = tensors[of].as_strided(shape, stride, behind)

    def view_of_input(tensors: list[Any], starts: list[int]) -> None:
        base = tensors[of]
        tensors[number] = base.as_strided(shape, stride, base.storage_offset() + behind)

    return view_of_input if x.given else view


def _letting_go(numbers: Sequence[int]) -> Step:
    def free(tensors: list[Any], starts: list[int]) -> None:
        for number in numbers:
            tensors[number] = None

    return free


def _again(function: Function, arguments: tuple[Any, ...]) -> Step:
    return lambda tensors, starts: function(*arguments)
