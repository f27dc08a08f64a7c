"""How keys and values reach a rank: each rank publishes its local KV by head group, and pulls the remote KV that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from attention.executors.head_groups import HeadGroup
from attention.executors.plan import Plan
from attention.geometry.transfers import Route
from attention.tensors import empty_pair
from attention.transports import Handle, Publication

KeyPair = tuple[Tensor, Tensor]  # keys and values
T = TypeVar("T")


class Arriving(Generic[T]):
    """Tensors that a transfer is writing; `wait` returns them. unpack: called once the transfer is done."""

    def __init__(self, tensors: T, transfer: Handle | None, unpack: Callable[[], None] | None = None):
        self.tensors, self.transfer, self.unpack = tensors, transfer, unpack

    def wait(self) -> T:
        if self.transfer is not None:
            self.transfer.wait()
        if self.unpack is not None:
            self.unpack()
            self.unpack = None  # frees the tensors that it reads
        return self.tensors


class LocalKeys:
    """This rank's keys and values (the local KV) by head group. With `publish` remote ranks can pull them, until `close`.

    most: the largest number of tokens that any rank publishes, by default this rank's."""

    def __init__(
        self, k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup], publish: bool, most: int | None = None
    ):
        self.plan = plan
        self.by_group: list[KeyPair] = [(group.keys(k), group.keys(v)) for group in groups]
        self.published: Publication | None = None
        if publish:
            self.published = plan.transport.publish("kv", [x for pair in self.by_group for x in pair], most)

    def pull(self, route: Route, group: int, number: int, tokens: int | None) -> Arriving[KeyPair]:
        """Starts to pull one head group's keys by a route, into new buffers of `tokens` tokens. tokens=None: this rank
        pulls nothing and gets its local KV; remote ranks may still pull from it. number: the step of this transfer in the
        recorded phases."""
        local = self.by_group[group]
        keys = local if tokens is None else empty_pair(local, tokens)
        assert self.published is not None
        return Arriving(keys, self.published.pull(self.plan.messages(route, first=2 * group), keys, number))

    def close(self) -> None:
        if self.published is not None:
            self.published.close()
