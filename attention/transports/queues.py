"""Queues on which transfers run beside the compute, in program order: a thread for CPU tensors, a stream for CUDA
tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.agreement import Calls
from attention.gpu.streams import Follow, On, capturing, current
from attention.profiling import phase
from attention.transports.interface import Handle

Work = Callable[[], object]
Moment = torch.cuda.Event


@dataclass(eq=False)
class QueuedWork(Handle):
    """Work that was started on a queue, as a handle. It keeps the tensors of the work on a stream alive until the wait,
    because PyTorch's allocator knows only the caller's stream."""

    queue: Queue
    started: Any
    what: str
    step: int
    after: Work | None
    tensors: Sequence[Tensor] = ()

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            self.queue.wait(self.started)
        self.tensors = ()
        self.queue.check(self.started)
        after, self.after = self.after, None
        if after is not None:
            after()

    def __del__(self) -> None:
        if self.tensors:  # an exception prevented the wait, and their memory is about to be reused
            self.queue.wait(self.started)


class HostQueue:
    """One thread, so that transfers run beside the compute and their duration can be measured."""

    calls = Calls()  # in which its work is waited for
    captured = False  # whether a CUDA graph contains its work

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transport")
        self.pending: list[Future[object]] = []  # by `then`, in order, until what they raised is raised

    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> QueuedWork:
        """Starts `run`, which uses `tensors`, after all earlier work of the caller (with `since`: after its work before that
        moment). `after` is called at the end of the handle's `wait`."""
        self.join()
        return QueuedWork(self, self._submit(run), what, step, after)

    def _submit(self, run: Work) -> Future[object]:
        """In the caller's mode: outside of inference mode no thread may write into its tensors."""
        if torch.is_inference_mode_enabled():
            run = torch.inference_mode()(run)
        return self.thread.submit(run)

    def wait(self, started: Future[object]) -> None:
        self.calls.wait(started)

    def check(self, started: Future[object]) -> None:
        """Raises what the work raised."""
        self.join()  # raises an earlier failure first, which may be the cause
        started.result()

    def moment(self) -> Moment | None:
        """The current point in the caller's work, for `since`; None on a CPU."""

    def then(self, run: Work) -> None:
        """Starts `run` after all issued work; it waits for nothing else. If it raises, the next `issue`, `join` or wait
        for a handle raises."""
        self.pending.append(self._submit(run))

    def aside(self, run: Work) -> None:
        """Starts a small `run` after all earlier work of the caller; later work need not wait for it."""
        run()

    def settle(self) -> None:
        """In a capture: the caller's next work waits for the work that `aside` started."""

    def join(self) -> None:
        """In a capture: the graph includes all work that was started here."""
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()


class CudaQueue:
    """A background stream that first waits for the caller's stream, which writes the data. In captures, work by `aside` runs
    on a second stream.

    `captured` says whether a CUDA graph contains transfers of the group. Replays of the graph run on the caller's stream and
    use the same flags as eager calls. So after the first capture, the stream and the caller's stream wait for each other."""

    calls = Calls()
    captured = False

    def __init__(self, device: torch.device):
        self.stream, self.device = torch.cuda.Stream(device), device
        self.on, self.follow = On(self.stream), Follow()
        self.spare: list[torch.cuda.Event] = []  # events of finished transfers, for reuse
        self.beside: torch.cuda.Stream | None = None

    def issue(
        self,
        run: Work,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Work | None = None,
        since: Moment | None = None,
    ) -> QueuedWork:
        if since is None:
            self.follow(self.stream, current(self.device))
        else:
            self.stream.wait_event(since)
        with self.on:
            run()
        done = self.stream.record_event(self.spare.pop() if self.spare else None)
        return QueuedWork(self, [done], what, step, after, list(tensors))

    def wait(self, started: list[torch.cuda.Event]) -> None:
        if started:
            done = started.pop()
            current(self.device).wait_event(done)
            self.spare.append(done)  # the wait is enqueued, so the event may be reused

    def check(self, started: list[torch.cuda.Event]) -> None: ...

    def moment(self) -> Moment:
        return current(self.device).record_event()

    def then(self, run: Work) -> None:
        within = capturing(self.device)
        self.captured |= within
        if self.captured and not (within and _captured(self.stream)):
            self.follow(self.stream, current(self.device))
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
        if self.captured and (not capturing(self.device) or _captured(self.stream)):
            self.follow(current(self.device), self.stream)
        self.settle()


Queue = HostQueue | CudaQueue


def _captured(stream: torch.cuda.Stream) -> bool:
    with On(stream):
        return capturing(stream.device)
