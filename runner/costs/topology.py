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

    def seconds(self, transfer: Transfer, rank: int, world: int, inside: Link) -> float:
        """Of a transfer to `rank`; what comes from its node and what comes from others arrive at the same time. inside: of this
        transfer's pattern within a node."""
        nodes, size = self.nodes(world), transfer.bytes
        if self.gpus is None or nodes == 1:
            return inside.seconds(size)
        if transfer.pattern in COLLECTIVE:
            # each node's NICs together bring what its ranks pass on to each other, and a message visits every node
            arriving = self.between.gb_s * (self.nics or self.gpus)
            latency_us = nodes * (inside.latency_us + self.between.latency_us)
            return Link(min(inside.gb_s, arriving), latency_us).seconds(size)
        far = [part for remote, part in transfer.sources if remote // self.gpus != rank // self.gpus]
        if not far:
            return inside.seconds(size)
        active = self.gpus  # of its node that receive from other nodes meanwhile
        if len(transfer.sources) == 1:
            # in a ring all ranks receive from as far away, so that of neighbours only those at the node's ends do
            distance = (rank - transfer.sources[0][0]) % world
            active = min(active, distance, world - distance)
        messages_s = (len(far) - 1) * self.message_us / 1e6
        return max(inside.seconds(size - sum(far)), self.shared(active).seconds(sum(far)) + messages_s)

    def shared(self, active: int) -> Link:
        """Between nodes, while so many GPUs of a node receive from others."""
        share = 1.0 if self.nics is None else min(1.0, self.nics / active)
        return Link(self.between.gb_s * share, self.between.latency_us)


ONE_NODE = Topology()
