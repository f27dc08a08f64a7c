"""The transport that pulls. A rank publishes tensors in memory that remote ranks can read. Each rank copies
what it needs, when it needs it, with copy engines on a separate stream. So the multiprocessors stay free for compute,
and a rank waits only for ranks whose data it needs.

Publications of one kind use a ring of buffers ("slots"). By flags in the remote ranks' memory, a rank signals "ready" when its
publication is written, and "done" when it has read theirs. The rank that awaits a flag resets it. There are no growing
counters, so a call can be captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.batched_copy import copy_all
from attention.geometry.transfers import Intervals
from attention.gpu import cuda_graphs
from attention.gpu.priority_stream import CudaPriorityStream, Inline, PriorityStream
from attention.gpu.streams import current
from attention.profiling import phase
from attention.tensors import TOKENS
from attention.transports.collective import Collective
from attention.transports.fabric import WORDS, CudaFabric, Fabric, HostFabric, Shared, obstacle, together
from attention.transports.interface import Done, Handle, Message, Messages, Publication
from attention.transports.mailboxes import mailboxes_bytes, release_mailboxes
from attention.transports.queues import Captures, CudaQueue, HostQueue, Moment, Queue

MOST_RINGS = 32  # kinds of publications: kv, dkv, ...
# the number of slots, for kinds that a call publishes again before remote ranks have read the last one; others have 1
DEPTHS = {"dkv": 2, "out": 2, "dqkv": 2}
MOST_SLOTS = max(DEPTHS.values())
ALIGNMENT = 256
MOST_ARRANGEMENTS = 64  # cached per ring
MOST_KNOWN = 8  # arrangements per `Messages` whose pulls are cached

Operation = Callable[[], None]


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
    sizes = [-(-prod(each) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for each in padded]
    starts = list(accumulate(sizes, initial=0))
    return Arrangement(dtype, shapes, padded, tuple(starts[:-1]), starts[-1])


@dataclass
class Flags:
    """The operations on the flags of one slot. A rank has two flags per remote rank, which the remote rank sets: "ready", its
    publication is written; "done", it has read this rank's publication (initially set)."""

    signal_ready: Operation  # signal all remote ranks
    await_ready: dict[int, Operation]  # await and reset, by remote rank
    signal_done: Operation
    await_done: Operation  # await and reset the flags of all remote ranks


class BufferRing:
    """The slots of one kind of publication, used in turn. All ranks use the slots in the same order and at the same offsets, so
    all ranks must make the same publications in the same order."""

    def __init__(self, flags: list[Flags]):
        self.flags = flags  # by slot
        self.turn = 0  # the slot of the last publication of this call
        self.capacity = 0
        self.shared = Shared([])
        self.mine: dict[tuple[int, Arrangement], list[Tensor]] = {}  # this rank's tensors in a slot, for reuse
        self.filling: _SlotPublication | None = None  # a publication that has a slot but is not published yet

    def forget(self) -> None:
        self.shared, self.capacity = Shared([]), 0
        self.mine.clear()


