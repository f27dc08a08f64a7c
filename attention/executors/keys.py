"""How keys and values reach a rank, and how their gradients return. Each rank publishes its local KV by head group, and pulls
the remote KV that it needs; the gradients go the other way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from attention.batched_copy import copy_all, moves
from attention.executors.plan import Plan
from attention.executors.work import Work
from attention.geometry.intervals import length
from attention.profiling import phase
from attention.tensors import cut, empty_pair, empty_tokens
from attention.transports import Handle, Publication

KeyPair = tuple[Tensor, Tensor]  # keys and values


class Arriving:
    """Tensors that a transfer is writing; `wait` returns them. unpack: called once the transfer is done."""

    def __init__(self, tensors: Any, transfer: Handle | None, unpack: Callable[[], None] | None = None):
        self.tensors, self.transfer, self.unpack = tensors, transfer, unpack

    def wait(self) -> Any:
        if self.transfer is not None:
            self.transfer.wait()
        if self.unpack is not None:
            self.unpack()
            self.unpack = None  # frees the tensors that it reads
        return self.tensors


def one_by_one(pull: Callable[..., Arriving], rounds: Sequence[tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    """The numbers of each round, and the tensors that `pull` brought for them. Those of the next round travel meanwhile; drop the
    tensors before they are asked for, since they are held until then."""
    arriving = pull(*rounds[0])
    for number, numbers in enumerate(rounds, 1):
        tensors = arriving.wait()
        if number < len(rounds):
            arriving = pull(*rounds[number])
        yield *numbers, tensors


class LocalKeys:
    """This rank's keys and values (the local KV) by head group. Remote ranks can pull them until `close`."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, work: Work):
        self.plan, self.work = plan, work
        self.by_group: list[KeyPair] = [(cut(k, group.k), cut(v, group.k)) for group in work.groups]
        self.published: Publication | None = None
        if work.most is not None:
            tensors = [x for pair in self.by_group for x in pair]
            self.published = plan.transport.publish("kv", tensors, work.most, work.sent)

    def pull(self, g: int, i: int) -> Arriving:
        """Starts to bring the keys of step i for head group g."""
        pair, step = self.by_group[g], self.plan.steps[i]
        if not step.most:  # no rank pulls keys in this step
            return Arriving(pair, None)
        if self.published is None:
            return self._all_gathered(pair, i)
        keys = empty_pair(pair, step.n_keys)
        transfer = self.published.pull(self.work.pulls[g][i], keys, i)
        if local := self.work.moves[i].local:
            with phase("comp_place", i):
                copy_all(copy for x, into in zip(pair, keys, strict=True) for copy in moves(into, x, local))
        return Arriving(keys, transfer)

    def _all_gathered(self, pair: KeyPair, i: int) -> Arriving:
        plan, (k, v) = self.plan, pair
        keys = [empty_tokens(x, plan.steps[i].n_keys) for x in pair]
        alike = k.shape[-1] == v.shape[-1]
        both = torch.stack(pair) if alike else torch.cat(pair, -1)
        staged = both.new_empty((plan.problem.world, *both.shape))

        def unpack() -> None:
            with phase("comp_place", i):
                for shard, places in zip(staged, self.work.places, strict=True):
                    parts = shard.unbind() if alike else shard.split([k.shape[-1], v.shape[-1]], -1)
                    copy_all(copy for x, into in zip(parts, keys, strict=True) for copy in moves(into, x, places))

        return Arriving(keys, plan.transport.all_gather(staged, both, "kv", i), unpack)

    def close(self) -> None:
        if self.published is not None:
            self.published.close()


class GradReturn:
    """Exchanges the gradients of step i: this rank computes dk and dv of keys that it has pulled, and remote ranks compute dk
    and dv of this rank's keys.

    Fill `computed`, then call `start`: it publishes these gradients, and pulls the remote ranks' gradients of this rank's
    keys. `arrived` returns the latter. All ranks call both, in the same order.

    like: keys and values, for their heads and dtype. early: whether remote ranks' gradients may arrive while this rank still
    computes; then their buffers are allocated at once, else in `start`."""

    def __init__(self, plan: Plan, work: Work, i: int, like: KeyPair, early: bool):
        self.plan, self.i, self.like, self.early = plan, i, like, early
        self.messages, self.pieces = work.returns[i], work.moves[i].route.reversed.receives
        self.most, n = plan.steps[i].most, plan.steps[i].n_keys
        self.buffers = self._buffers() if early else list[KeyPair]()
        # in memory that the transport can read without a copy
        self.computed = plan.transport.buffers(
            "dkv", [(*x.shape[:-3], n, *x.shape[-2:]) for x in like], like[0], self.most
        )
        self.published: Publication | None = None  # kept: `computed` may be its memory
        self.transfer: Handle | None = None

    def _buffers(self) -> list[KeyPair]:
        return [empty_pair(self.like, length(piece.target)) for piece in self.pieces]

    def start(self) -> None:
        if not self.early:
            self.buffers = self._buffers()
        self.published = self.plan.transport.publish("dkv", self.computed, self.most)
        with closing(self.published):
            into = [x for pair in self.buffers for x in pair]
            self.transfer = self.published.pull(self.messages, into, self.i, early=self.early)

    def arrived(self) -> list[KeyPair]:
        """(dk, dv) from each remote rank."""
        assert self.transfer is not None
        self.transfer.wait()
        return self.buffers
