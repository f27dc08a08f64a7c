"""`submit`: everything that starts or orders work on a GPU goes through it. It executes the launch and reports it to
this thread's recorder, if there is one (`launch_recorder`). A launch that bypasses `submit` ends the recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from attention.runtime import private

R = TypeVar("R")
Scope = Literal["stream", "any", "switch"]
Kept = Iterable[Tensor | tuple[Tensor, ...]]

NO_POINTERS = range(0)


class SubmissionRecorder(Protocol):
    def launched(
        self, launch: Callable[..., object], arguments: tuple[Any, ...], pointers: range, scope: Scope, cleanup: bool
    ) -> None: ...

    def keep(self, tensors: Kept) -> None: ...

    def refuse(self, why: str) -> None:
        """Ends the recording without a trace. why: the reason."""


class _Local(threading.local):
    recorder: SubmissionRecorder | None = None
    submitting: bool = False


_local = _Local()


def submit(
    launch: Callable[..., R],
    *arguments: Any,
    pointers: range = NO_POINTERS,
    scope: Scope = "stream",
    cleanup: bool = False,
    keep: Kept = (),
) -> R:
    """`launch(*arguments)`, which a recorder adds to its trace as one launch, with all that is submitted within it.

    pointers: the positions of arguments that are addresses, or tuples of them. A replay replaces tensors of the
    recorded call, and addresses within them, by the current call's. Other tensors and addresses stay.
    keep: the tensors of such addresses, unless something holds them while the transport's state is the same.
    scope: "stream": it goes to the current stream; "any": it does not depend on the current stream; "switch": it makes
    its one argument the current stream.
    cleanup: it is also done if a replay raises, because other streams or ranks wait for it."""
    recorder = _local.recorder
    if recorder is None or _local.submitting:
        return launch(*arguments)
    _local.submitting = True
    try:
        result = launch(*arguments)
    finally:
        _local.submitting = False
    recorder.launched(launch, arguments, pointers, scope, cleanup)
    recorder.keep(keep)
    return result


def submitting() -> bool:
    """Whether a submitted launch is being executed."""
    return _local.submitting


def recording() -> bool:
    return _local.recorder is not None


def check_submitted(name: str) -> None:
    """Called where a launch is made: ends this thread's recording if the launch did not go through `submit`."""
    if _local.recorder is not None and not _local.submitting:
        _local.recorder.refuse(f"{name} was launched without `submit`")


def refuse_recording(why: str) -> None:
    """Ends this thread's recording, if there is one, because the current work cannot be replayed."""
    if _local.recorder is not None:
        _local.recorder.refuse(why)


@contextmanager
def recorded_by(recorder: SubmissionRecorder) -> Iterator[None]:
    before, _local.recorder = _local.recorder, recorder
    try:
        yield
    finally:
        _local.recorder = before


@contextmanager
def outside_recording() -> Iterator[None]:
    """A context for work that is done once and cached for later calls: it is not part of the recorded call."""
    if _local.recorder is None:
        yield
        return
    before, _local.recorder = _local.recorder, None
    try:
        with private.without_modes():
            yield
    finally:
        _local.recorder = before
