"""The transport that pulls. A rank publishes tensors in memory that remote ranks can read. Each rank copies
what it needs, when it needs it, with copy engines on a separate stream. So the multiprocessors stay free for compute,
and a rank waits only for ranks whose data it needs.

Publications of one kind use a ring of slots. A rank signals "ready" to the others when its publication is written, and "done" when
it has read theirs, by flags in their memory. The rank that waited for a flag resets it. No counter grows, so a call can
be captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.geometry.transfers import Intervals
from attention.profiling import phase
from attention.runtime import cuda_graphs
from attention.runtime.batched_copy import copy_all
from attention.runtime.priority_stream import CudaPriorityStream, Inline, PriorityStream
from attention.runtime.streams import current
from attention.runtime.submit import refuse_recording, submit
from attention.tensors import token_dim
from attention.transports.collective import Collective
from attention.transports.fabric import WORDS, CudaFabric, Fabric, HostFabric, Shared, obstacle, together
from attention.transports.interface import Done, Handle, Message, Messages, Publication
from attention.transports.mailboxes import mailboxes_bytes, release_mailboxes
from attention.transports.queues import Captures, CudaQueue, HostQueue, Moment, Queue

LANES = 32  # the most kinds of publications: kv, dkv, ...
# slots of the kinds that a call publishes again before remote ranks have read the last ones; other kinds have 1
DEPTHS = {"dkv": 2, "out": 2, "dqkv": 2}
MOST_SLOTS = max(DEPTHS.values())
ALIGNMENT = 256
MOST_ARRANGEMENTS = 64  # cached per lane
MOST_KNOWN = 8  # per `Messages`: arrangements whose pulls are cached

Operation = Callable[[], None]


@dataclass(frozen=True)
class Arrangement:
    """How the tensors of a publication lie in a slot. shapes: this rank's. padded: the same with space for the most tokens of
    any rank. starts: the byte at which each tensor starts. size: bytes in all."""

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
    """The operations on the flags of one slot. A rank has two flags per remote rank: its publication is ready; it is done
    with this rank's publication (initially set)."""

    tell_ready: Operation  # signal all remote ranks
    take_ready: dict[int, Operation]  # await and reset, by remote rank
    tell_done: Operation
    take_done: Operation  # await and reset those of all remote ranks


class Lane:
    """The ring of slots of one kind of publication. All ranks use the slots in the same order and at the same offsets, so all
    ranks must make the same publications in the same order."""

    def __init__(self, flags: list[Flags]):
        self.flags = flags  # by slot
        self.turn = 0  # the slot of the last publication of this call
        self.capacity = 0
        self.shared = Shared([])
        self.mine: dict[tuple[int, Arrangement], list[Tensor]] = {}  # this rank's tensors in a slot, for reuse
        self.filling: _SlotPublication | None = None  # has a slot, but is not published yet

    def forget(self) -> None:
        self.shared, self.capacity = Shared([]), 0
        self.mine.clear()


