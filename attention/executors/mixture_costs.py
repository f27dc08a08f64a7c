"""What the mixture executor costs: what its components cost, and what they are combined in. Pure Python."""

from __future__ import annotations

from typing import Any

from attention.executors.gather_costs import GatherCosts
from attention.executors.ring_costs import RingCosts
from attention.executors.timeline import Costs, Timeline
from attention.geometry.counts import Shapes, parts
from attention.geometry.options import RingOptions


class MixtureCosts(Costs[Any]):
    @property
    def tokens(self) -> int:
        """Of a rank's shard."""
        return self.problem.cu_seqlens[-1] // (1 if self.problem.layout.replicated else self.problem.world)

    @property
    def _components(self) -> list[tuple[Any, Shapes]]:
        return parts(self.problem, self.shapes)

    def _costs(self, c: Any, shapes: Shapes) -> Costs[Any]:
        """A component's own: of a local call, or of a gather."""
        if c.local:
            return RingCosts(c.problem, shapes, RingOptions(), self.pulls)
        return GatherCosts(c.problem, shapes, self.options, self.pulls)

    def _heads(self, of_keys: bool) -> list[Any]:
        return [c.kv if of_keys else c.q for c, _ in self._components]

    @property
    def _groups(self) -> int:
        """By what a result is divided."""
        pairs: Any = self.problem.schedule
        return len(pairs.pairs) if self.options.mixing == "head_groups" else 1

    @property
    def _detached(self) -> bool:
        return self.options.weights == "detached"

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        found = {"kv": 0, "dkv": 0} if backward else {"kv": 0}
        for c, shapes in self._components:
            for what, size in self._costs(c, shapes).bytes_received(c.place(rank), backward).items():
                found[what] += size
        return found

    def _upcast(self, of_keys: bool) -> bool:
        """Whether a sum or merge has an fp32 accumulator beside its result."""
        return any(x.earlier > 1 for x in self._heads(of_keys)) and self.shapes.itemsize < 4

    def _direct(self, i: int, of_keys: bool) -> bool:
        """Whether the kernel of component i writes its part of a result in place."""
        return self._heads(of_keys)[i].first and not self._upcast(of_keys) and not self.options.copies

    def pass_peak(self, rank: int, backward: bool) -> int:
        return self._backward_peak(rank) if backward else self._forward_peak(rank)

    def _forward_peak(self, rank: int) -> int:
        out, lse = self.tokens * self.shapes.out_token, self.tokens * self.shapes.batch * self.shapes.heads * 4
        upcast = self._upcast(False)
        result = (out * 4 // self.shapes.itemsize if upcast else out) + lse
        kept = peak = 0
        for i, (c, of) in enumerate(self._components):
            here = self._costs(c, of).pass_peak(c.place(rank), False)
            if c.local and self._direct(i, False) and not self._detached:
                here -= _rows(c) * of.out_token
            if self.options.copies:  # its inputs
                here += self._copied(c, of, of.q_token + of.kv_token)
            peak = max(peak, kept + here)
            kept += _own(c, of) if self._detached else 0
        return result + max(peak, kept + (out if upcast or self._groups > 1 else 0))

    def _backward_peak(self, rank: int) -> int:
        n, shapes = self.tokens, self.shapes
        saved = n * shapes.batch * shapes.heads * 4 + n * shapes.out_token * (2 if self._groups > 1 else 1)
        saved += sum(_own(c, of) for c, of in self._components) if self._detached else 0
        sums = rounded = 0
        for token, of_keys in ((shapes.q_token, False), (shapes.kv_token, True)):
            upcast = self._upcast(of_keys)
            sums += n * token * 4 // shapes.itemsize if upcast else n * token
            rounded += n * token if upcast else 0
        parts = (self._backward_part(i, c, of, rank) for i, (c, of) in enumerate(self._components))
        return saved + sums + max(rounded, *parts)

    def _backward_part(self, i: int, c: Any, shapes: Shapes, rank: int) -> int:
        """Bytes of component i's backward beside the sums. As a call of its own it would hold out, which is here a view."""
        out = _rows(c) * shapes.out_token
        peak = self._costs(c, shapes).pass_peak(c.place(rank), True) - out
        if c.local and self._direct(i, False) and self._direct(i, True):
            peak -= _rows(c) * (shapes.q_token + shapes.kv_token)
        if self.options.copies:  # its inputs with dout and out
            peak += self._copied(c, shapes, shapes.q_token + shapes.kv_token + 2 * shapes.out_token)
        if self._detached:  # its share of dout, computed in fp32
            return max(peak + out, out + out * 4 // self.shapes.itemsize)
        return peak

    def _copied(self, c: Any, shapes: Shapes, token: int) -> int:
        """Bytes of copies of a component's tokens; one with all tokens and heads needs none."""
        everything = c.tokens == self.tokens and c.heads == self.shapes.heads
        return 0 if everything else _rows(c) * token

    def timeline(self, rank: int, backward: bool) -> Timeline:
        parts = [self._costs(c, of).timeline(c.place(rank), backward) for c, of in self._components]
        combined = self.tokens * (self.shapes.q_token + self.shapes.kv_token if backward else self.shapes.out_token)
        merges = len(parts) * (3 if backward else 1)
        return Timeline(
            tuple(step for part in parts for step in part.steps),
            tuple(transfer for part in parts for transfer in part.exposed),
            sum(part.merged for part in parts) + 3.0 * combined,
            sum(part.merges for part in parts) + merges,
            sum(part.exchanges for part in parts),
        )


def _rows(c: Any) -> int:
    """Tokens of one of a component's segments: its shapes have the others as a batch."""
    return c.tokens // c.fold


def _own(c: Any, shapes: Shapes) -> int:
    """Bytes of a component's out and LSE."""
    return _rows(c) * (shapes.out_token + shapes.batch * shapes.heads * 4)