class BufferPool:
    """The buffer rings of a group and device, shared by all functions over the group. For one thread at a time. No flag
    guards a rank's reads of its own publications. So its calls run one after another, even on several streams."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_cuda = device.type == "cuda"
        self.device, self.captures = device, Captures()
        self.caller: torch.cuda.Stream | None = None  # of the last call
        self.fabric: Fabric
        self.queue: Queue
        self.priority_stream: PriorityStream
        with together(group):  # the driver may be missing on a single rank
            if device.type == "cuda":
                self.fabric = CudaFabric(group, device)
                self.queue = CudaQueue(device, self.captures)
                self.priority_stream = CudaPriorityStream(device)
            else:
                self.fabric, self.queue = HostFabric(group, device), HostQueue()
                self.priority_stream = Inline(apart=True)
        # each rank starts with the next rank, so at first no two ranks pull from the same one
        self.remote_ranks = [(self.rank + i) % self.world for i in range(1, self.world)]
        with torch.inference_mode(False):  # used by calls of any mode, like all memory here
            self.flags = self.fabric.allocate(MOST_RINGS * MOST_SLOTS * 2 * self.world * WORDS * 4)
        self._flags(self.rank)[:, :, 1].fill_(1)
        with together(group):
            self.fabric.watch(self.flags.by_rank[self.rank])
        self.fabric.settle()
        self.rings: dict[str, BufferRing] = {}
        self.captured: dict[int, Shared] = {}  # memory whose addresses CUDA graphs contain

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds, including those that only CUDA graphs still use."""
        now = {id(ring.shared) for ring in self.rings.values()}
        before = sum(x.by_rank[self.rank].numel() for key, x in self.captured.items() if key not in now)
        return before + sum(ring.capacity * len(ring.flags) for ring in self.rings.values())

    @torch.inference_mode(False)
    def _flags(self, rank: int) -> Tensor:
        """A rank's flags by ring, slot, kind (0 ready, 1 done) and remote rank. The word after each flag, the
        mark of a wait for it, is left out."""
        words = self.flags.by_rank[rank].view(torch.int32)
        return words.view(MOST_RINGS, MOST_SLOTS, 2, self.world, WORDS)[..., 0]

    def _slot_flags(self, what: str, ring: int, slot: int) -> Flags:
        every = [self._flags(rank)[ring][slot] for rank in range(self.world)]
        mine, fabric = every[self.rank], self.fabric
        return Flags(
            fabric.signalling([every[remote][0][self.rank] for remote in self.remote_ranks]),
            {
                remote: fabric.awaiting({remote: mine[0][remote]}, f"to publish its {what}")
                for remote in self.remote_ranks
            },
            fabric.signalling([every[remote][1][self.rank] for remote in self.remote_ranks]),
            fabric.awaiting(
                {remote: mine[1][remote] for remote in self.remote_ranks}, f"to be done with this rank's {what}"
            ),
        )

    def ring(self, what: str, size: int) -> BufferRing:
        """The buffer ring of a kind, with slots of at least `size` bytes. If it must grow, all ranks must call this. Raises
        RuntimeError if they ask for different sizes."""
        if what not in self.rings:
            n = len(self.rings)
            self.rings[what] = BufferRing([self._slot_flags(what, n, slot) for slot in range(DEPTHS.get(what, 1))])
        ring = self.rings[what]
        if size > ring.capacity:
            if self.capturing():
                raise RuntimeError(f"symmetric memory for {what!r} cannot grow in a capture: call once before it")
            size = max(size, ring.capacity * 5 // 4)  # a decode's KV cache grows slowly: reallocate seldom
            size = -(-size // ALIGNMENT) * ALIGNMENT
            self.fabric.settle()
            self.fabric.remote.alike(f"{size:,} bytes for {what}")
            ring.forget()  # free it before the larger one is allocated
            with torch.inference_mode(False):
                ring.shared = self.fabric.allocate(size * len(ring.flags))
            ring.capacity = size
        return ring

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.on_cuda and torch.cuda.is_current_stream_capturing()

    def filling(self, what: str) -> _SlotPublication | None:
        ring = self.rings.get(what)
        return ring.filling if ring else None

    def acquire(self, what: str, ring: BufferRing) -> int:
        """The slot of the next publication, free once remote ranks have read its last content."""
        ring.turn = (ring.turn + 1) % len(ring.flags)
        if self.capturing():
            self.captured[id(ring.shared)] = ring.shared
            self.queue.settle()  # a graph runs branches in any order: the wait below must follow this rank's signals
        with phase(f"wait_room_{what}"):
            ring.flags[ring.turn].await_done()
        return ring.turn

    def begin(self) -> None:
        """Begins a forward or backward. It starts with the first slots, so that all ranks use the same, and runs after the
        previous call, even if that ran on another stream. If an exception left a publication unpublished, it is published
        now, so that remote ranks do not deadlock. Raises RuntimeError if a wait has failed before, with that wait's
        message."""
        self.fabric.remote.check()
        for ring in self.rings.values():
            ring.turn = 0
        if self.on_cuda and not self.capturing():
            now = current(self.device)
            if self.caller is not None and self.caller.stream_id != now.stream_id:
                now.wait_stream(self.caller)
            self.caller = now
        left = [ring.filling for ring in self.rings.values() if ring.filling is not None]
        if not left:
            return
        if self.capturing():
            raise RuntimeError("an earlier call raised an exception: call once more before a capture")
        for ring in self.rings.values():
            ring.filling = None
        done = [each for each in left if not each.captured]  # a failed capture enqueued nothing
        for each in done:
            self.publish(each.flags)
        for each in done:
            each.close()

    def publish(self, flags: Flags) -> None:
        """Signals "ready" to remote ranks, after the caller's stream has written the publication."""
        self.queue.aside(flags.signal_ready)

    def finish(self, flags: Flags, unseen: Sequence[int]) -> None:
        """Signals "done" to remote ranks, after the pulls so far. First awaits and resets the "ready" flags of the `unseen`
        ranks, from which nothing was pulled."""

        def run() -> None:
            for remote in unseen:
                flags.await_ready[remote]()
            flags.signal_done()

        self.queue.then(run)

    def release(self) -> None:
        for ring in self.rings.values():
            ring.forget()
        self.captured.clear()
        self.captures.some = False  # the memory that the graphs use is gone


_pools: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, BufferPool | str]] = WeakKeyDictionary()


