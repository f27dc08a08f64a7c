"""The mixture executor: each component of a mixture is plain attention of some heads over a stride of the tokens. Where no key
travels it is one kernel call on a strided view, of equal segments as a batch; else the gather executor brings it the selected
keys. Head groups have places of their own in the result; LongNet's pairs are merged by their LSE. Where more than two pairs meet
at one place, results and gradients are accumulated in fp32.

With the option `copies` (the plain form) components are copied, and each result is written to a tensor of full size, which is
then merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors import gather
from attention.executors.plan import Plan, PlannedComponent
from attention.geometry.mixtures import Component, Mixture, strided
from attention.kernels.interface import Grads, Pair, Triple
from attention.profiling import phase
from attention.reduction.lse_merge import merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import empty_lse, result_like

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    packed = q.dim() == 3
    q, k, v = (x.unsqueeze(0) if packed else x for x in (q, k, v))
    parts, n = plan.parts(), divisor(plan)
    detached = plan.options.weights == "detached"
    result = _Result(q, v, plan, parts)
    own: Saved = ()
    for i, part in enumerate(parts):
        if _computes(part):
            found = _attend((q, k, v), part, i, None if detached else result.target(i))
            with phase("comp_merge", i):
                result.add(i, *found)
            own += found if detached else ()
    with phase("comp_merge", len(parts)):
        whole, lse = with_sinks(*result.finish(), sinks)
        out = whole / n if n > 1 else whole
    saved = (q, k, v, lse, *own) if detached else saved_with(sinks, q, k, v, whole, lse)
    return (out[0], lse[0], saved) if packed else (out, lse, saved)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks theirs. A component's backward has the final out and lse of all, or with
    detached weights its own and its share of dout."""
    packed = dout.dim() == 3
    dout = dout.unsqueeze(0) if packed else dout
    parts, n = plan.parts(), divisor(plan)
    totals = [_Gradient(name, x, plan, parts) for name, x in zip(("dq", "dk", "dv"), saved, strict=False)]
    rows = _detached(dout, saved, parts) if plan.options.weights == "detached" else _joint(dout, saved, parts)
    for i, given in rows:
        into = [x for total in totals if (x := total.target(i)) is not None]
        found = _attend_backward(given, saved[:3], parts[i], i, (into[0], into[1], into[2]) if len(into) == 3 else None)
        if found is not None:
            with phase("comp_merge", i):
                for total, x in zip(totals, found, strict=True):
                    total.add(i, x)
    with phase("comp_merge", len(parts)):
        # the sums are divided, not dout: rounding its often equal elements would bias the gradients
        grads = [total.finish() if n == 1 else total.finish().div_(n) for total in totals]
        of_sinks = [x / n for x in sinks_gradients(dout, saved)] if plan.sinks else []
    return (*(x[0] for x in grads), *of_sinks) if packed else (*grads, *of_sinks)


def _joint(dout: Tensor, saved: Saved, parts: Sequence[PlannedComponent]) -> Iterator[tuple[int, Triple]]:
    """The number of each component that computes, and its rows of dout, out and lse: those of all."""
    for i, part in enumerate(parts):
        if _computes(part):
            c = part.component
            yield i, (queries(dout, c), queries(saved[3], c), of_rows(saved[4], c))


def _detached(dout: Tensor, saved: Saved, parts: Sequence[PlannedComponent]) -> Iterator[tuple[int, Triple]]:
    """As `_joint`, with each component's own out and lse."""
    own = iter(saved[4:])
    for i, part in enumerate(parts):
        if _computes(part):
            out, lse = next(own), next(own)
            share = _share(lse, of_rows(saved[3], part.component))
            yield i, ((queries(dout, part.component) * share).to(dout.dtype), out, lse)


def divisor(plan: Plan) -> int:
    """By what the result of head groups is divided: the number of pairs."""
    mixture = plan.problem.schedule
    assert isinstance(mixture, Mixture)
    return len(mixture.pairs) if mixture.mixing == "head_groups" else 1


def queries(x: Tensor, c: Component) -> Tensor:
    """A component's tokens and heads of a tensor like q `[B, s, H, D]`, a view `[B, n, h, D]`."""
    return _selected(x, c, c.heads)


def keys(x: Tensor, c: Component) -> Tensor:
    """As `queries`, of a tensor like k; a copy where its heads are no slice."""
    return _selected(x, c, c.kv_heads)


