"""What the all-to-all executor costs: the exchange of heads for sequence, and the ring of each part of the heads. Pure Python."""

from __future__ import annotations

from dataclasses import replace

from attention.executors import policy
from attention.executors.ring_costs import RingCosts
from attention.executors.timeline import Costs, Timeline, Transfer
from attention.geometry.counts import local_kv_heads
from attention.geometry.options import RingOptions


class AllToAllCosts(Costs[RingOptions]):
    """`problem.ulysses` ranks form a group. Each of them has a share of the heads over the group's tokens, in some parts."""

    @property
    def tokens(self) -> int:
        """Of a rank, as its tensors come in."""
        return self.problem.cu_seqlens[-1] // self.problem.ranks

    @property
    def parts(self) -> int:
        if self.problem.ulysses == 1:
            return 1  # it is the ring's call
        group = self.tokens * self.problem.ulysses
        return policy.exchange_parts(self.options.head_parts, self.shapes.kv_heads, self.problem.ulysses, group)

    def _ring(self, parts: int = 1) -> RingCosts:
        """The ring of a part of this rank's share of the heads."""
        heads, kv_heads = self.shapes.heads // self.problem.ulysses, local_kv_heads(self.problem, self.shapes)
        share = replace(self.shapes, heads=heads // parts, kv_heads=kv_heads // parts)
        return RingCosts(self.problem, share, self.options, self.pulls, self.packed)

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        """On the way in this rank's heads of the others' tokens, on the way back its tokens of the others' heads."""
        share = self._ring()
        others = self.tokens * (self.problem.ulysses - 1)
        qkv, out = others * (share.shapes.q_token + share.shapes.kv_token), others * share.shapes.out_token
        found = {"dout": out, "dqkv": qkv} if backward else {"qkv": qkv, "out": out}
        return found | share.bytes_received(rank, backward)

    def pass_peak(self, rank: int, backward: bool) -> int:
        if self.problem.ulysses == 1:
            return self._ring().pass_peak(rank, backward)
        ring, shapes, n, ranks = self._ring(), self.shapes, self.parts, self.problem.ulysses
        repeated = ring.shapes.kv_heads * ranks // shapes.kv_heads  # ranks that have the same KV head
        qkv, out_token = ring.shapes.q_token + ring.shapes.kv_token, ring.shapes.out_token
        lse, group = shapes.batch * shapes.heads * 4 // ranks, self.tokens * ranks
        saved, out = group * qkv, group * (out_token + lse)  # all parts, as they are computed
        results = self.tokens * shapes.out_token
        slots = group * qkv + 2 * group * out_token // n  # of q, k and v, and two of out
        if not backward:
            rest = ring.pass_peak(rank, False) - out
            return saved + out + results + slots + rest // n
        results += self.tokens * (shapes.q_token + shapes.kv_token * (1 + (repeated if repeated > 1 else 0)))
        slots += group * out_token + 2 * group * qkv // n  # of dout, and two of dq, dk and dv
        arriving = min(2, n) * group * out_token // n
        rest = ring.pass_peak(rank, True) - out - group * qkv  # which lie in the slots
        return saved + out + results + slots + arriving + rest // n

    def timeline(self, rank: int, backward: bool) -> Timeline:
        """The ring's for each part; the first part's way in and the last one's way back are exposed."""
        n, received = self.parts, self.bytes_received(rank, backward)
        ring = self._ring(n).timeline(rank, backward)
        if self.problem.ulysses == 1:
            return ring
        there, back = ("dout", "dqkv") if backward else ("qkv", "out")
        first, *others = ring.steps
        first = replace(first, incoming=(*first.incoming, self._exchange(rank, received[there] / n)))
        *others, last = [first, *others]
        steps = [*others, replace(last, outgoing=(*last.outgoing, self._exchange(rank, received[back] / n)))]
        # kernels put what moves in its place, which costs the CPU as much as a third exchange
        return Timeline(tuple(steps * n), (), n * ring.merged, n * ring.merges, n * (ring.exchanges + 3))

    def _exchange(self, rank: int, size: float) -> Transfer:
        """From the other ranks of the group, as much from each."""
        ranks = self.problem.ulysses
        first = rank // ranks * ranks
        sources = tuple((remote, size / (ranks - 1)) for remote in range(first, first + ranks) if remote != rank)
        return Transfer("all", size, sources)
