"""Transports over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors. The owner sends what remote ranks
pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch import Tensor

from attention.agreement import Calls
from attention.geometry.intervals import length
from attention.gpu.private import backend, default_group
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.tensors import empty_tokens, put_, take
from attention.transports.interface import Handle, Message, Messages, Publication, Transport
from attention.transports.queues import Queue

OPERATIONS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class Collective(Transport):
    """`name` is the backend, "gloo" or "nccl"."""

    def __init__(self, name: str, group: dist.ProcessGroup | None, queue: Queue, note: str | None = None):
        super().__init__()
        self.name, self.note, self.group, self.queue = name, note, group, queue
        self.world = dist.get_world_size(group)
        self.backend = cache(lambda device: backend(group or default_group(), device))

    def follow(self, calls: Calls) -> None:
        self.calls = self.queue.calls = calls

    def join(self) -> None:
        self.queue.join()

    def publish(
        self, what: str, tensors: Sequence[Tensor], tokens: int | None = None, pulled: Intervals | None = None
    ) -> Publication:
        return _Sent(self, what, tensors)

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        self.counted(what, into[1:].nbytes)

        def run() -> None:
            with phase(f"comm_{what}", step):
                if self.backend(x.device) == "gloo":
                    dist.all_gather(list(into.unbind(0)), x, group=self.group)
                else:
                    dist.all_gather_into_tensor(into.flatten(0, 1) if x.dim() else into, x, group=self.group)

        return self.queue.issue(run, [into, x], what, step)

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        # bytes received per rank in a ring all-reduce, as nccl-tests counts
        self.counted(what, 2 * (self.world - 1) * x.nbytes // self.world)

        def run() -> None:
            with phase(f"comm_{what}", step):
                dist.all_reduce(x, OPERATIONS[op], group=self.group)

        return self.queue.issue(run, [x], what, step)


@dataclass
class _Sent(Publication):
    """A publication whose owner sends what remote ranks pull."""

    transport: Collective
    what: str
    tensors: Sequence[Tensor]

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        if not messages.sends and not messages.receives:
            return Handle()
        transport, what, tag = self.transport, self.what, self.transport.calls.tag
        outgoing = [(m.remote, take(self.tensors[m.tensor], m.source).contiguous()) for m in messages.sends]
        incoming: list[tuple[int, Tensor]] = []
        apart: list[tuple[Message, Tensor]] = []  # what cannot be received in place
        for m in messages.receives:
            place = take(into[m.into], m.target) if len(m.target) == 1 else None
            if place is None or not place.is_contiguous():
                place = empty_tokens(into[m.into], length(m.target))
                apart.append((m, place))
            incoming.append((m.remote, place))
        transport.counted(what, sum([x.nbytes for _, x in incoming]))

        def run() -> None:
            with phase(f"comm_{what}", step):
                started = dist.batch_isend_irecv([
                    dist.P2POp(op, x, group=transport.group, tag=tag, group_peer=remote)
                    for op, pieces in ((dist.irecv, incoming), (dist.isend, outgoing))
                    for remote, x in pieces
                ])  # fmt: skip
                for transfer in started:
                    transfer.wait()

        def put() -> None:
            with phase("comp_place", step):
                for message, x in apart:
                    put_(into[message.into], message.target, x)

        return transport.queue.issue(run, [x for _, x in (*outgoing, *incoming)], what, step, put if apart else None)
