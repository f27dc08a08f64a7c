"""CUDA streams and devices as `torch.cuda` has them, at a fraction of the host's time: `torch.cuda.stream`, `current_stream` and
`Stream.wait_stream` take 5 to 14 µs each, which is what a short step costs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from attention.runtime import launch_trace

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current(device: torch.device) -> torch.cuda.Stream:
    """The stream that is current on `device`, which need not be the current device."""
    identity = torch._C._cuda_getCurrentStream(device.index)
    found = _streams.get(identity)
    if found is None:
        number, index, kind = identity
        found = _streams[identity] = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
    return found


class On:
    """`with On(stream):` what is started within goes to `stream`, and allocations are that stream's. One at a time, and not
    within itself: it keeps what was current."""

    def __init__(self, stream: torch.cuda.Stream):
        self.identity = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self.device = torch._C._cuda_getDevice()
        self.before = torch._C._cuda_getCurrentStream(self.identity[1])
        _set(self.identity)

    def __exit__(self, *exc: object) -> None:
        _set(self.before)
        if self.device != self.identity[1]:
            torch._C._cuda_setDevice(self.device)


def _set(identity: tuple[int, int, int]) -> None:
    _switch(identity)
    launch_trace.did(_switch, identity, always=True, switches=True)


def _switch(identity: tuple[int, int, int]) -> None:
    number, index, kind = identity
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


_NOTHING: AbstractContextManager[object] = nullcontext()


def on_device(index: int) -> AbstractContextManager[object]:
    """A context in which that device is the current one."""
    return _NOTHING if torch._C._cuda_getDevice() == index else torch.cuda.device(index)


class Follow:
    """Lets one stream wait for all that another was given so far. An event each time would be made and freed; a wait holds
    on to what the event stood for, so one serves for all, from one thread at a time."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def __call__(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        record(self.event, other)
        wait(stream, self.event)


def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    event.record(stream)
    launch_trace.did(event.record, stream, always=True, anywhere=True)


def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    stream.wait_event(event)
    launch_trace.did(stream.wait_event, event, always=True, anywhere=True)


def capturing(device: torch.device) -> bool:
    """Whether the stream that is current on `device` is being captured in a CUDA graph."""
    if torch._C._cuda_getDevice() == device.index:
        return cast(bool, torch._C._cuda_isCurrentStreamCapturing())
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
