"""Transports over torch.distributed. Every operation is started and hands back a `Handle`; `wait` makes the caller's
stream (on a CPU the caller) wait for it. The transfer itself is recorded as the phase `comm_*` where it runs, the
standing still as `wait_*` where that happens, so that the two are never confused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attention.phases import phase
from attention.transports.symmetric import Exchangeable, exchangeable

Message = tuple[int, Tensor]  # (rank in the group, contiguous tensor)


class Handle(Protocol):
    def wait(self) -> None: ...


class Transport(Protocol):
    name: str
    bytes_received: dict[str, int]  # by phase, what the operations really moved into this rank

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str, step: int) -> Handle:
        """Point to point: fills the receive tensors. `what` names the phases: `comm_<what>` and `wait_<what>`. Both
        ends list the messages between them in the same order."""

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        """into: `[world, *x.shape]`, contiguous; x: contiguous, the same shape on every rank."""

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        """In place over all ranks; op: "max" or "sum"."""


OPERATIONS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class _Done:
    def wait(self) -> None: ...


class Nothing:
    """A world of one: nothing ever moves."""

    name = "none"

    def __init__(self) -> None:
        self.bytes_received: dict[str, int] = {}

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str, step: int) -> Handle:
        assert not sends and not receives, "a world of one has no peers"
        return _Done()

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        into[0].copy_(x)
        return _Done()

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        return _Done()


def _count(counter: dict[str, int], what: str, tensors: Sequence[Tensor]) -> None:
    counter[what] = counter.get(what, 0) + sum(x.numel() * x.element_size() for x in tensors)


class Host:
    """CPU tensors. One thread carries all operations in program order, so that transfers run beside the compute and
    their true duration is seen there."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.name = "gloo"
        self.bytes_received: dict[str, int] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="transport")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str, step: int) -> Handle:
        if not sends and not receives:
            return _Done()
        _count(self.bytes_received, what, [x for _, x in receives])

        def run() -> None:
            with phase(f"comm_{what}", step):
                pending = [dist.irecv(_bytes(x), group=self.group, group_src=peer) for peer, x in receives]
                pending += [dist.isend(_bytes(x), group=self.group, group_dst=peer) for peer, x in sends]
                for work in pending:
                    if work is not None:
                        work.wait()

        return _HostHandle(self.thread.submit(run), what, step)

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        _count(self.bytes_received, what, [into[1:]])

        def run() -> None:
            with phase(f"comm_{what}", step):
                dist.all_gather([_bytes(row) for row in into.unbind(0)], _bytes(x), group=self.group)

        return _HostHandle(self.thread.submit(run), what, step)

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        _count_reduced(self.bytes_received, what, x, self.group)

        def run() -> None:
            with phase(f"comm_{what}", step):
                dist.all_reduce(x, OPERATIONS[op], group=self.group)

        return _HostHandle(self.thread.submit(run), what, step)


def _count_reduced(counter: dict[str, int], what: str, x: Tensor, group: dist.ProcessGroup | None) -> None:
    """What a rank receives in a ring all-reduce, nccl-tests' convention."""
    world = dist.get_world_size(group)
    counter[what] = counter.get(what, 0) + 2 * (world - 1) * x.numel() * x.element_size() // world


def _bytes(x: Tensor) -> Tensor:
    """Gloo moves bytes: a view works for every dtype."""
    return x.reshape(-1).view(torch.uint8)


class _HostHandle:
    def __init__(self, future: Future[None], what: str, step: int):
        self.future, self.what, self.step = future, what, step

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            self.future.result()


class Cuda:
    """CUDA tensors over NCCL. Operations are issued on a stream of their own, which waits for the caller's stream first
    (what is sent must be there) and is waited for by `Handle.wait`."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group = group
        self.name = "nccl"
        self.device = device
        self.bytes_received: dict[str, int] = {}
        self.stream = torch.cuda.Stream(device)
        self.symmetric_slots: dict[tuple[tuple[int, ...], torch.dtype], Exchangeable] = {}

    def symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> Exchangeable:
        """Slots of symmetric memory of that shape, made at the first call on all ranks and reused. Raises
        UnsupportedCall where there is none."""
        key = (shape, dtype)
        if key not in self.symmetric_slots:
            self.symmetric_slots[key] = exchangeable(
                shape, dtype, self.device, self.group or dist.distributed_c10d._get_default_group()
            )
        return self.symmetric_slots[key]

    def count(self, what: str, size: int) -> None:
        """Bytes that a kernel of ours reads from peers by itself."""
        self.bytes_received[what] = self.bytes_received.get(what, 0) + size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str, step: int) -> Handle:
        if not sends and not receives:
            return _Done()
        _count(self.bytes_received, what, [x for _, x in receives])

        def run() -> None:
            operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
            operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return self._issue(run, [x for _, x in (*sends, *receives)], what, step)

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        _count(self.bytes_received, what, [into[1:]])
        return self._issue(
            lambda: dist.all_gather_into_tensor(into.flatten(0, 1) if x.dim() else into, x, group=self.group),
            [into, x],
            what,
            step,
        )

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        _count_reduced(self.bytes_received, what, x, self.group)
        return self._issue(lambda: dist.all_reduce(x, OPERATIONS[op], group=self.group), [x], what, step)

    def _issue(self, run: Callable[[], object], tensors: list[Tensor], what: str, step: int) -> Handle:
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            with phase(f"comm_{what}", step):
                run()
            done = torch.cuda.Event()
            done.record()
        return _CudaHandle(done, tensors, what, step)


class _CudaHandle:
    """Holds the tensors until they were waited for: the allocator knows only the caller's stream."""

    def __init__(self, done: torch.cuda.Event, tensors: list[Tensor], what: str, step: int):
        self.done, self.tensors, self.what, self.step = done, tensors, what, step

    def wait(self) -> None:
        with phase(f"wait_{self.what}", self.step):
            torch.cuda.current_stream().wait_event(self.done)
        self.tensors = []