def pool_of(group: dist.ProcessGroup, device: torch.device) -> BufferPool | str:
    """The group's pool, or the reason why there is none, the same on every rank. Collective at the first call, which
    creates it."""
    made = _pools.setdefault(group, {})
    if device not in made:
        made[device] = obstacle(group, device) or _pool(group, device)
    return made[device]


def _pool(group: dist.ProcessGroup, device: torch.device) -> BufferPool | str:
    try:
        return BufferPool(group, device)
    except RuntimeError as error:
        return f"no symmetric memory here: {str(error).splitlines()[0]}"


def _all_pools() -> list[BufferPool]:
    return [pool for by_device in _pools.values() for pool in by_device.values() if isinstance(pool, BufferPool)]


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release() -> None:
    """Frees all symmetric memory; the next use allocates it again. All ranks of a group must call it."""
    _synchronize()
    cuda_graphs.forget()
    for pool in _all_pools():
        pool.release()
    release_mailboxes()


@contextmanager
def captures_undone() -> Iterator[None]:
    """At its end, the pools forget all captures that were made within this context."""
    before = {id(pool): (pool.captures.some, dict(pool.captured)) for pool in _all_pools()}
    try:
        yield
    finally:
        _synchronize()
        for pool in _all_pools():
            pool.captures.some, pool.captured = before.get(id(pool), (False, {}))


