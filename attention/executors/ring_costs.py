"""What the ring executor costs. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attention.executors import policy
from attention.executors.timeline import (
    Costs,
    TimedStep,
    Timeline,
    from_ranks,
    heads_of,
    merged_bytes,
    place_work,
    received,
    returned,
    timed,
)
from attention.geometry.counts import Shapes
from attention.geometry.merge_plan import FEW, running_span
from attention.geometry.options import RingOptions
from attention.geometry.schedules import Problem, Step, length, steps, union
from attention.geometry.transfers import Route, packed_calls, step_routes
from attention.masks.band import Intervals
from attention.memo import memo


class RingCosts(Costs[RingOptions]):
    """`shapes` has the heads that this rank computes. Within an all-to-all those are a share of all, over the tokens of a group."""

    @property
    def tokens(self) -> int:
        """Of a place in the schedule."""
        return self.problem.cu_seqlens[-1] // (1 if self.problem.layout.replicated else self.problem.world)

    @property
    def parts(self) -> int:
        """Parts of the heads that a backward takes in turn."""
        if self.problem.ulysses > 1 or self.problem.ranks == 1:
            return 1  # the all-to-all has cut them already; one rank makes one call
        return policy.ring_parts(self.options.head_parts, self.shapes.kv_heads, self.tokens)

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        routes = step_routes(self.problem, rank // self.problem.ulysses)
        found = {"kv": sum(route.received_tokens for route in routes) * self.shapes.kv_token}
        if backward:
            found["dkv"] = sum(route.sent_tokens for route in routes) * self.shapes.kv_token
        return found

    def pass_peak(self, rank: int, backward: bool) -> int:
        problem, shapes, place = self.problem, self.shapes, rank // self.problem.ulysses
        q, kv, out_token = shapes.q_token, shapes.kv_token, shapes.out_token
        lse, n = shapes.batch * shapes.heads * 4, problem.q_tokens or self.tokens
        alone = problem.ranks == 1 or problem.layout.replicated
        # bytes of an fp32 accumulator over those of the tensor; the tensor itself accumulates where it is fp32
        fp32 = 4 // shapes.itemsize if shapes.itemsize < 4 else 0
        found = steps(problem, place)
        remote = [length(step.keys) for step in found if step.owner != place]
        in_flight = sum(sorted(remote)[-2:]) * kv
        published = self.tokens * kv if remote and not alone else 0
        apart = backward and self.parts == 1 and policy.local_kv_apart(problem, place)
        order = [*found[1:], found[0]] if apart else found
        calls = _queries(order)
        part = max(map(length, calls[1:]), default=0)
        start, stop = running_span(n, calls)
        out, running = n * (out_token + lse), (stop - start) * (q if backward else out_token) * fp32
        copied = copied_bytes(problem, shapes, place, backward)
        if not backward:
            return out + part * (out_token + lse) + running + in_flight + published + copied
        results = n * q + self.tokens * kv
        if alone:
            return out + results + copied
        summed = running + (self.tokens * kv * fp32 if len(remote) > 1 else 0)
        local = n * q + self.tokens * kv if apart and not fp32 else 0  # else they lie in the results
        # two published dk and dv, and what arrives for one's own
        returning = (3 + apart) * max(remote, default=0) * kv
        each = local + summed + part * q + in_flight + returning + copied
        return out + results + published + each // self.parts

    def timeline(self, rank: int, backward: bool) -> Timeline:
        problem = self.problem
        place, within = divmod(rank, problem.ulysses)
        works, routes = place_work(problem, place), step_routes(problem, place)
        parts = self.parts if backward else 1
        shapes = heads_of(self.shapes, self.shapes.kv_heads // parts)
        each: list[TimedStep] = []
        for work, route in zip(works, routes, strict=True):
            incoming = from_ranks("one", received(route), shapes.kv_token, problem.ulysses, within)
            outgoing = from_ranks("one", returned(route), shapes.kv_token, problem.ulysses, within) if backward else ()
            step = timed(work, shapes, backward, self.packed)
            each.append(replace(step, incoming=incoming, outgoing=outgoing))
        # of several parts the last has local KV at the end, while gradients travel
        turns = [*each * (parts - 1), *each[1:], each[0]] if parts > 1 else each
        merged, merges = self._merged(place, routes, backward)
        exchanges = sum(len(step.incoming) + len(step.outgoing) for step in turns)
        return Timeline(tuple(turns), (), merged, merges, exchanges)

    def _merged(self, place: int, routes: Sequence[Route], backward: bool) -> tuple[float, int]:
        """Bytes that merges move and their number: of out, or of dq and of dk and dv."""
        found, shapes = steps(self.problem, place), self.shapes
        queries = list(map(length, _queries(found)))
        tokens = self.problem.q_tokens or self.tokens
        token = shapes.q_token if backward else shapes.out_token
        total, count = merged_bytes(queries, tokens, token, shapes.itemsize), max(0, len(queries) - 1)
        if backward:
            keys = [length(step.keys) for step in found if step.owner == place and step.blocks]
            keys += [n for route in routes if (n := route.sent_tokens)]
            total += merged_bytes(keys, self.tokens, shapes.kv_token, shapes.itemsize)
            count += 2 * max(0, len(keys) - 1)
        return total, count


def copied_bytes(problem: Problem, shapes: Shapes, place: int, backward: bool) -> int:
    """The most bytes that one call on a packed batch, or the merge of its result, takes for copies: of queries or keys that lie in
    several intervals."""
    if len(problem.cu_seqlens) == 2:
        return 0
    q, out, lse = shapes.q_token, shapes.out_token, shapes.batch * shapes.heads * 4
    taken, most = q + 2 * out + lse if backward else q, 0
    for queries, keys in _calls(problem, place):
        pairs = (queries, taken), (keys, shapes.kv_token)
        most = max(most, sum(length(x) * size for x, size in pairs if len(x) > 1))
        if len(queries) > FEW:  # merged or summed at once: the result so far, and the part
            most = max(most, 2 * length(queries) * (q if backward else out + lse))
    return most


@memo(lambda found, *_: sum(len(queries) + len(keys) for queries, keys in found))
def _calls(problem: Problem, place: int) -> list[tuple[Intervals, Intervals]]:
    """The queries and keys of each call on a packed batch, of calls that are alike once."""
    alike = {(id(step.blocks), step.owner == place, step.keys): step for step in steps(problem, place)}
    return [call for step in alike.values() for call in packed_calls(step)]


def _queries(found: Iterable[Step]) -> tuple[Intervals, ...]:
    """The queries of each step that has any."""
    known: dict[int, Intervals] = {}  # by the identity of the blocks, which many steps share
    for step in (found := [step for step in found if step.blocks]):
        if id(step.blocks) not in known:
            known[id(step.blocks)] = union(b.q for b in step.blocks)
    return tuple(known[id(step.blocks)] for step in found)
