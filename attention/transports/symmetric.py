"""The transport that pulls. A rank publishes tensors in memory that remote ranks can read. Each rank copies
what it needs, when it needs it, with copy engines on a separate stream. So the multiprocessors stay free for compute,
and a rank waits only for ranks whose data it needs.

Publications of one kind use a ring of buffers ("slots"). By flags in the remote ranks' memory, a rank signals "ready" when its
publication is written, and "done" when it has read theirs. The rank that awaits a flag resets it. There are no growing
counters, so a call can be captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.batched_copy import copy_all, moves
from attention.geometry.mailbox import Mailbox
from attention.gpu import cuda_graphs
from attention.gpu.streams import CudaPriorityStream, Inline, PriorityStream, capturing, current
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.tensors import TOKENS
from attention.transports.collective import Collective
from attention.transports.fabric import (
    WORDS,
    Copy,
    CudaFabric,
    Fabric,
    HostFabric,
    Mailboxes,
    Operation,
    Shared,
    check_reach,
    together,
)
from attention.transports.interface import Handle, Message, Messages, Publication
from attention.transports.queues import CudaQueue, HostQueue, Moment, Queue

MOST_RINGS = 32  # kinds of publications: kv, dkv, ...
# the number of slots, for kinds that a call publishes again before remote ranks have read the last one; others have 1
DEPTHS = {"dkv": 2, "out": 2, "dqkv": 2}
MOST_SLOTS = 2
ALIGNMENT = 256
MOST_PITCH = 2**31 - 1  # bytes between the rows of a copy
MOST_VIEWS = 64  # of one memory that are cached
MOST_KNOWN = 8  # arrangements and layouts per `Messages` whose pulls are cached


@dataclass(frozen=True, eq=False)  # hashed by identity, since `arrange` keeps them
class Arrangement:
    """How the tensors of a publication lie in a slot. shapes: this rank's. padded: the shapes with space for as many tokens as
    any rank has. starts: the byte at which each tensor starts. size: bytes in all."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    padded: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    size: int


@lru_cache(maxsize=4096)
def arrange(shapes: tuple[tuple[int, ...], ...], tokens: int, dtype: torch.dtype) -> Arrangement:
    padded = tuple((*shape[:-3], tokens, *shape[-2:]) for shape in shapes)
    sizes = [-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in padded]
    *starts, size = accumulate(sizes, initial=0)
    return Arrangement(dtype, shapes, padded, tuple(starts), size)


@dataclass
class Flags:
    """The operations on the flags of one slot. A rank has two flags per remote rank, which the remote rank sets: "ready", its
    publication is written; "done", it has read this rank's publication (initially set)."""

    signal_ready: Operation  # signal all remote ranks
    await_ready: dict[int, Operation]  # await and reset, by remote rank
    signal_done: Operation
    await_done: Operation  # await and reset the flags of all remote ranks