class Pool:
    """The lanes of a group and device, shared by all functions over the group. For one thread at a time. No flag
    guards a rank's reads of its own publications, so calls that it makes on several streams run one after another."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_cuda = device.type == "cuda"
        self.device, self.captures = device, Captures()
        self.caller: torch.cuda.Stream | None = None  # of the last call
        self.grown = 0  # changes when lanes get other memory
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
        # each rank starts with the next one, so no two pull from the same rank at first
        self.peers = [(self.rank + i) % self.world for i in range(1, self.world)]
        with torch.inference_mode(False):  # used by calls of any mode, like all memory here
            self.flags = self.fabric.allocate(LANES * MOST_SLOTS * 2 * self.world * WORDS * 4)
        self._flags(self.rank)[:, :, 1].fill_(1)
        with together(group):
            self.fabric.watch(self.flags.by_rank[self.rank])
        self.fabric.settle()
        self.lanes: dict[str, Lane] = {}
        self.captured: dict[int, Shared] = {}  # memory whose addresses CUDA graphs contain

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds, including those that only CUDA graphs still use."""
        now = {id(lane.shared) for lane in self.lanes.values()}
        before = sum(x.by_rank[self.rank].numel() for key, x in self.captured.items() if key not in now)
        return before + sum(lane.capacity * len(lane.flags) for lane in self.lanes.values())

    @torch.inference_mode(False)
    def _flags(self, rank: int) -> Tensor:
        """A rank's flags by lane, slot, kind (0 ready, 1 done) and remote rank. The word after each flag, the
        mark of a wait for it, is left out."""
        words = self.flags.by_rank[rank].view(torch.int32)
        return words.view(LANES, MOST_SLOTS, 2, self.world, WORDS)[..., 0]

    def _slot_flags(self, what: str, lane: int, slot: int) -> Flags:
        every = [self._flags(rank)[lane][slot] for rank in range(self.world)]
        mine, fabric = every[self.rank], self.fabric
        return Flags(
            fabric.signalling([every[peer][0][self.rank] for peer in self.peers]),
            {peer: fabric.taking({peer: mine[0][peer]}, f"to publish its {what}") for peer in self.peers},
            fabric.signalling([every[peer][1][self.rank] for peer in self.peers]),
            fabric.taking({peer: mine[1][peer] for peer in self.peers}, f"to be done with this rank's {what}"),
        )

    def lane(self, what: str, size: int) -> Lane:
        """The lane of that kind, with slots of at least `size` bytes. If it must grow, all ranks must call this. Raises
        RuntimeError if they ask for different sizes."""
        if what not in self.lanes:
            n = len(self.lanes)
            self.lanes[what] = Lane([self._slot_flags(what, n, slot) for slot in range(DEPTHS.get(what, 1))])
        lane = self.lanes[what]
        if size > lane.capacity:
            if self.capturing():
                raise RuntimeError(f"symmetric memory for {what!r} cannot grow in a capture: call once before it")
            size = max(size, lane.capacity * 5 // 4)  # so that a decode, whose keys grow slowly, seldom grows it
            refuse_recording("symmetric memory grew")
            size = -(-size // ALIGNMENT) * ALIGNMENT
            self.fabric.settle()
            self.fabric.remote.alike(f"{size:,} bytes for {what}")
            lane.forget()  # free it before the larger one is allocated
            self.grown += 1
            with torch.inference_mode(False):
                lane.shared = self.fabric.allocate(size * len(lane.flags))
            lane.capacity = size
        return lane

    def state(self) -> Hashable:
        """As `Transport.state`; None on a CPU."""
        return (self.grown, self.captures.some) if self.on_cuda else None

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.on_cuda and torch.cuda.is_current_stream_capturing()

    def filling(self, what: str) -> _SlotPublication | None:
        lane = self.lanes.get(what)
        return lane.filling if lane else None

    def acquire(self, what: str, lane: Lane) -> int:
        """The slot of the next publication, after remote ranks are done with its last content."""
        lane.turn = (lane.turn + 1) % len(lane.flags)
        if self.capturing():
            self.captured[id(lane.shared)] = lane.shared
            self.queue.settle()  # a graph runs its branches in any order: the wait below must follow this rank's signals
        with phase(f"wait_room_{what}"):
            lane.flags[lane.turn].take_done()
        return lane.turn

    def begin(self) -> None:
        """Begins a forward or backward. Every one starts with the same slots, so that all ranks agree, and runs after the
        one before it, even on another stream. If an exception left something unpublished, that is published now, so that
        remote ranks do not deadlock. Raises RuntimeError if a wait has failed before, with that wait's message."""
        self.fabric.remote.check()
        for lane in self.lanes.values():
            lane.turn = 0
        if self.on_cuda and not self.capturing():
            now = current(self.device)
            if self.caller is not None and self.caller.stream_id != now.stream_id:
                now.wait_stream(self.caller)
            self.caller = now
        left = [lane.filling for lane in self.lanes.values() if lane.filling is not None]
        if not left:
            return
        if self.capturing():
            raise RuntimeError("a call ended by an exception: call once more before a capture")
        for lane in self.lanes.values():
            lane.filling = None
        done = [each for each in left if not each.captured]  # a broken capture did nothing
        for each in done:
            self.publish(each.flags)
        for each in done:
            each.close()

    def publish(self, flags: Flags) -> None:
        """Signals "ready" to remote ranks, after the caller's stream has written the publication."""
        self.queue.aside(flags.tell_ready)

    def finish(self, flags: Flags, unseen: Sequence[int]) -> None:
        """Signals "done" to remote ranks, after the pulls so far. First awaits and resets the flags of the `unseen`
        ranks, from which nothing was pulled."""

        def run() -> None:
            for peer in unseen:
                flags.take_ready[peer]()
            flags.tell_done()

        self.queue.then(run)

    def release(self) -> None:
        for lane in self.lanes.values():
            lane.forget()
        self.grown += 1
        self.captured.clear()
        self.captures.some = False  # the memory in the graphs is gone


_pools: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Pool | str]] = WeakKeyDictionary()


def pool_of(group: dist.ProcessGroup, device: torch.device) -> Pool | str:
    """The group's pool, or the reason why there is none, the same on every rank. Collective at the first call, which
    creates it."""
    made = _pools.setdefault(group, {})
    if device not in made:
        made[device] = obstacle(group, device) or _pool(group, device)
    return made[device]


def _pool(group: dist.ProcessGroup, device: torch.device) -> Pool | str:
    try:
        return Pool(group, device)
    except RuntimeError as error:
        return f"no symmetric memory here: {str(error).splitlines()[0]}"