def _selected(x: Tensor, c: Component, heads: tuple[int, ...]) -> Tensor:
    found = strided(heads)
    if found is None:
        return torch.stack([x[:, c.offset :: c.rate, head] for head in heads], -2)
    return x[:, c.offset :: c.rate, found]


def of_rows(lse: Tensor, c: Component) -> Tensor:
    """A component's part of an LSE `[B, H, s]`, a view `[B, h, n]`."""
    heads = strided(c.heads)
    assert heads is not None
    return lse[:, heads, c.offset :: c.rate]


def folded(x: Tensor, c: Component) -> Tensor:
    """Equal segments as a batch: `[B, n, h, D]` as `[B * fold, n / fold, h, D]`; of whole segments a view."""
    if c.fold == 1:
        return x
    batch, n, *heads = x.shape
    if batch > 1 and x.stride(0) != n * x.stride(1):
        return x.unflatten(1, (c.fold, -1)).flatten(0, 1)
    each = n // c.fold  # in one operation, since short calls are bound by CPU launch overhead
    return x.as_strided((batch * c.fold, each, *heads), (each * x.stride(1), *x.stride()[1:]))


def unfolded(x: Tensor, c: Component) -> Tensor:
    return x.reshape(-1, c.fold * x.shape[1], *x.shape[2:]) if c.fold > 1 else x


def folded_lse(lse: Tensor, c: Component) -> Tensor:
    """`[B, h, n]` as `[B * fold, h, n / fold]`, contiguous."""
    if c.fold > 1:
        lse = lse.unflatten(2, (c.fold, -1)).transpose(1, 2).flatten(0, 1)
    return lse.contiguous()


def unfolded_lse(lse: Tensor, c: Component) -> Tensor:
    return lse.unflatten(0, (-1, c.fold)).transpose(1, 2).flatten(2, 3) if c.fold > 1 else lse


def _computes(part: PlannedComponent) -> bool:
    """Whether the component computes anything on this rank or, where keys travel, may on any rank. It does not where all of
    its tokens are padding."""
    return not part.component.local or bool(part.plan.steps[0].calls)


def _inputs(qkv: Sequence[Tensor], part: PlannedComponent) -> Triple:
    """A component's q, k, v for its own problem: views, or copies."""
    c, (q, k, v) = part.component, qkv
    found = [folded(x, c) for x in (queries(q, c), keys(k, c), keys(v, c))]
    q, k, v = [x.contiguous() for x in found] if part.plan.options.copies else found
    return q, k, v


def _attend(qkv: Sequence[Tensor], part: PlannedComponent, i: int, target: Tensor | None) -> Pair:
    """(out `[B, n, h, Dv]`, lse `[B, h, n]`) of a component. target: where its kernel, if it has one call, writes out."""
    c, given = part.component, _inputs(qkv, part)
    if not c.local:
        out, lse, _ = gather.forward(*given, part.plan)
        return out, lse
    (each,) = part.plan.steps[0].calls
    with phase("comp_block", i):
        into = None if target is None else (target, empty_lse(given[0]))
        out, lse = part.plan.kernel.forward(*given, each.call, into)
    return unfolded(out, c), unfolded_lse(lse, c)


def _attend_backward(
    rows: Triple, qkv: Sequence[Tensor], part: PlannedComponent, i: int, into: Triple | None
) -> Triple | None:
    """(dq, dk, dv) of a component `[B, n, h, D]`; None where its kernel wrote them to `into`. rows: its dout, out
    `[B, n, h, Dv]` and lse `[B, h, n]`."""
    c, given, (dout, out, lse) = part.component, _inputs(qkv, part), rows
    if not c.local:
        dq, dk, dv, *_ = gather.backward(dout, (*given, out, lse.contiguous()), part.plan)
        return dq, dk, dv
    (each,) = part.plan.steps[0].calls
    dout, out = (x.contiguous() if part.plan.options.copies else x for x in (folded(dout, c), folded(out, c)))
    with phase("comp_block", i):
        found = part.plan.kernel.backward(dout, *given, out, folded_lse(lse, c), each.call, into)
    dq, dk, dv = (unfolded(x, c) for x in found)
    return None if into is not None else (dq, dk, dv)


def _share(own: Tensor, total: Tensor) -> Tensor:
    """exp(own - total) of LSEs `[B, h, n]`, as `[B, n, h, 1]`; 0 where no key is seen."""
    return (own - total).exp().masked_fill(total == -torch.inf, 0).transpose(1, 2).unsqueeze(-1)


