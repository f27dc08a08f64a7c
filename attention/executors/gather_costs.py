"""What the gather executor costs. Pure Python."""

from __future__ import annotations

from dataclasses import replace

from attention.executors import policy
from attention.executors.ring_costs import copied_bytes
from attention.executors.timeline import (
    Costs,
    TimedStep,
    Timeline,
    Transfer,
    Work,
    from_ranks,
    heads_of,
    place_work,
    received,
    returned,
    timed,
)
from attention.geometry.counts import Shapes
from attention.geometry.layouts import size
from attention.geometry.options import GatherOptions
from attention.geometry.schedules import Problem, length, most_keys, steps, union
from attention.geometry.transfers import gather_move, move, overlaps


def kv_bytes_read(problem: Problem, shapes: Shapes, rank: int, grouping: str) -> int:
    """Bytes of keys and values that the kernels of a rank's forward read: a prefix once for each query chunk that attends it, or with
    grouping=fused once for all of them."""
    found = steps(problem, rank)
    if grouping == "fused":
        tokens = sum(length(step.keys) for step in found)
    else:
        tokens = sum(block.k[1] - block.k[0] for step in found for block in step.blocks)
    return tokens * shapes.kv_token


class GatherCosts(Costs[GatherOptions]):
    @property
    def tokens(self) -> int:
        """Of a rank's shard."""
        return self.problem.cu_seqlens[-1] // (1 if self.problem.layout.replicated else self.problem.world)

    @property
    def _all_gathered(self) -> bool:
        """Whether every rank receives all keys, needed or not."""
        return not self.pulls and not self.problem.keys_differ

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        problem, route = self.problem, gather_move(self.problem, rank).route
        everything = (problem.world - 1) * (problem.cu_seqlens[-1] // problem.world)
        found = {"kv": (everything if self._all_gathered else route.received_tokens) * self.shapes.kv_token}
        if problem.layout != problem.q_layout:
            border, inner = (x.shards(problem.cu_seqlens, problem.world) for x in (problem.layout, problem.q_layout))
            kept = length(tuple(here for here, _ in overlaps(border[rank], inner[rank])))
            # q and out, or dout and dq: all tokens but those that stay
            there, back = self.shapes.q_token, self.shapes.out_token
            if backward:
                there, back = back, there
            found["q"] = (size(inner[rank]) - kept) * there + (size(border[rank]) - kept) * back
        if backward:
            found["dkv"] = route.sent_tokens * self.shapes.kv_token
        return found

    def pass_peak(self, rank: int, backward: bool) -> int:
        problem, q, kv, out_token = self.problem, self.shapes.q_token, self.shapes.kv_token, self.shapes.out_token
        lse, n = self.shapes.batch * self.shapes.heads * 4, self.tokens
        *local, step = steps(problem, rank)
        alone = problem.ranks == 1 or problem.layout.replicated
        stride = self.options.heads_k_stride or self.shapes.kv_heads
        share = stride / self.shapes.kv_heads
        moves = problem.layout != problem.q_layout and not alone
        published = 0 if alone else n * kv
        keys = int((1 if share == 1 else 2) * length(step.keys) * kv * share)
        moved = n * (q + out_token) if moves else 0  # the moved queries, and the result moved back
        out = n * (out_token + lse) + moved
        rows = max([length(union([b.q])) for b in step.blocks], default=0)
        copied = int(copied_bytes(problem, self.shapes, rank, backward) * share)
        if not backward:
            together = self.options.grouping != "separate" and len(step.blocks) > 1
            copies = 0 if together else copied
            if local:
                copies += rows * (out_token + lse)
            elif together:
                copies += int(n * (q + out_token + 2 * lse) * share)
                if self.options.grouping == "packed":
                    copies += int(sum(b.k[1] - b.k[0] for b in step.blocks) * kv * share)
            return out + (n * q if moves else 0) + published + keys + copies
        # dk and dv: of calls, but for one on all keys, which writes the sum; sums of two groups; what others send home
        by_length = sorted(b.k[1] - b.k[0] for b in step.blocks)
        beside = sum(by_length[:-1]) if by_length and by_length[-1] == length(step.keys) else sum(by_length)
        beside_bytes = beside * kv * share
        home = gather_move(problem, rank).route.sent_tokens * kv
        sums = min(2, self.shapes.kv_heads // stride + 1) * most_keys(problem)[-1] * kv * share
        common = out + moved + n * q + n * kv + published + keys + copied
        if local and policy.local_kv_apart(problem, rank):
            return common + length(union(b.q for b in step.blocks)) * q + int(sums + beside_bytes) + home
        return common + (rows * q if local else 0) + int(sums + max(beside_bytes, home * share))

    def timeline(self, rank: int, backward: bool) -> Timeline:
        *local, rest = place_work(self.problem, rank)
        small_first, small_last = self.pulls and not local, self.pulls and backward
        sizes = policy.group_sizes(
            self.shapes.kv_heads, self.options.heads_k_stride, small_first, small_last, most_keys(self.problem)[-1]
        )
        apart = backward and self.pulls and policy.local_kv_apart(self.problem, rank)
        arriving = self.bytes_received(rank, backward)
        turns = [self._group(rest, rank, n, arriving, backward, bool(local)) for n in sizes]
        if local:
            # of several groups the last one's local KV comes at the end, while gradients travel
            late = sizes[-1] if backward and len(sizes) > 1 and not apart else 0
            first, last = (heads_of(self.shapes, n) for n in (self.shapes.kv_heads - late, late))
            turns.insert(0, timed(local[0], first, backward, self.packed))
            turns += [timed(local[0], last, backward, self.packed)] if late else []
        q_moves = self._query_moves(rank, arriving.get("q", 0))
        merged, merges = self._merged(rest, len(sizes), arriving.get("dkv", 0), backward, bool(local))
        exchanges = len(sizes) * (1 + backward) + len(q_moves)
        return Timeline(tuple(turns), q_moves, merged, merges, exchanges)

    def _query_moves(self, rank: int, size: int) -> tuple[Transfer, ...]:
        """To the layout in which they are computed, and back: `size` bytes in all."""
        if not size:
            return ()
        border, inner = (
            x.shards(self.problem.cu_seqlens, self.problem.world) for x in (self.problem.layout, self.problem.q_layout)
        )
        moved = received(move(border, inner, rank).route)
        return from_ranks("all", moved, size / 2 / sum(n for _, n in moved)) * 2

    def _packed_calls(self, rest: Work, backward: bool, local: bool) -> bool:
        """Whether one call has all query chunks, packed side by side (`grouping=packed`)."""
        return self.options.grouping == "packed" and rest.calls > 1 and not backward and not local

    def _group(
        self, rest: Work, rank: int, kv_heads: int, received_bytes: dict[str, int], backward: bool, local: bool
    ) -> TimedStep:
        """The step of one group of heads."""
        shapes, share = heads_of(self.shapes, kv_heads), kv_heads / self.shapes.kv_heads
        step = timed(rest, shapes, backward, self.packed)
        if self._packed_calls(rest, backward, local):
            step = replace(step, calls=1, copied=0.0)
        token, moved = self.shapes.kv_token * share, gather_move(self.problem, rank).route
        if self._all_gathered:
            size = received_bytes["kv"] * share
            incoming: tuple[Transfer, ...] = (Transfer("gather", size),) if size else ()
        else:
            incoming = from_ranks("all", received(moved), token)
        outgoing = from_ranks("all", returned(moved), token) if backward else ()
        return replace(step, incoming=incoming, outgoing=outgoing)

    def _merged(self, rest: Work, groups: int, home: int, backward: bool, local: bool) -> tuple[float, int]:
        """Bytes that merges, sums and copies move, and the number of merges and sums. home: bytes of dk and dv that arrive."""
        q, out, kv = self.shapes.q_token, self.shapes.out_token, self.shapes.kv_token
        total, launches = 0.0, 0
        if local:  # out, or dq, is read twice and written once
            calls = rest.packed_calls if self.packed else rest.calls
            total, launches = 3.0 * rest.queries * (q if backward else out), calls
        if self._packed_calls(rest, backward, local):  # q and out, k and v are copied together
            total += 2 * (rest.queries * (q + out) + rest.keys * kv)
        if self._all_gathered and self.problem.world > 1:  # keys are copied from where they arrive to their place
            total += 2 * rest.brought * kv
        if backward:  # dk and dv of several calls on the same keys, and those of all ranks
            tokens = rest.keys + rest.brought if rest.calls > 1 else 0
            tokens += 2 * self.tokens if home else 0
            total += tokens * kv + home
            launches += 2 * groups * ((rest.calls > 1) + (home > 0))
        return total, launches
