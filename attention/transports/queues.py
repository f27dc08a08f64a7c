"""Queues on which transfers run beside the compute, in program order: a thread for CPU tensors, a stream for CUDA
tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from attention.agreement import Calls
from attention.gpu.streams import Follow, On, capturing, current
from attention.profiling import phase
from attention.transports.interface import Handle

Work = Callable[[], object]
Moment = torch.cuda.Event


class StartedTransfer(Protocol):
    """Work that was started on a queue."""

    def wait(self) -> None:
        """The caller's stream (on a CPU, the calling thread) waits for it."""

    def finish(self) -> None:
        """Called after `wait`. Raises what the work raised."""


class Queue:
    """A subclass says how work is started. On CUDA, `settle` and `join` have an effect only while a CUDA graph is captured."""

    calls = Calls()  # in which its work is waited for

    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> Handle:
        """Starts `run`, which uses `tensors`, after all earlier work of the caller (with `since`: after its work before that
        moment). `after` is called at the end of the handle's `wait`."""
        return _Handle(self.start(run, tensors, since), what, step, after)

    def start(self, run: Work, tensors: Sequence[Tensor], since: Moment | None) -> StartedTransfer:
        """As in `issue`."""
        raise NotImplementedError

    def moment(self) -> Moment | None:
        """The current point in the caller's work, for `since`; None on a CPU."""

    def then(self, run: Work) -> None:
        """Starts `run` after all issued work; it waits for nothing else. If it raises, the next `issue`, `join` or wait
        for a handle raises."""

    def aside(self, run: Work) -> None:
        """Starts a small `run` after all earlier work of the caller; later work need not wait for it."""
        run()

    def settle(self) -> None:
        """The caller's next work waits for the work that `aside` started."""

    def join(self) -> None:
        """The captured graph includes all work that was started here."""


class _Handle:
    def __init__(self, transfer: StartedTransfer, what: str, step: int, after: Work | None):
        self.transfer, self.what, self.step, self.after = transfer, what, step, after

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            self.transfer.wait()
        self.transfer.finish()
        if self.after is not None:
            self.after()
            self.after = None


class HostQueue(Queue):
    """One thread, so that transfers run beside the compute and their duration can be measured."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transport")
        self.failed: Future[object] | None = None  # the first failure of a `then`, until it is raised

    def start(self, run: Work, tensors: Sequence[Tensor], since: Moment | None) -> StartedTransfer:
        self.join()
        return _HostTransfer(self, self.thread.submit(run))

    def then(self, run: Work) -> None:
        self.thread.submit(run).add_done_callback(self._done)

    def _done(self, future: Future[object]) -> None:
        if future.exception() is not None and self.failed is None:
            self.failed = future

    def join(self) -> None:
        if self.failed is not None:
            failed, self.failed = self.failed, None
            failed.result()


class _HostTransfer:
    def __init__(self, queue: HostQueue, future: Future[object]):
        self.queue, self.future = queue, future

    def wait(self) -> None:
        self.queue.calls.wait(self.future)

    def finish(self) -> None:
        self.queue.join()  # raises an earlier failure first, which may be the cause
        self.future.result()


class CudaQueue(Queue):
    """A background stream that first waits for the caller's stream, which writes the data. In captures, work by `aside` runs
    on a second stream."""

    def __init__(self, device: torch.device, captures: Captures | None = None):
        self.stream, self.device = torch.cuda.Stream(device), device
        self.on, self.follow = On(self.stream), Follow()
        self.captures = captures or Captures()
        self.spare: list[torch.cuda.Event] = []  # events of finished transfers, for reuse
        self.beside: torch.cuda.Stream | None = None

    def start(self, run: Work, tensors: Sequence[Tensor], since: Moment | None) -> StartedTransfer:
        if since is None:
            self.follow(self.stream, current(self.device))
        else:
            self.stream.wait_event(since)
        with self.on:
            run()
        done = self.spare.pop() if self.spare else torch.cuda.Event()
        done.record(self.stream)
        return _CudaTransfer(self, done, list(tensors))

    def moment(self) -> Moment:
        event = torch.cuda.Event()
        event.record(current(self.device))
        return event

    def then(self, run: Work) -> None:
        self.captures.enter(self.stream)
        with self.on:
            run()

    def aside(self, run: Work) -> None:
        # Eager calls use the caller's stream: another stream would take two more driver calls, to save microseconds of GPU
        # time. In a CUDA graph, driver calls cost nothing.
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


class _CudaTransfer:
    """Keeps the tensors alive until the wait, because PyTorch's allocator knows only the caller's stream."""

    def __init__(self, queue: CudaQueue, done: torch.cuda.Event, tensors: list[Tensor]):
        self.queue, self.tensors = queue, tensors
        self.done: torch.cuda.Event | None = done

    def wait(self) -> None:
        if self.done is not None:
            current(self.queue.device).wait_event(self.done)
            self.queue.spare.append(self.done)  # the wait is enqueued, so the event may be reused
            self.done = None

    def finish(self) -> None:
        self.tensors = []

    def __del__(self) -> None:
        if self.tensors:  # an exception prevented the wait, and their memory is about to be reused
            self.wait()


class Captures:
    """Whether a CUDA graph contains transfers of a group. Replays of the graph run on the caller's stream and use the same
    flags as eager calls. So after the first capture, the transport's streams and the caller's stream wait for each other."""

    def __init__(self) -> None:
        self.some = False

    @cached_property
    def follow(self) -> Follow:
        """Created at first use: on a CPU there are no events."""
        return Follow()

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Called before `stream` does anything."""
        if capturing(stream.device):
            self.some = True
            if _captured(stream):
                return
        if self.some:
            self.follow(stream, current(stream.device))

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Called at the end of a forward or backward."""
        if self.some and (not capturing(stream.device) or _captured(stream)):
            self.follow(current(stream.device), stream)


def _captured(stream: torch.cuda.Stream) -> bool:
    with On(stream):
        return capturing(stream.device)
