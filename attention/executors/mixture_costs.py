"""What the mixture executor costs: what its components cost, and what they are combined in. Pure Python."""

from __future__ import annotations

from typing import Any

from attention.executors.gather_costs import GatherCosts
from attention.executors.ring_costs import RingCosts
from attention.executors.timeline import Costs, Timeline
from attention.geometry.counts import Shapes, mixed
from attention.geometry.mixtures import Component, Meeting, Mixture, meeting
from attention.geometry.options import MixtureOptions


class MixtureCosts(Costs[MixtureOptions]):
    @property
    def tokens(self) -> int:
        """Of a rank's shard."""
        return self.problem.cu_seqlens[-1] // (1 if self.problem.layout.replicated else self.problem.world)

    @property
    def _components(self) -> list[tuple[Component, Shapes]]:
        return mixed(self.problem, self.shapes)

    def _costs(self, c: Component, shapes: Shapes) -> Costs[Any]:
        """A component's own: of a local call, or of a gather."""
        kind: type[Costs[Any]] = RingCosts if c.local else GatherCosts
        return kind(c.problem, shapes, self.options, self.pulls)

    def _meeting(self, of_keys: bool) -> Meeting:
        heads = self.shapes.kv_heads if of_keys else self.shapes.heads
        return meeting(tuple(c for c, _ in self._components), of_keys, heads, self.tokens)

    @property
    def _groups(self) -> int:
        """By what a result is divided."""
        mixture = self.problem.schedule
        assert isinstance(mixture, Mixture)
        return len(mixture.pairs) if mixture.mixing == "head_groups" else 1

    @property
    def _detached(self) -> bool:
        return self.options.weights == "detached"

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        found = {"kv": 0, "dkv": 0} if backward else {"kv": 0}
        for c, shapes in self._components:
            for what, size in self._costs(c, shapes).bytes_received(c.place(rank), backward).items():
                found[what] += size
        return found

    def _sum_bytes(self, size: int, of_keys: bool) -> int:
        """A sum or merge of `size` bytes in the dtype of the tensors: with its accumulator where more than two parts meet."""
        wide = self._meeting(of_keys).most > 2 and self.shapes.itemsize < 4
        return size + (size * 4 // self.shapes.itemsize if wide else 0)

    def _direct(self, i: int, of_keys: bool, forward: bool) -> bool:
        """Whether component i writes its part of a result in place."""
        found = self._meeting(of_keys)
        narrow = found.most <= 2 or self.shapes.itemsize >= 4
        return found.fresh[i] and narrow and not self.options.copies and not (forward and self._detached)

    def pass_peak(self, rank: int, backward: bool) -> int:
        n, shapes = self.tokens, self.shapes
        lse = n * shapes.batch * shapes.heads * 4
        whole = n * shapes.out_token
        saved = lse + (self._own if self._detached else whole)
        divided = whole if self._groups > 1 or self._detached else 0
        if not backward:
            return self._sum_bytes(whole, False) + lse + (self._own if self._detached else 0) + max(
                divided, *(self._forward_scratch(i, c, of, rank, whole, lse) for i, (c, of) in enumerate(self._components))
            )  # fmt: skip
        grads = self._sum_bytes(n * shapes.q_token, False) + self._sum_bytes(n * shapes.kv_token, True)
        scratch = (self._backward_scratch(i, c, of, rank) for i, (c, of) in enumerate(self._components))
        return saved + divided + grads + max(scratch, default=0)

    @property
    def _own(self) -> int:
        """Bytes of the components' own out and LSE, which detached weights keep."""
        return sum(c.tokens // c.fold * (of.out_token + of.batch * of.heads * 4) for c, of in self._components)

    def _forward_scratch(self, i: int, c: Component, shapes: Shapes, rank: int, whole: int, lse: int) -> int:
        """Bytes of component i's forward beside the result."""
        peak = self._costs(c, shapes).pass_peak(c.place(rank), False)
        rows = c.tokens // c.fold
        if c.local and self._direct(i, False, True):
            peak -= rows * shapes.out_token
        if self._detached:
            peak -= rows * (shapes.out_token + shapes.batch * shapes.heads * 4)
        return peak + (rows * (shapes.q_token + shapes.kv_token) + whole + lse if self.options.copies else 0)

    def _backward_scratch(self, i: int, c: Component, shapes: Shapes, rank: int) -> int:
        """Bytes of component i's backward beside the sums. Its costs as a call of its own include out, which is here a view."""
        rows = c.tokens // c.fold
        peak = self._costs(c, shapes).pass_peak(c.place(rank), True) - rows * shapes.out_token
        if c.local and self._direct(i, False, False) and self._direct(i, True, False):
            peak -= rows * (shapes.q_token + shapes.kv_token)
        peak += rows * shapes.out_token if self._groups > 1 or self._detached else 0  # its share of dout
        if self.options.copies:  # its inputs, dout and out, and one gradient in full size
            peak += rows * (shapes.q_token + shapes.kv_token + 2 * shapes.out_token)
            peak += self.tokens * self.shapes.q_token
        return peak

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
