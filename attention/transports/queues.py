"""Where transfers run beside the compute: a thread for CPU tensors, a stream for CUDA tensors. Both carry what they are
given in program order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as finished
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from attention.profiling import phase
from attention.runtime.streams import Follow, On, capturing, current, record, wait
from attention.transports.interface import Handle

Work = Callable[[], object]
Moment = torch.cuda.Event


class Queue(Protocol):
    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> Handle:
        """Start `run`, which uses `tensors`, behind all that the caller has done, or had at the moment `since`; `after` is done by
        whoever waits, once it is over."""

    def moment(self) -> Moment | None:
        """Now, for the caller."""

    def then(self, run: Work) -> None:
        """`run` follows what was issued, and waits for nothing else. What it raises is raised by the next `issue`, `join` or
        wait for a handle."""

    def aside(self, run: Work) -> None:
        """`run`, which is small, follows what the caller has done; nothing has to wait for it."""

    def settle(self) -> None:
        """In a CUDA graph that is being captured, what the caller does next follows what was aside."""

    def join(self) -> None:
        """Let a CUDA graph that is being captured hold all that was issued, or aside."""


class HostQueue:
    """One thread, so that transfers run beside the compute and their true duration is seen there."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transport")
        self.failed: Future[object] | None = None  # the first without a handle that failed, until that was raised

    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> Handle:
        self.join()
        return _HostHandle(self, self.thread.submit(run), what, step, after)

    def moment(self) -> None:
        return None

    def then(self, run: Work) -> None:
        self.thread.submit(run).add_done_callback(self._done)

    def _done(self, future: Future[object]) -> None:
        if future.exception() is not None and self.failed is None:
            self.failed = future

    def aside(self, run: Work) -> None:
        run()

    def settle(self) -> None: ...

    def join(self) -> None:
        if self.failed is not None:
            failed, self.failed = self.failed, None
            failed.result()


class _HostHandle:
    def __init__(self, queue: HostQueue, future: Future[object], what: str, step: int, after: Work | None):
        self.queue, self.future, self.what, self.step, self.after = queue, future, what, step, after

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            finished([self.future])
        self.queue.join()  # what failed before it may be why it failed
        self.future.result()
        if self.after is not None:
            self.after()
            self.after = None


class CudaQueue:
    """A stream of its own, which waits for the caller's stream first (what is sent must be there) and is waited for by
    `Handle.wait`; in captures another one for what is aside."""

    def __init__(self, device: torch.device, captures: Captures | None = None):
        self.stream, self.device = torch.cuda.Stream(device), device
        self.on, self.follow = On(self.stream), Follow()
        self.captures = captures or Captures()
        self.spare: list[torch.cuda.Event] = []  # of handles that were waited for
        self.beside: torch.cuda.Stream | None = None

    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> Handle:
        if since is None:
            self.follow(self.stream, current(self.device))
        else:
            wait(self.stream, since)
        with self.on:
            run()
        done = self.spare.pop() if self.spare else torch.cuda.Event()
        record(done, self.stream)
        return _CudaHandle(self, done, list(tensors), what, step, after)

    def moment(self) -> Moment:
        event = torch.cuda.Event()
        record(event, current(self.device))
        return event

    def then(self, run: Work) -> None:
        self.captures.enter(self.stream)
        with self.on:
            run()

    def aside(self, run: Work) -> None:
        # Launched by a host it goes to the caller's stream: another one is two more calls of the host, for microseconds of the
        # GPU. A replay has nothing but the GPU's time.
        if not capturing(self.device):
            run()
            return
        if self.beside is None:
            self.beside = torch.cuda.Stream(self.device)
        self.beside.wait_stream(current(self.device))
        with On(self.beside):
            run()

    def settle(self) -> None:
        if self.beside is not None and capturing(self.device) and _captured(self.beside):
            current(self.device).wait_stream(self.beside)

    def join(self) -> None:
        self.captures.leave(self.stream)
        self.settle()


class _CudaHandle:
    """Holds the tensors until they were waited for: the allocator knows only the caller's stream."""

    def __init__(
        self,
        queue: CudaQueue,
        done: torch.cuda.Event,
        tensors: list[Tensor],
        what: str,
        step: int,
        after: Work | None,
    ):
        self.queue, self.tensors = queue, tensors
        self.done: torch.cuda.Event | None = done
        self.what, self.step, self.after = what, step, after

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            self._follow()
        self.tensors = []
        if self.after is not None:
            self.after()
            self.after = None

    def __del__(self) -> None:
        if self.tensors:  # never waited for: an exception came between, and their memory is about to be someone else's
            self._follow()

    def _follow(self) -> None:
        if self.done is not None:
            wait(current(self.queue.device), self.done)
            self.queue.spare.append(self.done)  # the wait holds on to what the event stood for
            self.done = None


class Captures:
    """Whether a CUDA graph holds any of a group's transfers. Its replays run on the stream that they are replayed on, and take
    and set the same flags as calls do; so from then on every stream of the transport follows the caller's, and is followed
    by it."""

    def __init__(self) -> None:
        self.some = False

    @cached_property
    def follow(self) -> Follow:
        """Made where it is first needed: on a CPU there are no events."""
        return Follow()

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Before `stream` does anything."""
        if capturing(stream.device):
            self.some = True
            if _captured(stream):
                return
        if self.some:
            self.follow(stream, current(stream.device))

    def leave(self, stream: torch.cuda.Stream) -> None:
        """At the end of a pass."""
        if self.some and (not capturing(stream.device) or _captured(stream)):
            self.follow(current(stream.device), stream)


def _captured(stream: torch.cuda.Stream) -> bool:
    with On(stream):
        return capturing(stream.device)
