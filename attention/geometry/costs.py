"""What a call costs before it runs: FLOPs, bytes received and memory, read off the schedules. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attention.geometry.mailbox import Mailbox, pieces, received_bytes
from attention.geometry.merge_plan import FEW, passes
from attention.geometry.options import Options, RingOptions, TreeOptions
from attention.geometry.schedules import Problem, length, most_keys, steps, union
from attention.geometry.transfers import gather_move, move, packed_calls, step_route
from attention.masks.band import Mask

if TYPE_CHECKING:
    from attention.variants.base import Variant

RING_HALVED = 8192  # a rank's tokens from which a ring's backward goes by halves of the heads: memory before launches
OVERLAPPED = 16384  # tokens from which a transfer costs more than the calls that hide it
# tokens from which that holds of an exchange of heads: on 4 H200 two parts take 13.04 ms instead of 13.25 there
# (results/h200-x4/path_3_parts), and with half as many 5.51 instead of 3.66, launched by the host (h200-x4/short_training)
EXCHANGED_BY_PARTS = 32768
# a rank's tokens up to which a backward over its own keys goes beside that over the others': it is held beside that, too, and of
# more there is little that it could fill
APART = 8192
PLAYED = ("flash4",)  # kernels all of whose launches a tape is told of
MOST_PLAYED = 32768  # tokens a rank up to which passes are played; of more, no host is late
BACKWARD = 2.5  # backward FLOPs over forward FLOPs: five matrix products for two


def ring_parts(options: RingOptions, kv_heads: int, tokens: int) -> int:
    """In how many parts of the heads a ring's backward over a shard of `tokens` goes: `head_parts`, by default two where the
    shard is long."""
    default = 2 if kv_heads % 2 == 0 and tokens >= RING_HALVED else 1
    return options.head_parts or default


def played(kernel: str, tokens: int) -> bool:
    """Whether launched passes of so many tokens a rank are played from a tape."""
    return kernel in PLAYED and tokens <= MOST_PLAYED


def own_apart(problem: Problem, place: int) -> bool:
    """Whether a backward's first step is done apart from the others: where it is over the own keys, of a short shard, and in others
    something is computed. Not where it goes through the steps for one part of the heads after another (`ring_parts`), for its
    memory."""
    first, *others = steps(problem, place)
    short = problem.cu_seqlens[-1] // problem.world <= APART
    return short and first.owner == place and any(step.blocks for step in others)


def exchange_parts(options: RingOptions, kv_heads: int, ulysses: int, tokens: int) -> int:
    """In how many parts a rank's share of the heads is computed over its group's `tokens`: `head_parts`, by default two if it
    has an even number of KV heads, and there are tokens enough that the host is ahead of the GPU."""
    each, more = divmod(kv_heads, ulysses)
    if more or not each:
        return 1
    return options.head_parts or (2 if each % 2 == 0 and tokens >= EXCHANGED_BY_PARTS else 1)


@dataclass(frozen=True)
class Shapes:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes an element of q, k, v


def forward_flops(shapes: Shapes, pairs: int) -> int:
    """4 B H D pairs: two matrix products, two FLOPs a multiply-add."""
    return 4 * shapes.batch * shapes.heads * shapes.head_dim * pairs


def global_pairs(cu_seqlens: tuple[int, ...], mask: Mask) -> int:
    """(query, key) pairs under the mask, all sequences."""
    return sum(mask.pairs(b - a, b - a) for a, b in pairwise(cu_seqlens))


def problem_pairs(problem: Problem) -> int:
    """(query, key) pairs that the whole problem needs, each once."""
    if problem.q_tokens is not None:
        return problem.q_tokens * problem.cu_seqlens[-1]
    return global_pairs(problem.cu_seqlens, problem.mask)


def rank_flops(problem: Problem, shapes: Shapes) -> list[int]:
    """The forward FLOPs of each rank."""
    by_place = [sum(step.pairs for step in steps(problem, place)) for place in range(problem.world)]
    return [
        forward_flops(shapes, by_place[rank // problem.ulysses]) // problem.ulysses for rank in range(problem.ranks)
    ]


def bytes_received(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    rank: int,
    backward: bool,
    options: Options | Mapping[str, Any] | None = None,
    pulls: bool = False,
) -> dict[str, int]:
    """Bytes that a rank receives in one forward (or backward alone), by what moves: `kv`, `dkv`, and by exchange `q`,
    `out`, `qkv`, `dqkv`, or the tree's reductions. `pulls`: over a transport that brings each rank only the keys it
    needs, where others gather all for everyone unless there is a window."""
    chosen: Any = variant.parse(options)
    kv_token = 2 * shapes.batch * shapes.kv_heads * shapes.head_dim * shapes.itemsize  # k and v
    q_token = shapes.batch * shapes.heads * shapes.head_dim * shapes.itemsize
    if variant.executor == "tree":
        return tree_bytes(problem, shapes, chosen)
    found: dict[str, int] = {}
    if variant.executor == "all_to_all":
        found = _heads_for_sequence(problem, shapes, backward)
        kv_token = kv_token // shapes.kv_heads * kv_heads_each(problem, shapes)
    if variant.executor in ("ring", "all_to_all"):
        place = rank // problem.ulysses
        routes = [step_route(problem, place, i) for i in range(len(steps(problem, place)))]
        found["kv"] = sum(r.received_tokens for r in routes) * kv_token
        home = sum(r.reversed().received_tokens for r in routes)
    else:
        moving = gather_move(problem, rank).route
        everything = (problem.world - 1) * (problem.cu_seqlens[-1] // problem.world)
        found["kv"] = (moving.received_tokens if pulls or problem.mask.windowed else everything) * kv_token
        home = moving.reversed().received_tokens
        if problem.layout != problem.q_layout:
            border, inner = (x.shards(problem.cu_seqlens, problem.world) for x in (problem.layout, problem.q_layout))
            into = move(border, inner, rank).route.received_tokens
            back = move(inner, border, rank).route.received_tokens
            found["q"] = (into + back) * q_token  # q and out; in the backward dout and dq
    if backward:
        found["dkv"] = home * kv_token
    return found


def kv_heads_each(problem: Problem, shapes: Shapes) -> int:
    """KV heads of a rank while it computes: its share, or one that several ranks replicate."""
    return max(1, shapes.kv_heads // problem.ulysses)


def _heads_for_sequence(problem: Problem, shapes: Shapes, backward: bool) -> dict[str, int]:
    """The all-to-all's bytes: this rank's heads of the other ranks' tokens on the way in, its tokens of the other ranks'
    heads on the way back."""
    others = problem.ulysses - 1
    tokens = problem.cu_seqlens[-1] // problem.ranks
    element = shapes.batch * shapes.head_dim * shapes.itemsize * tokens * others
    q = shapes.heads // problem.ulysses * element
    kv = 2 * kv_heads_each(problem, shapes) * element
    if backward:
        return {"dout": q, "dqkv": q + kv}
    return {"qkv": q + kv, "out": q}


def tree_bytes(problem: Problem, shapes: Shapes, options: TreeOptions) -> dict[str, int]:
    """A tree reduction's bytes, all in fp32. An all-reduce of n bytes counts 2 (W-1)/W n, what a rank receives in a
    ring all-reduce; nccl-tests' convention."""
    world = problem.world
    rows = shapes.batch * shapes.heads * (problem.q_tokens or 0) * 4
    whole = rows * (shapes.head_dim + 1)

    def reduced(size: int) -> int:
        return 2 * (world - 1) * size // world

    how = options.reduce  # null is counted as packed; fused brings the same but for some bytes a row
    if how == "three":
        return {"max_lse": reduced(rows), "sum_den": reduced(rows), "sum_num": reduced(rows * shapes.head_dim)}
    if how == "two":
        return {"max_lse": reduced(rows), "sum_num_den": reduced(whole)}
    if how == "hierarchical":
        node = options.ranks_of_node(world)
        return {"node": (node - 1) * whole, "nodes": (world // node - 1) * whole}
    if how == "fused":
        return {"partials": received_bytes(world, rows // 4, shapes.head_dim)}
    return {"partials": (world - 1) * whole}


def kernel_bytes(problem: Problem, shapes: Shapes, rank: int, backward: bool) -> int:
    """The fewest bytes of device memory that a rank's kernels move: each block's inputs and outputs once."""
    total = 0
    for step in steps(problem, rank // problem.ulysses):
        q_tokens = sum(b.q[1] - b.q[0] for b in step.blocks)
        q_bytes = q_tokens * shapes.heads // problem.ulysses * shapes.head_dim
        k_bytes = 2 * length(union(b.k for b in step.blocks)) * kv_heads_each(problem, shapes) * shapes.head_dim
        # forward reads q, k, v and writes out; backward reads q, k, v, out, dout and writes dq, dk, dv
        total += (4 * q_bytes + 2 * k_bytes) if backward else (2 * q_bytes + k_bytes)
    return total * shapes.batch * shapes.itemsize


def kv_bytes_read(problem: Problem, shapes: Shapes, rank: int, grouping: str) -> int:
    """Bytes of keys and values that a rank's grouped forward reads, by the model: a prefix once for each chunk that
    attends it, or with grouping=fused once for all of them."""
    found = steps(problem, rank)
    if grouping == "fused":
        tokens = sum(length(step.keys) for step in found)
    else:
        tokens = sum(block.k[1] - block.k[0] for step in found for block in step.blocks)
    return 2 * tokens * shapes.batch * shapes.kv_heads * shapes.head_dim * shapes.itemsize


def peak_bytes(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    rank: int,
    options: Options | Mapping[str, Any] | None = None,
    backward: bool = False,
) -> int:
    """What a rank holds at the height of a forward beside its inputs, or with `backward` of a training step: results, what
    is saved, the keys in flight and what it offers to its peers. A model of a transport that pulls, without the kernels'
    own scratch; one that sends holds a copy of gathered keys more."""
    chosen: Any = variant.parse(options)
    if variant.executor == "tree":
        q_tokens = problem.q_tokens or 0
        out = shapes.batch * shapes.heads * q_tokens * (shapes.head_dim * shapes.itemsize + 4)
        if chosen.reduce == "fused":
            n = pieces(shapes.batch * shapes.heads * q_tokens, shapes.head_dim)
            return out + Mailbox.holding(problem.world, n).numel * 4
        return out + tree_bytes(problem, shapes, chosen).get("partials", out)
    return _Held(variant, problem, shapes, rank, chosen).peak(backward)


class _Held:
    """The bytes that one rank's executor holds."""

    def __init__(self, variant: Variant[Any], problem: Problem, shapes: Shapes, rank: int, options: Any):
        self.variant, self.problem, self.options = variant, problem, options
        self.place = rank // problem.ulysses
        self.steps = steps(problem, self.place)
        self.alone = problem.ranks == 1 or problem.layout.replicated
        self.t = problem.cu_seqlens[-1] // (1 if problem.layout.replicated else problem.ranks)
        self.q_tokens = problem.q_tokens or self.t
        # bytes a token, of all heads; of an exchange of heads the tokens of the group and a share of the heads are as much
        self.q = shapes.batch * shapes.heads * shapes.head_dim * shapes.itemsize
        self.lse = shapes.batch * shapes.heads * 4
        self.kv = 2 * shapes.batch * shapes.kv_heads * shapes.head_dim * shapes.itemsize
        self.wide = 4 // shapes.itemsize if shapes.itemsize < 4 else 0  # times as much in fp32, where that is another
        self.shapes = shapes

    def peak(self, backward: bool) -> int:
        """Of a forward, or of it and its backward."""
        return max(self._peak(False), self._peak(True)) if backward else self._peak(False)

    def _peak(self, backward: bool) -> int:
        if self.variant.executor == "gather":
            return self._gather(backward)
        if self.problem.ulysses == 1:
            parts = ring_parts(self.options, self.shapes.kv_heads, self.t)
            return self._ring(backward, self.q, self.kv, self.lse, parts)
        return self._all_to_all(backward)

    def _ring(self, backward: bool, q: int, kv: int, lse: int, parts: int, tokens: int | None = None) -> int:
        """Of tokens of q, kv and lse bytes, the backward in parts of the heads."""
        n, kv_tokens = (self.q_tokens, self.t) if tokens is None else (tokens, tokens)
        out = n * (q + lse)
        lengths = [length(step.keys) for step in self.steps if step.owner != self.place]
        flying = sum(sorted(lengths)[-2:])
        offered = kv_tokens * kv if lengths and not self.alone else 0
        apart = backward and parts == 1 and own_apart(self.problem, self.place)
        found = [*self.steps[1:], self.steps[0]] if apart else self.steps
        calls = tuple(union(b.q for b in step.blocks) for step in found if step.blocks)
        part = max(map(length, calls[1:]), default=0)
        start, stop = passes(n, calls).running
        copied = self._copied(q, kv, lse, backward)
        if not backward:
            return out + part * (q + lse) + (stop - start) * q * self.wide + flying * kv + offered + copied
        results = n * q + kv_tokens * kv
        if self.alone:
            return out + results + copied
        summed = (stop - start) * q * self.wide + (kv_tokens * kv * self.wide if len(lengths) > 1 else 0)
        most = max(lengths, default=0)
        own = n * q + kv_tokens * kv if apart and not self.wide else 0  # else the results
        # two offers of dk and dv, and what came for one's own
        each = own + summed + part * q + flying * kv + (3 + apart) * most * kv + copied
        return out + results + offered + each // parts

    def _copied(self, q: int, kv: int, lse: int, backward: bool) -> int:
        """What one call of packs, or the merge of its result, takes in copies at most, where its queries or keys are several
        stretches."""
        if len(self.problem.cu_seqlens) == 2:
            return 0
        of_q, most = 3 * q + lse if backward else q, 0
        for step in self.steps:
            for queries, keys in packed_calls(step, step.owner == self.place):
                stretches = (queries, of_q), (keys, kv)
                most = max(most, sum(length(x) * size for x, size in stretches if len(x) > 1))
                if len(queries) > FEW:  # merged or summed at once: what is there, and what comes
                    most = max(most, 2 * length(queries) * (q if backward else q + lse))
        return most

    def _all_to_all(self, backward: bool) -> int:
        ranks = self.problem.ulysses
        repeated = kv_heads_each(self.problem, self.shapes) * ranks // self.shapes.kv_heads
        group = self.t * ranks  # tokens, of which a rank has a share of the heads
        q, lse, kv = self.q // ranks, self.lse // ranks, self.kv * repeated // ranks
        n = exchange_parts(self.options, self.shapes.kv_heads, ranks, group)
        saved, out = group * (q + kv), group * (q + lse)  # as it is computed, all parts
        results = self.t * self.q
        slots = ranks * self.t * (q + kv) + 2 * group * q // n  # of q, k and v, and two of out
        if not backward:
            rest = self._ring(False, q, kv, lse, 1, group) - out
            return saved + out + results + slots + rest // n
        results += self.t * (self.q + self.kv * (1 + (repeated if repeated > 1 else 0)))
        slots += ranks * self.t * q + 2 * group * (q + kv) // n  # of dout, and two of dq, dk and dv
        arriving = min(2, n) * group * q // n
        rest = self._ring(True, q, kv, lse, 1, group) - out - group * (q + kv)  # which lie in the slots
        return saved + out + results + slots + arriving + rest // n

    def _gather(self, backward: bool) -> int:
        problem, q, kv, lse, n = self.problem, self.q, self.kv, self.lse, self.q_tokens
        *own, step = self.steps
        stride = self.options.heads_k_stride or self.shapes.kv_heads
        share = stride / self.shapes.kv_heads
        flying = 1 if share == 1 else 2
        moved = n * q if problem.layout != problem.q_layout and not self.alone else 0
        offered = 0 if self.alone else self.t * kv
        keys = int(flying * length(step.keys) * kv * share)
        out = n * (q + lse) + 2 * moved  # the queries moved, and the result moved back
        rows = [length(union([b.q])) for b in step.blocks]
        copied = int(self._copied(q, kv, lse, backward) * share)
        together = self.options.grouping != "separate" and len(step.blocks) > 1
        if not backward:
            copies = 0 if together else copied
            if own:
                copies += max(rows, default=0) * (q + lse)
            elif together:
                copies += int(2 * n * (q + lse) * share)
                if self.options.grouping == "packed":
                    copies += int(sum(b.k[1] - b.k[0] for b in step.blocks) * kv * share)
            return out + moved + offered + keys + copies
        results = n * q + self.t * kv
        by_length = sorted(b.k[1] - b.k[0] for b in step.blocks)
        beside = sum(by_length[:-1]) if by_length and by_length[-1] == length(step.keys) else sum(by_length)
        home = gather_move(problem, self.place).route.reversed().received_tokens
        most = most_keys(problem)[-1]
        sums = min(2, self.shapes.kv_heads // stride + 1) * most * kv * share
        if own and own_apart(self.problem, self.place):
            targets = length(union(b.q for b in step.blocks)) * q
            held = int(sums + beside * kv * share) + home * kv
            return out + 2 * moved + results + offered + keys + targets + held + copied
        target = max(rows, default=0) * q if own else 0
        return (
            out + 2 * moved + results + offered + keys + target + copied + int(sums + (max(beside, home) * kv * share))
        )