class BufferPool:
    """The buffer rings of a group and device, shared by all functions over the group. For one thread at a time. No flag
    guards a rank's reads of its own publications. So its calls run one after another, even on several streams.

    A ring has the slots of one kind of publication, used in turn. All ranks use the slots in the same order and at the same
    offsets, so all ranks must make the same publications in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.device = device
        self.caller: torch.cuda.Stream | None = None  # of the last call
        cuda = device.type == "cuda"
        with together(group):  # the driver may be missing on a single rank
            self.fabric: Fabric = CudaFabric(group, device) if cuda else HostFabric(group, device)
            self.queue: Queue = CudaQueue(device) if cuda else HostQueue()
            self.priority_stream: PriorityStream = CudaPriorityStream(device) if cuda else Inline(apart=True)
        self.remote = self.fabric.remote
        self.flags: dict[str, list[Flags]] = {}  # by kind and slot
        self.turns: Counter[str] = Counter()  # by kind, the publications of this call
        self.filling: dict[str, _SlotPublication] = {}  # publications that have a slot but are not published yet
        self.mailboxes: Mailboxes | None = None
        self.memory: dict[str, Shared] = {}  # of rings, by kind, and of mailboxes
        self.captured: set[Shared] = set()  # memory whose addresses CUDA graphs contain
        with torch.inference_mode(False):  # used by calls of any mode, like all memory here
            flags = self.fabric.allocate(MOST_RINGS * MOST_SLOTS * 2 * self.remote.world * WORDS * 4)
            words = flags.by_rank[self.remote.rank].view(torch.int32)
            words.view(-1, 2, self.remote.world, WORDS)[:, 1, :, 0] = 1
        with together(group):
            self.fabric.use(flags)
        self.fabric.settle()

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds, including those that only CUDA graphs still use."""
        return sum(x.nbytes for x in self.captured.union(self.memory.values()))

    @torch.inference_mode(False)
    def allocate(self, what: str, size: int) -> Shared:
        """`size` bytes, instead of what it has for this kind. All ranks must call this. Raises RuntimeError if they ask for
        different sizes."""
        if capturing(self.device):
            raise RuntimeError(f"symmetric memory for {what!r} cannot grow in a capture: call once before it")
        self.fabric.settle()
        self.remote.alike(f"{size:,} bytes for {what}")
        self.memory.pop(what, None)  # free it before the larger one is allocated
        shared = self.memory[what] = self.fabric.allocate(size)
        return shared

    def _flags(self, what: str, ring: int, slot: int) -> Flags:
        """A slot has the flags "ready" of all ranks, then the flags "done". The word after a flag is the mark of a wait."""
        fabric, remote = self.fabric, self.remote
        first = 2 * remote.world * (MOST_SLOTS * ring + slot)
        ready, done = (range(WORDS * i, WORDS * (i + remote.world), WORDS) for i in (first, first + remote.world))
        return Flags(
            fabric.signalling(ready[remote.rank]),
            {other: fabric.awaiting({other: ready[other]}, f"to publish its {what}") for other in remote.others},
            fabric.signalling(done[remote.rank]),
            fabric.awaiting({other: done[other] for other in remote.others}, f"to be done with this rank's {what}"),
        )

    def ring(self, what: str, size: int) -> tuple[list[Flags], Shared]:
        """The flags of a kind's slots and the memory, for slots of at least `size` bytes. If it must grow, all ranks must call
        this."""
        if what not in self.flags:
            self.flags[what] = [self._flags(what, len(self.flags), slot) for slot in range(DEPTHS.get(what, 1))]
        flags, shared = self.flags[what], self.memory.get(what)
        if shared is None or size * len(flags) > shared.nbytes:
            # a decode's KV cache grows slowly: reallocate seldom
            grown = shared.nbytes // len(flags) * 5 // 4 // ALIGNMENT * ALIGNMENT if shared else 0
            del shared
            shared = self.allocate(what, max(size, grown) * len(flags))
        return flags, shared

    def mailboxes_for(self, pieces: int) -> Mailboxes:
        """Memory for at least so many pieces of partial results. If it must grow, all ranks must call this."""
        held = self.mailboxes
        if held is None or pieces > held.box.capacity:
            box = Mailbox.holding(self.remote.world, pieces)
            held = self.mailboxes = Mailboxes(box, self.allocate("partial results", 4 * box.numel), self.remote)
        if capturing(self.device):
            self.captured.add(held.shared)
        return held

    def begin(self) -> None:
        """Begins a forward or backward. It starts with the first slots, so that all ranks use the same, and runs after the
        previous call, even if that ran on another stream. If an exception left a publication unpublished, it is published
        now, so that remote ranks do not deadlock. Raises RuntimeError if a wait has failed before, with that wait's
        message."""
        self.remote.check()
        if capturing(self.device):
            if self.filling:
                raise RuntimeError("an earlier call raised an exception: call once more before a capture")
        elif self.device.index is not None:  # a GPU
            now = current(self.device)
            if self.caller is not None and self.caller.stream_id != now.stream_id:
                now.wait_stream(self.caller)
            self.caller = now
        self.turns.clear()
        while self.filling:
            _, left = self.filling.popitem()
            if not left.captured:  # a failed capture enqueued nothing
                self.queue.aside(left.flags.signal_ready)
                left.close()

    def release(self) -> None:
        self.mailboxes = None
        self.memory.clear()
        self.captured.clear()
        self.queue.captured = False  # the memory that the graphs use is gone


_pools: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, BufferPool | str]] = WeakKeyDictionary()