def held_bytes() -> int:
    """Bytes of symmetric memory that this process holds, outside PyTorch's allocator."""
    return sum(pool.nbytes for pool in _all_pools()) + mailboxes_bytes()


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

    def publish(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Publication:
        published = self.pool.filling(what)
        if published is None or list(map(id, tensors)) != list(map(id, published.mine)):
            most = max(x.shape[TOKENS] for x in tensors) if tokens is None else tokens
            published = _SlotPublication(self, what, [x.shape for x in tensors], tensors[0].dtype, most)
            with phase(f"comp_stage_{what}"):
                copy_all(zip(published.mine, tensors, strict=True))
        published.ring.filling = None
        self.pool.publish(published.flags)
        return published


class _SlotPublication:
    """A publication in its slot: tensors one after another, each with space for `tokens` tokens, so that they have the same
    offsets on every rank. `mine`: this rank's tensors, to be filled before publishing."""

    def __init__(
        self, transport: Symmetric, what: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, tokens: int
    ):
        self.transport, self.what = transport, what
        self.arranged = arrange(tuple(map(tuple, shapes)), tokens, dtype)
        pool = transport.pool
        self.ring = ring = pool.ring(what, self.arranged.size)
        slot = pool.acquire(what, ring)
        self.flags, self.shared, self.at = ring.flags[slot], ring.shared, slot * ring.capacity
        self.seen: set[int] = set()  # remote ranks whose "ready" was awaited
        self.taken: Moment | None = None
        self.captured = pool.capturing()
        ring.filling = self
        kept = slot, self.arranged
        if kept not in ring.mine:
            if len(ring.mine) >= MOST_ARRANGEMENTS:
                ring.mine.clear()
            ring.mine[kept] = self._mine()
        self.mine = ring.mine[kept]

    @torch.inference_mode(False)
    def _mine(self) -> list[Tensor]:
        held, arranged = self.shared.by_rank[self.transport.pool.rank], self.arranged
        found = []
        for shape, whole, start in zip(arranged.shapes, arranged.padded, arranged.starts, strict=True):
            first = self.at + start
            x = held[first : first + prod(whole) * arranged.dtype.itemsize].view(arranged.dtype).view(whole)
            found.append(x.narrow(TOKENS, 0, shape[-3]))
        return found

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        if not messages.receives:
            return Done()
        pool, transport, shared = self.transport.pool, self.transport, self.shared
        wanted = [(*each, each[0] not in self.seen) for each in self._pulls(messages)]
        self.seen.update(remote for remote, *_ in wanted)

        def run() -> None:
            for remote, pulls, first in wanted:
                if first:
                    self.flags.await_ready[remote]()
                with phase(f"comm_{self.what}", step):
                    for pull in pulls:
                        targets = [into[number] for number in pull.into]
                        for element, start, n, starts in pull.copies:
                            pool.fabric.copy(targets, element, start, n, shared, remote, [self.at + x for x in starts])
                        transport.counted(self.what, pull.nbytes)

        return pool.queue.issue(run, into, self.what, step, since=self.taken if early else None)

    def _pulls(self, messages: Messages) -> list[tuple[int, list[_Pull]]]:
        """The pulls from each remote rank, in the order of `BufferPool.remote_ranks`."""
        known: _Known | None = messages.known.get(id(self.arranged))
        if known is None:
            by_remote: dict[int, list[Message]] = {remote: [] for remote in self.transport.pool.remote_ranks}
            for message in messages.receives:
                by_remote[message.remote].append(message)
            pulls = [
                (remote, [_pull(alike, self.arranged) for alike in _alike(found, self.arranged)])
                for remote, found in by_remote.items()
                if found
            ]
            if len(messages.known) >= MOST_KNOWN:
                messages.known.clear()
            known = messages.known[id(self.arranged)] = _Known(self.arranged, pulls)
        return known.pulls

    def close(self) -> None:
        pool = self.transport.pool
        pool.finish(self.flags, [remote for remote in pool.remote_ranks if remote not in self.seen])


@dataclass(frozen=True)
class _Pull:
    """A pull of the same tokens from several published tensors of one shape.

    into: for each published tensor, the index of the receiver's tensor. copies: (batch element, first token in the target,
    number of tokens, and for each published tensor the byte of the slot at which its source starts)."""

    into: tuple[int, ...]
    copies: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    nbytes: int


@dataclass(frozen=True)
class _Known:
    """The pulls of some messages, for publications of one arrangement. It keeps the arrangement alive, because the cache
    is keyed by its `id`."""

    arranged: Arrangement
    pulls: list[tuple[int, list[_Pull]]]


def _pull(messages: list[Message], arranged: Arrangement) -> _Pull:
    """messages: from one remote rank, all of the same tokens."""
    shape = arranged.padded[messages[0].tensor]
    each = shape[-2] * shape[-1] * arranged.dtype.itemsize  # bytes of a token
    copies = []
    for element in range(shape[0] if len(shape) == 4 else 1):
        for source, target, n in stretches(messages[0].source, messages[0].target):
            skip = (element * shape[-3] + source) * each
            copies.append((element, target, n, tuple(arranged.starts[m.tensor] + skip for m in messages)))
    moved = sum(n * each * len(starts) for *_, n, starts in copies)
    return _Pull(tuple(m.into for m in messages), tuple(copies), moved)


def _alike(messages: list[Message], arranged: Arrangement) -> list[list[Message]]:
    """Groups of consecutive messages with the same tokens and shape."""

    def form(message: Message) -> object:
        return message.source, message.target, arranged.shapes[message.tensor][-2:]

    return [list(alike) for _, alike in groupby(messages, form)]


def stretches(source: Intervals, target: Intervals) -> tuple[tuple[int, int, int], ...]:
    """(source, target, tokens) of each pair of intervals; pairs that are adjacent at both ends are joined."""
    joined: list[tuple[int, int, int]] = []
    for (a, b), (c, _) in zip(source, target, strict=True):
        if joined and joined[-1][0] + joined[-1][2] == a and joined[-1][1] + joined[-1][2] == c:
            there, here, before = joined.pop()
            joined.append((there, here, before + b - a))
        else:
            joined.append((a, c, b - a))
    return tuple(joined)
