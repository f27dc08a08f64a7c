"""CUDA streams and devices as `torch.cuda` has them, with less CPU time: `torch.cuda.stream`, `current_stream` and
`Stream.wait_stream` take 5 to 14 µs each, which matters for short calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from attention.gpu import private


def current(device: torch.device) -> torch.cuda.Stream:
    """The stream that is current on `device`, which need not be the current device."""
    return _stream(*private.stream_id(device.index))


@cache
def _stream(number: int, index: int, kind: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


class On:
    """`with On(stream):` launches go to `stream`, and allocations belong to it. It stores the previous stream, so it
    cannot be entered twice at once."""

    def __init__(self, stream: torch.cuda.Stream):
        self.identity = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self.device = private.current_device()
        self.before = private.stream_id(self.identity[1])
        private.set_stream(*self.identity)

    def __exit__(self, *exc: object) -> None:
        private.set_stream(*self.before)
        if self.device != self.identity[1]:
            torch.cuda.set_device(self.device)


_NOTHING: AbstractContextManager[object] = nullcontext()


def on_device(index: int | None) -> AbstractContextManager[object]:
    """A context in which that GPU is the current one; None: that of tensors on a CPU."""
    return _NOTHING if index is None or private.current_device() == index else torch.cuda.device(index)


class Follow:
    """Makes one stream wait for the work of another so far. One event serves all waits, for one thread at a time: a
    wait refers to what the event recorded last before it."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def __call__(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self.event.record(other)
        stream.wait_event(self.event)


def capturing(device: torch.device) -> bool:
    """Whether the stream that is current on a tensor's device is being captured in a CUDA graph."""
    with on_device(device.index):
        return device.index is not None and torch.cuda.is_current_stream_capturing()


class Inline:
    """Runs everything in order, on one stream, where a `PriorityStream` is used.

    Work that remote ranks wait for runs on a high-priority stream. A rank's work on local keys, which nobody waits for,
    runs on the caller's stream in the background. It fills the multiprocessors that the other leaves free: while remote
    keys travel, at the ends of kernels, and while gradients travel back.

    Both classes are context managers around a forward or backward. `apart` says whether there is a background stream, so
    that its results should be added last. Memory belongs to the stream on which it was allocated: background work writes
    only to tensors of the priority stream, or of before, and may allocate temporaries of its own."""

    def __init__(self, apart: bool = False):
        self.apart = apart

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def background(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None: ...


class CudaPriorityStream:
    """For one forward or backward, and one thread, at a time. At its end, even by an exception, the caller's stream
    waits for it."""

    apart = True

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)
        self.on, self.follow = On(self.stream), Follow()

    def __enter__(self) -> CudaPriorityStream:
        self.caller = current(self.device)
        self.back = On(self.caller)
        self.follow(self.stream, self.caller)
        self.on.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.on.__exit__(*exc)
        self.follow(self.caller, self.stream)

    def background(self) -> AbstractContextManager[object]:
        """A context for background work. It follows the priority stream's work so far, which does not wait for it."""
        self.follow(self.caller, self.stream)
        return self.back

    def join(self) -> None:
        """Makes the next work of the priority stream follow all background work."""
        self.follow(self.stream, self.caller)


PriorityStream = Inline | CudaPriorityStream