def pool_of(group: dist.ProcessGroup, device: torch.device) -> BufferPool | str:
    """The group's pool, or the reason why there is none, the same on every rank. Collective at the first call, which
    creates it."""
    made = _pools.setdefault(group, {})
    if device not in made:
        try:
            check_reach(group, device)
            made[device] = BufferPool(group, device)
        except RuntimeError as error:
            made[device] = f"no symmetric memory here: {str(error).splitlines()[0]}"
    return made[device]


def _all_pools() -> list[BufferPool]:
    return [pool for by_device in _pools.values() for pool in by_device.values() if isinstance(pool, BufferPool)]


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release() -> None:
    """Frees all symmetric memory; the next use allocates it again. All ranks of a group must call it."""
    _synchronize()
    cuda_graphs.forget()
    for pool in _all_pools():
        pool.release()


@contextmanager
def captures_undone() -> Iterator[None]:
    """At its end, the pools forget all captures that were made within this context."""
    before = {pool: (pool.queue.captured, set(pool.captured)) for pool in _all_pools()}
    try:
        yield
    finally:
        _synchronize()
        for pool in _all_pools():
            pool.queue.captured, pool.captured = before.get(pool, (False, set()))


def held_bytes() -> int:
    """Bytes of symmetric memory that this process holds, outside PyTorch's allocator."""
    return sum(pool.nbytes for pool in _all_pools())