class _Total:
    """A tensor like `like` to which every component gives its part. Components that meet at no place of an earlier one write
    there; the others are combined with it, in the accumulation dtype where more than two meet."""

    def __init__(self, name: str, like: Tensor, plan: Plan, parts: Sequence[PlannedComponent], of_keys: bool):
        self.like, self.plan, self.parts, self.of_keys = like, plan, parts, of_keys
        self.copies = plan.options.copies
        self.how = plan.meetings[of_keys]
        self.upcast = plan.accumulates(of_keys, like.dtype)
        dtype = accumulation_dtype(like.dtype) if self.upcast else like.dtype
        self.total = self.scratch(name, dtype) if self.upcast else like.new_empty(like.shape)
        self.cleared = self.copies or not self.how.covered or not all(map(_computes, parts))
        if self.cleared:
            self.total.zero_()

    def scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of this shape, by `memory_pool` that of the pass before."""
        if not self.plan.options.memory_pool:
            return self.like.new_empty(self.like.shape, dtype=dtype)
        key = name, self.like.shape, dtype
        if key not in self.plan.pool:
            self.plan.pool[key] = self.like.new_empty(self.like.shape, dtype=dtype)
        return self.plan.pool[key]

    def of(self, x: Tensor, i: int) -> Tensor:
        """Component i's part of a tensor of this shape."""
        c = self.parts[i].component
        return keys(x, c) if self.of_keys else queries(x, c)

    def fresh(self, i: int) -> bool:
        return self.how.fresh[i] and not self.copies

    def target(self, i: int) -> Tensor | None:
        """Where the kernel of component i may write, as it computes: a view; None where there is none."""
        part = self.parts[i]
        if self.upcast or not self.fresh(i) or not part.component.local:
            return None
        place = folded(self.of(self.total, i), part.component)
        return place if place.untyped_storage().data_ptr() == self.total.untyped_storage().data_ptr() else None

    def full_size(self, i: int, x: Tensor) -> Tensor:
        """Component i's part in a tensor of full size, 0 elsewhere."""
        full = self.scratch("full", x.dtype).zero_()
        self.put(full, i, x)
        return full

    def put(self, total: Tensor, i: int, x: Tensor) -> None:
        """Adds component i's part, to zeros in case it has a head several times."""
        numbers = self.parts[i].component.kv_heads
        if not self.of_keys or strided(numbers) is not None:
            self.of(total, i).add_(x)
            return
        c = self.parts[i].component
        for at, number in enumerate(numbers):
            total[:, c.offset :: c.rate, number].add_(x[:, :, at])


class _Gradient(_Total):
    """The sum of a gradient's parts."""

    def __init__(self, name: str, like: Tensor, plan: Plan, parts: Sequence[PlannedComponent]):
        super().__init__(name, like, plan, parts, of_keys=name != "dq")

    def add(self, i: int, x: Tensor) -> None:
        if self.copies:
            self.total.add_(self.full_size(i, x))
        elif self.fresh(i):
            self.of(self.total, i).copy_(x)
        else:
            self.put(self.total, i, x)

    def finish(self) -> Tensor:
        return self.total.to(self.like.dtype)


class _Result(_Total):
    """out and its LSE: parts that meet are merged by their LSE."""

    def __init__(self, q: Tensor, v: Tensor, plan: Plan, parts: Sequence[PlannedComponent]):
        super().__init__("out", result_like(q, v), plan, parts, of_keys=False)
        self.lse = empty_lse(self.like)
        if self.cleared:
            self.lse.fill_(-torch.inf)

    def add(self, i: int, out: Tensor, lse: Tensor) -> None:
        c = self.parts[i].component
        place, lse_place = self.of(self.total, i), of_rows(self.lse, c)
        if self.copies:
            full_lse = torch.full_like(self.lse, -torch.inf)
            of_rows(full_lse, c).copy_(lse)
            merge(self.total, self.lse, self.total, self.lse, self.full_size(i, out), full_lse)
        elif self.fresh(i):
            lse_place.copy_(lse)
            if out.data_ptr() != place.data_ptr():
                place.copy_(out)
        else:
            merge(place, lse_place, place, lse_place, out, lse)

    def finish(self) -> Pair:
        return self.total.to(self.like.dtype), self.lse