def _all_pools() -> list[Pool]:
    return [pool for by_device in _pools.values() for pool in by_device.values() if isinstance(pool, Pool)]


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
    """At the end of the context the pools forget all captures made in it."""
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

    def __init__(self, group: dist.ProcessGroup, pool: Pool):
        super().__init__("symm", group, pool.queue)
        self.pool, self.priority_stream = pool, pool.priority_stream

    def begin(self) -> None:
        submit(self.pool.begin)

    def state(self) -> Hashable:
        return self.pool.state()

    def buffers(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        published = _SlotPublication(self, what, shapes, like.dtype, tokens)
        published.taken = self.pool.queue.moment()
        return published.mine

    def publish(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Publication:
        published = self.pool.filling(what)
        if published is None or list(map(id, tensors)) != list(map(id, published.mine)):
            most = max(x.shape[token_dim(x)] for x in tensors) if tokens is None else tokens
            published = _SlotPublication(self, what, [x.shape for x in tensors], tensors[0].dtype, most)
            with phase(f"comp_stage_{what}"):
                copy_all(zip(published.mine, tensors, strict=True))
        published.lane.filling = None
        self.pool.publish(published.flags)
        return published


class _SlotPublication:
    """A publication in its slot: its tensors one after another, each with space for `tokens` tokens, so that they lie at the
    same offsets on every rank. `mine`: this rank's tensors, to be filled before publishing."""

    def __init__(
        self, transport: Symmetric, what: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, tokens: int
    ):
        self.transport, self.what = transport, what
        self.arranged = arrange(tuple(map(tuple, shapes)), tokens, dtype)
        pool = transport.pool
        self.lane = lane = pool.lane(what, self.arranged.size)
        slot = pool.acquire(what, lane)
        self.flags, self.shared, self.at = lane.flags[slot], lane.shared, slot * lane.capacity
        self.seen: set[int] = set()  # remote ranks whose "ready" was awaited
        self.taken: Moment | None = None
        self.captured = pool.capturing()
        lane.filling = self
        kept = slot, self.arranged
        if kept not in lane.mine:
            if len(lane.mine) >= MOST_ARRANGEMENTS:
                lane.mine.clear()
            lane.mine[kept] = self._mine()
        self.mine = lane.mine[kept]

    @torch.inference_mode(False)
    def _mine(self) -> list[Tensor]:
        held, arranged = self.shared.by_rank[self.transport.pool.rank], self.arranged
        found = []
        for shape, whole, start in zip(arranged.shapes, arranged.padded, arranged.starts, strict=True):
            first = self.at + start
            x = held[first : first + prod(whole) * arranged.dtype.itemsize].view(arranged.dtype).view(whole)
            found.append(x.narrow(token_dim(x), 0, shape[-3]))
        return found

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        if not messages.receives:
            return Done()
        pool, transport, shared = self.transport.pool, self.transport, self.shared
        wanted = [(*each, each[0] not in self.seen) for each in self._pulls(messages)]
        self.seen.update(peer for peer, *_ in wanted)

        def run() -> None:
            for peer, pulls, first in wanted:
                if first:
                    self.flags.take_ready[peer]()
                with phase(f"comm_{self.what}", step):
                    for pull in pulls:
                        targets = [into[number] for number in pull.into]
                        for element, start, n, starts in pull.copies:
                            pool.fabric.copy(targets, element, start, n, shared, peer, [self.at + x for x in starts])
                        transport.counted(self.what, pull.nbytes)

        return pool.queue.issue(run, into, self.what, step, since=self.taken if early else None)

    def _pulls(self, messages: Messages) -> list[tuple[int, list[_Pull]]]:
        """The pulls from each remote rank, in the order of `Pool.peers`."""
        known: _Known | None = messages.known.get(id(self.arranged))
        if known is None:
            by_peer: dict[int, list[Message]] = {peer: [] for peer in self.transport.pool.peers}
            for message in messages.receives:
                by_peer[message.peer].append(message)
            pulls = [
                (peer, [_pull(alike, self.arranged) for alike in _alike(found, self.arranged)])
                for peer, found in by_peer.items()
                if found
            ]
            if len(messages.known) >= MOST_KNOWN:
                messages.known.clear()
            known = messages.known[id(self.arranged)] = _Known(self.arranged, pulls)
        return known.pulls

    def close(self) -> None:
        pool = self.transport.pool
        pool.finish(self.flags, [peer for peer in pool.peers if peer not in self.seen])


@dataclass(frozen=True)
class _Pull:
    """A pull of the same tokens from several published tensors of one shape.

    into: for each of them, the index of the receiver's tensor. copies: (batch element, first token in the target, number
    of tokens, for each tensor the byte of the slot at which its source starts)."""

    into: tuple[int, ...]
    copies: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    nbytes: int


@dataclass(frozen=True)
class _Known:
    """The pulls of some messages, for publications of one arrangement. It keeps the arrangement alive, since the
    cache's key is its `id`."""

    arranged: Arrangement
    pulls: list[tuple[int, list[_Pull]]]


def _pull(messages: list[Message], arranged: Arrangement) -> _Pull:
    """messages: of one remote rank, of the same tokens."""
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
    """Runs of consecutive messages of the same tokens and shape."""

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