class Symmetric(Collective):
    """Pulls publications; collective operations go through torch.distributed."""

    pulls = True

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool):
        super().__init__("symm", group, pool.queue)
        self.pool, self.priority_stream = pool, pool.priority_stream

    def begin(self) -> None:
        self.pool.begin()

    def buffers(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        published = _SlotPublication(self, what, shapes, like.dtype, tokens)
        published.taken = self.pool.queue.moment()
        return published.mine

    def publish(
        self, what: str, tensors: Sequence[Tensor], tokens: int | None = None, pulled: Intervals | None = None
    ) -> Publication:
        published = self.pool.filling.get(what)
        if published is None or [*map(id, tensors)] != [*map(id, published.mine)]:
            most = max(x.shape[TOKENS] for x in tensors) if tokens is None else tokens
            published = _SlotPublication(self, what, [x.shape for x in tensors], tensors[0].dtype, most)
            pairs = [*zip(published.mine, tensors, strict=True)]
            with phase(f"comp_stage_{what}"):
                if pulled is not None:
                    pairs = [pair for mine, x in pairs for pair in moves(mine, x, [(y, y) for y in pulled])]
                copy_all(pairs)
        del self.pool.filling[what]
        self.pool.queue.aside(published.flags.signal_ready)
        return published


class _SlotPublication(Publication):
    """A publication in its slot: tensors one after another, each with space for `tokens` tokens, so that they have the same
    offsets on every rank. `mine`: this rank's tensors, to be filled before publishing."""

    def __init__(
        self, transport: Symmetric, what: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, tokens: int
    ):
        self.transport, self.what, self.pool = transport, what, transport.pool
        self.arranged = arrange(tuple(map(tuple, shapes)), tokens, dtype)
        pool, (flags, self.shared) = self.pool, self.pool.ring(what, self.arranged.size)
        self.captured = capturing(pool.device)
        if self.captured:
            pool.captured.add(self.shared)
            pool.queue.settle()  # a graph runs branches in any order: the wait below must follow this rank's signals
        pool.turns[what] += 1
        slot = pool.turns[what] % len(flags)
        self.flags, self.at = flags[slot], slot * (self.shared.nbytes // len(flags))
        with phase(f"wait_room_{what}"):  # until remote ranks have read the slot's last content
            self.flags.await_done()
        self.unseen = list(pool.remote.others)  # whose "ready" was not awaited yet
        self.taken: Moment | None = None
        pool.filling[what] = self
        views, key = self.shared.views, (self.at, self.arranged)
        if key not in views:
            if len(views) >= MOST_VIEWS:
                views.clear()
            views[key] = self._mine()
        self.mine = views[key]

    @torch.inference_mode(False)
    def _mine(self) -> list[Tensor]:
        arranged = self.arranged
        slot = self.shared.by_rank[self.pool.remote.rank][self.at : self.at + arranged.size].view(arranged.dtype)
        return [
            slot[start // arranged.dtype.itemsize :][: prod(padded)].view(padded).narrow(TOKENS, 0, shape[TOKENS])
            for shape, padded, start in zip(arranged.shapes, arranged.padded, arranged.starts, strict=True)
        ]

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        if not messages.receives:
            return Handle()
        flags, fabric, unseen = self.flags, self.pool.fabric, self.unseen
        pulls, nbytes = self._pulls(messages, into)
        self.unseen = [remote for remote in unseen if remote not in pulls]
        self.transport.counted(self.what, nbytes)

        def run() -> None:
            targets = [x.data_ptr() for x in into]  # which this keeps alive
            for remote, copies in pulls.items():
                if remote in unseen:
                    flags.await_ready[remote]()
                with phase(f"comm_{self.what}", step):
                    fabric.copy(copies, targets, self.shared.addresses[remote] + self.at)

        return self.pool.queue.issue(run, into, self.what, step, since=self.taken if early else None)

    def _pulls(self, messages: Messages, into: Sequence[Tensor]) -> tuple[dict[int, list[Copy]], int]:
        """The copies from each remote rank, in the order of `Remote.others`, and their bytes. The messages keep them, for tensors
        that lie alike."""
        ends = [(x.data_ptr(), x.untyped_storage().data_ptr()) for x in into]
        # bytes from the tensor before, if both lie in one allocation, as the rows of one copy must
        apart = [0, *(b - a if same == there else 0 for (a, same), (b, there) in pairwise(ends))]
        strides = [x.stride() for x in into]
        key = self.arranged, *strides, *apart
        if key not in messages.known:
            if len(messages.known) >= MOST_KNOWN:
                messages.known.clear()
            copies = {
                remote: _copies([m for m in messages.receives if m.remote == remote], self.arranged, strides)
                for remote in self.pool.remote.others
            }
            nbytes = sum(x.width * x.rows for every in copies.values() for x in every)
            messages.known[key] = {remote: _paired(every, apart) for remote, every in copies.items() if every}, nbytes
        return messages.known[key]

    def close(self) -> None:
        """Signals "done" to remote ranks, after the pulls so far. First awaits and resets the "ready" flags of the ranks from
        which nothing was pulled."""
        flags, unseen = self.flags, self.unseen

        def run() -> None:
            for remote in unseen:
                flags.await_ready[remote]()
            flags.signal_done()

        self.pool.queue.then(run)


def _copies(messages: list[Message], arranged: Arrangement, strides: Sequence[tuple[int, ...]]) -> list[Copy]:
    """The copies that bring messages from one remote rank into tensors of these strides, by batch element and interval.
    Intervals that are adjacent at both ends are one copy."""
    copies: list[Copy] = []
    size = arranged.dtype.itemsize
    for message in messages:
        *batch, tokens, heads, head_dim = arranged.padded[message.tensor]
        *outer, pitch, _, _ = (size * stride for stride in strides[message.into])
        width = heads * head_dim * size  # of a token, whose heads are contiguous
        for element in range(prod(batch)):
            joined: Copy | None = None
            for (start, stop), (at, _) in zip(message.source, message.target, strict=True):
                target = element * sum(outer) + at * pitch
                source = arranged.starts[message.tensor] + (element * tokens + start) * width
                if joined and (target - joined.target, source - joined.source) == (
                    joined.rows * pitch,
                    joined.rows * width,
                ):
                    joined.rows += stop - start
                else:
                    joined = Copy(message.into, target, pitch, source, width, width, stop - start)
                    copies.append(joined)
    for x in copies:
        if x.target_pitch == x.width or x.rows == 1:
            x.width, x.rows = x.width * x.rows, 1
    return [x for x in copies if x.width * x.rows]


def _paired(copies: list[Copy], apart: Sequence[int]) -> list[Copy]:
    """Copies of the same tokens of two tensors, such as keys and values, are the two rows of one copy where the tensors lie in
    one allocation. apart: the bytes of each tensor from the one before, or 0."""
    paired: list[Copy] = []
    for x in sorted(copies, key=lambda x: (x.target, x.into)):
        first = paired[-1] if paired else x
        pitches = apart[x.into], x.source - first.source
        if (
            x.rows == first.rows == 1
            and (x.into, x.target, x.width) == (first.into + 1, first.target, first.width)
            and x.width <= min(pitches)
            and max(pitches) <= MOST_PITCH
        ):
            first.target_pitch, first.source_pitch, first.rows = *pitches, 2
        else:
            paired.append(x)
    return paired
