"""How ranks are connected: nodes of some GPUs, and the links between nodes. Ranks are numbered node by node. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.costs.links import Link

Pattern = Literal["one", "all", "gather", "reduce", "slots"]


@dataclass(frozen=True)
class Transfer:
    """Bytes that the rank receives: from `one` rank, from `all` at once, by an all-`gather`, in a `reduce` operation, or written by all
    into `slots` of its memory within a kernel. sources: (rank, bytes from it) of `one` and `all`."""

    pattern: Pattern
    bytes: float
    sources: tuple[tuple[int, float], ...] = ()


COLLECTIVE = ("gather", "reduce", "slots")  # patterns that pass through all ranks, as a ring of NCCL does


NEVER_USED = Link(1, 0)  # between nodes of a single one


@dataclass(frozen=True)
class Topology:
    """gpus: of a node; None: all ranks are in one. between: one way, of one NIC. nics: of a node, which its GPUs share; None: one a GPU.
    message_us: of each further message to another node in one exchange."""

    name: str = "one node"
    gpus: int | None = None
    between: Link = NEVER_USED
    nics: int | None = None
    message_us: float = 0.0

    def nodes(self, world: int) -> int:
        return 1 if self.gpus is None else -(-world // self.gpus)

    def in_node(self, world: int) -> int:
        """Ranks of a full node."""
        return world if self.gpus is None else min(world, self.gpus)

    def apart(self, a: int, b: int) -> bool:
        """Whether two ranks are in different nodes."""
        return self.gpus is not None and a // self.gpus != b // self.gpus

    def seconds(self, transfer: Transfer, rank: int, world: int, inside: Link) -> float:
        """Of a transfer to `rank`; what comes from its node and what comes from others arrive at the same time. inside: of this
        transfer's pattern within a node."""
        nodes = self.nodes(world)
        if nodes == 1:
            return inside.seconds(transfer.bytes)
        if transfer.pattern in COLLECTIVE:
            return self._through_all(inside, nodes).seconds(transfer.bytes)
        far = [(remote, size) for remote, size in transfer.sources if self.apart(rank, remote)]
        if not far:
            return inside.seconds(transfer.bytes)
        size = sum(size for _, size in far)
        link = self.shared(self._active(transfer, rank, world))
        arriving = link.seconds(size) + (len(far) - 1) * self.message_us / 1e6
        return max(inside.seconds(transfer.bytes - size), arriving)

    def _active(self, transfer: Transfer, rank: int, world: int) -> int:
        """GPUs of a node that receive from other nodes while `rank` does. In a ring all ranks receive from as far away, so that of
        neighbours only those at the node's ends do."""
        assert self.gpus is not None
        if len(transfer.sources) > 1:
            return self.gpus
        distance = (rank - transfer.sources[0][0]) % world
        return min(self.gpus, distance, world - distance)

    def shared(self, active: int) -> Link:
        """Between nodes, while so many GPUs of a node receive from others."""
        share = 1.0 if self.nics is None else min(1.0, self.nics / active)
        return Link(self.between.gb_s * share, self.between.latency_us)

    def _through_all(self, inside: Link, nodes: int) -> Link:
        """A collective's: each node's NICs together bring what its ranks pass on to each other, and a message visits every node."""
        assert self.gpus is not None
        arriving = self.between.gb_s * (self.nics or self.gpus)
        return Link(min(inside.gb_s, arriving), nodes * (inside.latency_us + self.between.latency_us))


ONE_NODE = Topology()
