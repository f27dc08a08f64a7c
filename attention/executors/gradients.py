"""How gradients of remote keys and values return to the ranks that own these keys."""

from __future__ import annotations

from contextlib import closing

from attention.executors.keys import KeyPair
from attention.executors.plan import Plan
from attention.geometry.intervals import length
from attention.geometry.transfers import Route
from attention.masks.band import Intervals
from attention.tensors import empty_pair
from attention.transports import Handle, Publication


class GradReturn:
    """Exchanges gradients: this rank computed dk and dv of keys that it had pulled, and remote ranks computed dk and dv of
    this rank's keys.

    Fill `computed`, then call `start`: it publishes these gradients, and pulls the remote ranks' gradients of this rank's
    keys. `arrived` returns the latter. All ranks call both, in the same order.

    route: the route that brought the keys; the gradients go the other way. like: keys and values, for their heads and
    dtype. tokens: the number of keys that this rank pulled; most: the largest number that any rank pulled. number: the step
    of this transfer in the recorded phases. early: whether remote ranks' gradients may arrive while this rank still
    computes; then their buffers are allocated at once, else in `start`."""

    def __init__(self, plan: Plan, route: Route, like: KeyPair, tokens: int, most: int, number: int, early: bool):
        self.plan, self.route, self.like = plan, route.reversed(), like
        self.most, self.number, self.early = most, number, early
        self.buffers = self._buffers() if early else list[KeyPair]()
        shapes = [(*x.shape[:-3], tokens, *x.shape[-2:]) for x in like]
        # in memory that the transport can read without a copy
        self.computed = plan.transport.buffers("dkv", shapes, like[0], most)
        self.published: Publication | None = None  # kept: `computed` may be its memory
        self.transfer: Handle | None = None

    def _buffers(self) -> list[KeyPair]:
        return [empty_pair(self.like, length(piece.target)) for piece in self.route.receives]

    def start(self) -> None:
        if not self.early:
            self.buffers = self._buffers()
        self.published = self.plan.transport.publish("dkv", self.computed, self.most)
        with closing(self.published):
            messages = self.plan.messages(self.route, apart=True)
            into = [x for pair in self.buffers for x in pair]
            self.transfer = self.published.pull(messages, into, self.number, early=self.early)

    def arrived(self) -> list[tuple[KeyPair, Intervals]]:
        """From each remote rank its (dk, dv), and which of this rank's keys they are for."""
        assert self.transfer is not None
        self.transfer.wait()
        return [(pair, piece.target) for pair, piece in zip(self.buffers, self.route.receives, strict=True)]
