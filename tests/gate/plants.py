"""Faults planted in the real code, one at a time, and what the gate says of them. A fault is an entry of `PLANTS`: a name, a
change of one seam (`outputs`, `kernel`, `steps`, `changed`), and the run of `RUNS` that it shows in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention import api, autograd, plan
from attention.executors import all_to_all, dilated, exchange, keys, tree
from attention.executors.plan import LocalCall, Plan, PlannedStep
from attention.geometry import cuts, schedules
from attention.kernels import decompose, padded_values
from attention.kernels import math as math_kernel
from attention.kernels.interface import Call
from attention.masks.band import CAUSAL, Band
from attention.masks.mask import Mask, built
from attention.masks.rectangles import LO, UNBOUNDED
from attention.reduction import grad_sum, parts
from attention.reduction.sinks import with_sinks
from attention.variants.base import Variant
from runner import job
from runner.check.gate import check, check_timed
from runner.check.local import Local
from runner.config.experiment import Experiment
from runner.config.masks import NamedMask
from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank
from runner.measure import timing
from runner.measure.attention_work import AttentionWork

Tensors = dict[str, Tensor]  # out and lse, or dq, dk, dv and dsinks, of this rank's shard
Change = Callable[[Tensors, Plan], None]  # in place

SIZE = ("batch=1", "heads=2", "kv_heads=1", "head_dim=16")
FORWARD = ("mode=forward",)
SOFTCAPS = (1, 15, 30, 50)
RUNS = {  # overrides by name; all in a world of 2
    "zigzag": ("attention=zigzag", "causal=true", *SIZE),
    "forward": ("attention=zigzag", "causal=true", *SIZE, *FORWARD),
    "ring": ("attention=ring", "causal=false", *SIZE, *FORWARD),
    "causal ring": ("attention=ring", "causal=true", *SIZE),
    "two heads": ("attention=zigzag", "causal=true", *SIZE, "kv_heads=2"),
    "math": ("attention=zigzag", "causal=true", *SIZE, *FORWARD, "kernel=math"),
    "ulysses": ("attention=ulysses", "causal=true", *SIZE, *FORWARD, "kv_heads=2"),
    "documents": ("attention=ring", "mask=documents", *SIZE),
    "named window": ("attention=ring", "mask=sliding_window", *SIZE),
    "chunks": ("attention=llama3", "mask=chunked", *SIZE),
    "ring window": ("attention=ring", "causal=true", *SIZE, *FORWARD, "window=[100,0]"),
    "window": ("attention=ring_allgather", "causal=true", *SIZE, *FORWARD, "window=[100,0]"),
    "packed": ("attention=llama3", "causal=true", *SIZE, *FORWARD),
    "new packs": ("attention=llama3", "causal=true", *SIZE, "timing.new_packs=true"),
    "batch": ("attention=zigzag", "causal=true", *SIZE, *FORWARD, "batch=2"),
    "tree": ("attention=tree", "causal=false", *SIZE, *FORWARD, "q_len=16"),
    "lengths": ("attention=tree", "causal=false", *SIZE, *FORWARD, "batch=2", "q_len=4", "kv_lengths=[300,100]"),
    "prefix": ("attention=tree", "causal=false", *SIZE, *FORWARD, "batch=2", "q_len=4", "prefix=64"),
    "sinks": ("attention=zigzag", "causal=true", *SIZE, "sinks=true"),
    **{f"softcap={cap}": ("attention=zigzag", "causal=true", *SIZE, f"softcap={cap}") for cap in SOFTCAPS},
    "dilated": (
        "attention=ring_dilated",
        "attention.mixing=longnet",
        "attention.segments=[64,512]",
        "attention.rates=[1,2]",
        "causal=true",
        *SIZE,
        "sinks=true",
        "softcap=1",
    ),
    "values": ("attention=zigzag", "causal=true", *SIZE, "v_head_dim=8", "kernel=sdpa_flash"),
}


@dataclass(frozen=True)
class Plant:
    name: str
    plant: Callable[[], AbstractContextManager[object]]
    run: str = "zigzag"


@dataclass
class State:
    checked: bool = False  # whether the check before the timing is over
    alone: bool = False  # whether a local call runs, in which no fault is planted


STATE = State()


@contextmanager
def changed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is what `make` makes of it. Schedules made with it or without are forgotten."""
    own = vars(owner)[name]
    original = own.__func__ if isinstance(own, staticmethod) else own
    planted = make(original)

    def either(*args: Any, **given: Any) -> Any:
        return (original if STATE.alone else planted)(*args, **given)

    setattr(owner, name, staticmethod(either) if isinstance(own, staticmethod) else either)
    _forget()
    try:
        yield
    finally:
        setattr(owner, name, own)
        _forget()


def _without_a_fault(original: Any) -> Any:
    def inner(*args: Any) -> Any:
        STATE.alone = True
        _forget()
        try:
            return original(*args)
        finally:
            STATE.alone = False
            _forget()

    return inner


def _forget() -> None:
    built.cache_clear()
    schedules.known.cache_clear()


@contextmanager
def outputs(change: Change) -> Iterator[None]:
    """Change what a rank's forward or backward gives, as `change` finds it there by name; nothing that is saved."""

    def of(names: tuple[str, ...]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def inner(*args: Any) -> tuple[Tensor, ...]:
                found = original(*args)
                mine = {name: x.clone() for name, x in zip(names, found, strict=False)}
                change(mine, next(x for x in args if isinstance(x, Plan)))
                return *mine.values(), *found[len(names) :]

            return inner

        return make

    with (
        changed(autograd, "_forward", of(("out", "lse"))),
        changed(autograd, "_backward", of(("dq", "dk", "dv", "dsinks"))),
    ):
        yield


def same(call: Call) -> Call:
    return call


def scaled(factor: float) -> Callable[[Call], Call]:
    return lambda call: replace(call, scale=call.scale * factor)


def uncapped(call: Call) -> Call:
    return replace(call, softcap=None)


def capped_higher(call: Call) -> Call:
    return replace(call, softcap=call.softcap and call.softcap * 1.01)


def _slope_twice() -> AbstractContextManager[object]:
    return changed(math_kernel, "_slope", lambda original: lambda *args: original(*args).square_())


class Faulty:
    """A kernel that is given other calls than it was asked for, and whose results are changed by `change`."""

    def __init__(
        self,
        kernel: Any,
        forward: Callable[[Call], Call],
        backward: Callable[[Call], Call],
        change: Callable[..., None] | None,
    ):
        self.kernel, self.other, self.change = kernel, (forward, backward), change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def takes_whole(self, q: Tensor, k: Tensor, call: Call) -> bool:
        """Else a local call would go past this kernel."""
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, into: Any = None) -> Any:
        found = self.kernel.forward(q, k, v, self.other[0](call), into)
        if self.change:
            self.change(call, *found)
        return found

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, into: Any = None) -> Any:  # fmt: skip
        found = self.kernel.backward(dout, q, k, v, out, lse, self.other[1](call), into)
        if self.change:
            self.change(call, *found)
        return found


def kernel(
    forward: Callable[[Call], Call] = same,
    backward: Callable[[Call], Call] = same,
    change: Callable[..., None] | None = None,
) -> Callable[[], AbstractContextManager[object]]:
    def wrapped(original: Any) -> Any:
        return lambda *args: Faulty(original(*args), forward, backward, change)

    return lambda: changed(plan.kernels, "select", wrapped)


def steps(change: Callable[[tuple[PlannedStep, ...], int], tuple[PlannedStep, ...]]) -> AbstractContextManager[object]:
    """Change a rank's planned steps; `change` is given its number, too."""

    def make(original: Any) -> Any:
        return lambda problem, rank, *args: change(original(problem, rank, *args), rank)

    return changed(plan, "plan_steps", make)


def zeroed(name: str, last: int | None = None, part: int | None = None) -> Callable[[], AbstractContextManager[object]]:
    """The last tokens of the sequence: so many, or that part of all. In a zigzag of two they are rank 0's last."""

    def change(found: Tensors, plan: Plan) -> None:
        if name in found and plan.rank == 0:
            n = last if last is not None else plan.problem.cu_seqlens[-1] // (part or 1)
            found[name][:, -n:] = 0

    return lambda: outputs(change)


def times(name: str, factor: float) -> Callable[[], AbstractContextManager[object]]:
    def change(found: Tensors, plan: Plan) -> None:
        if name in found:
            found[name] *= factor

    return lambda: outputs(change)


def element(name: str, change: Callable[[Tensor], None], rank: int = 1) -> Callable[[], AbstractContextManager[object]]:
    """One row of a head, `[D]`."""

    def inner(found: Tensors, plan: Plan) -> None:
        if name in found and plan.rank == rank:
            change(found[name][0, found[name].shape[1] // 2, 0])

    return lambda: outputs(inner)


def _later(when: Callable[[int], bool]) -> Callable[[], AbstractContextManager[object]]:
    def plant() -> AbstractContextManager[object]:
        forwards = [0]

        def change(found: Tensors, plan: Plan) -> None:
            forwards[0] += "out" in found
            if when(forwards[0]):
                for x in (x for name, x in found.items() if name != "lse"):
                    x[:, -1:] = 0

        return outputs(change)

    return plant


def _swap(a: str, b: str) -> AbstractContextManager[object]:
    def change(found: Tensors, plan: Plan) -> None:
        if a in found:
            found[a], found[b] = found[b], found[a]

    return outputs(change)


def _last_step_dropped(found: tuple[PlannedStep, ...], rank: int) -> tuple[PlannedStep, ...]:
    return *found[:-1], replace(found[-1], calls=())


def _last_key_dropped(found: tuple[PlannedStep, ...], rank: int) -> tuple[PlannedStep, ...]:
    """Of the remote shard's."""
    *before, last = found
    n = last.n_keys
    calls = tuple(LocalCall(each.q, ((0, n - 1),), each.call) for each in last.calls)
    return *before, replace(last, calls=calls)


def _one_key_too_many(found: tuple[PlannedStep, ...], rank: int) -> tuple[PlannedStep, ...]:
    def wider(each: LocalCall) -> LocalCall:
        return replace(each, call=replace(each.call, mask=Band(-1, 1))) if each.call.mask == CAUSAL else each

    return tuple(replace(step, calls=tuple(map(wider, step.calls))) for step in found)


def _chunks_swapped() -> AbstractContextManager[object]:
    def make(original: Any) -> Any:
        return lambda self, *args: tuple(tuple(reversed(shard)) for shard in original(self, *args))

    return changed(api.ContextParallel, "_shards", make)


def _merge(share: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[[], AbstractContextManager[object]]:
    """share: of (lse_a, lse_b) the factors of both parts and the LSE that is written."""

    def merged(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
        of_a, of_b, total = share(lse_a, lse_b)
        weigh = [x.transpose(-1, -2).unsqueeze(-1) for x in (of_a, of_b)]
        out.copy_(a * weigh[0] + b * weigh[1])
        lse.copy_(total)

    return lambda: changed(parts, "merge_eager", lambda original: merged)


def _not_rescaled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.logaddexp(a, b)
    return torch.ones_like(a), (b - total).exp(), total


def _not_normalised(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.maximum(a, b)
    return (a - top).exp(), (b - top).exp(), torch.logaddexp(a, b)


def _largest_lse(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.logaddexp(a, b)
    return (a - total).exp(), (b - total).exp(), torch.maximum(a, b)


def _too_large(factor: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Before out is rounded: 1.002 times a number that is rounded to bf16 is mostly the same number again."""

    def share(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.logaddexp(a, b)
        return (a - total).exp() * factor, (b - total).exp() * factor, total

    return share


def _twice(call: Any, *found: Tensor) -> None:
    """The gradients of a call on a remote rank's keys."""
    if len(found) == 3 and call.mask.full:
        for x in found:
            x.mul_(2)


def _head_halved(call: Any, *found: Tensor) -> None:
    """dk of a KV head, of a remote rank's keys."""
    if len(found) == 3 and call.mask.full:
        found[1][..., 1, :].mul_(0.5)


def _rank_left_out(call: Any, out: Tensor, lse: Tensor) -> None:
    if torch.distributed.get_rank() == 1:
        out.zero_()
        lse.fill_(-torch.inf)


def _batch_exchanged() -> AbstractContextManager[object]:
    def change(found: Tensors, plan: Plan) -> None:
        if "out" in found:
            found["out"] = found["out"].flip(0)

    return outputs(change)


def _kv_heads_swapped() -> AbstractContextManager[object]:
    """The ranks of an exchange get each other's KV heads: those of the tensors behind the queries."""

    def make(original: Any) -> Any:
        def inner(self: Any, *args: Any) -> None:
            original(self, *args)
            self.heads[1:] = [[list(reversed(part)) for part in share] for share in self.heads[1:]]

        return inner

    return changed(all_to_all.Group, "__init__", make)


def _packed_batch_leaks() -> AbstractContextManager[object]:
    """The first two sequences are one."""

    def make(original: Any) -> Any:
        def inner(self: Any, cu: Any, *args: Any) -> Any:
            return original(self, (cu[0], *cu[2:]), *args)

        return inner

    return changed(Variant, "problem", make)


def _border_moved() -> AbstractContextManager[object]:
    """The first token of the second sequence belongs to the first."""

    def make(original: Any) -> Any:
        def inner(self: Any, cu: Any, *args: Any) -> Any:
            return original(self, (cu[0], cu[1] + 1, *cu[2:]), *args)

        return inner

    return changed(Variant, "problem", make)


def _tile_wider() -> AbstractContextManager[object]:
    """Of a window one key more, wherever a mask is cut."""

    def make(original: Any) -> Any:
        def inner(mask: Any, *args: Any) -> Any:
            mask = mask.copy()
            mask[mask[:, LO] > -UNBOUNDED, LO] -= 1
            return original(mask, *args)

        return inner

    return changed(cuts, "cut", make)


def _band_wider() -> AbstractContextManager[object]:
    def make(original: Any) -> Any:
        return lambda mask, *args: original(Band(mask.left + 1, mask.right) if mask.left > 0 else mask, *args)

    return changed(decompose, "band_matrix", make)


def _parts_narrower() -> AbstractContextManager[object]:
    """Of each part's keys the first is lost."""

    def make(original: Any) -> Any:
        return lambda *args: [(q, (c + (d - c > 1), d), mask) for q, (c, d), mask in original(*args)]

    return changed(decompose, "cut", make)


def _mask(of: Callable[[bool, tuple[int, int]], Band]) -> Callable[[], AbstractContextManager[object]]:
    def make(original: Any) -> Any:
        return lambda causal=False, window=(-1, -1): of(causal, window)

    return lambda: changed(Band, "of", make)


@contextmanager
def _sums_in_bf16() -> Iterator[None]:
    def make(original: Any) -> Any:
        return lambda dtype: torch.bfloat16

    with (
        changed(grad_sum, "accumulation_dtype", make),
        changed(parts, "accumulation_dtype", make),
        changed(parts, "accumulation_dtype", make),
    ):
        yield


@contextmanager
def _keys_too_early() -> Iterator[None]:
    """A step computes on what lies in its buffers before anything has come."""
    before: list[tuple[Tensor, ...]] = []

    def noting(original: Any) -> Any:
        def inner(*args: Any) -> Any:
            made = original(*args)
            before.append(tuple(x.clone() for x in made))
            return made

        return inner

    def pulled(original: Any) -> Any:
        def inner(*args: Any) -> Any:
            before.clear()
            arriving = original(*args)
            arriving.early = before[-1] if before else None
            return arriving

        return inner

    def waited(original: Any) -> Any:
        def inner(self: Any) -> Any:
            early = getattr(self, "early", None)
            return original(self) if early is None else (original(self), early)[1]

        return inner

    with (
        changed(keys, "empty_pair", noting),
        changed(keys.LocalKeys, "pull", pulled),
        changed(keys.Arriving, "wait", waited),
    ):
        yield


def _math_scores() -> AbstractContextManager[object]:
    def make(original: Any) -> Any:
        return lambda q, k, call: original(q, k, scaled(1.05)(call))

    return changed(math_kernel, "_scores", make)


def _lse_of_remote_keys(call: Any, *found: Tensor) -> None:
    if len(found) == 2 and call.mask.full:
        found[1].add_(math.log(2))


def _lse_returned() -> AbstractContextManager[object]:
    def change(found: Tensors, plan: Plan) -> None:
        if "lse" in found:
            _raise_last(found["lse"])

    return outputs(change)


def _raise_last(lse: Tensor) -> Tensor:
    """By log 2, of the last quarter of the tokens."""
    lse[..., -(lse.shape[-1] // 4) :] += math.log(2)
    return lse


def _lse_saved() -> AbstractContextManager[object]:
    class OtherLse(Faulty):
        def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any) -> Any:
            return self.kernel.backward(dout, q, k, v, out, _raise_last(lse.clone()), *args)

    return changed(plan.kernels, "select", lambda original: lambda *args: OtherLse(original(*args), same, same, None))


def _lse_shifted() -> AbstractContextManager[object]:
    def change(found: Tensors, plan: Plan) -> None:
        if "lse" in found:
            found["lse"] = found["lse"].roll(1, -1)

    return outputs(change)


def _planned_as_causal() -> AbstractContextManager[object]:
    """Whatever the mask, the plan is of causal attention."""
    return changed(plan, "mask_of", lambda original: lambda *args: CAUSAL)


def _built_for_fewer_tokens() -> AbstractContextManager[object]:
    """The schedules cut a mask that was built for an eighth less tokens."""

    def make(original: Any) -> Any:
        return lambda self, tokens: original(self, tokens - tokens // 8)

    return changed(Mask, "rectangles", make)


def _other_mask_on_a_rank() -> AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def inner(self: NamedMask) -> Mask:
            return original(replace(self, parameters={"chunk": 96}) if dist.get_rank() == 1 else self)

        return inner

    return changed(NamedMask, "make", make)


@contextmanager
def _stale_keys_in_backward() -> Iterator[None]:
    """A backward computes on the remote keys that the backward before it has got."""
    state: dict[str, Any] = {"backward": False, "before": None}

    def noting(original: Any) -> Any:
        def inner(*args: Any) -> Any:
            state["backward"] = True
            try:
                return original(*args)
            finally:
                state["backward"] = False

        return inner

    def waited(original: Any) -> Any:
        def inner(self: Any) -> Any:
            found = original(self)
            if not state["backward"]:
                return found
            before, state["before"] = state["before"], tuple(x.clone() for x in found)
            return found if before is None or before[0].shape != found[0].shape else before

        return inner

    with changed(autograd, "_backward", noting), changed(keys.Arriving, "wait", waited):
        yield


def _nan_gradients(call: Any, *found: Tensor) -> None:
    if len(found) == 3:
        found[1].view(-1)[0] = torch.nan


@contextmanager
def sinks_dropped() -> Iterator[None]:
    """No executor applies them; their gradient is computed as if they were."""
    with ExitStack() as stack:
        for executor in (exchange, tree, dilated):
            stack.enter_context(changed(executor, "with_sinks", lambda original: _without_sinks))
        yield


def _without_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    return out, lse


def _pair_not_merged() -> AbstractContextManager[object]:
    return changed(dilated, "merge", lambda original: lambda *args: None)


@contextmanager
def _sinks_in_every_step() -> Iterator[None]:
    """Sinks join each step's partial result, and not the merged one."""
    now: list[Tensor | None] = []

    def noting(original: Any) -> Any:
        def inner(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Any:
            now[:] = [sinks]
            return original(q, k, v, plan, sinks)

        return inner

    def joined(call: Any, *found: Tensor) -> None:
        if len(found) == 2:
            with_sinks(*found, now[0])

    without = changed(exchange, "with_sinks", lambda original: _without_sinks)
    with changed(exchange, "forward", noting), without, kernel(change=joined)():
        yield


def _sinks_gradient_lost(found: Tensors, plan: Plan) -> None:
    if "dsinks" in found and plan.rank == 1:
        found["dsinks"].zero_()


def argument_dropped(*names: str) -> AbstractContextManager[object]:
    """A call is made without these arguments."""

    def make(original: Any) -> Any:
        return lambda self, *xs, **given: original(self, *xs, **{k: x for k, x in given.items() if k not in names})

    return changed(api.ContextParallel, "__call__", make)


def _values_cut_elsewhere() -> AbstractContextManager[object]:
    """Of padded values the dims from the second on."""
    return changed(padded_values, "_cut", lambda original: lambda x, like: original(x.roll(-1, -1), like))


def _borders_of_the_call_before(when: Callable[[], bool]) -> AbstractContextManager[object]:
    before: list[Any] = []

    def make(original: Any) -> Any:
        def inner(self: Any, *xs: Any, **given: Any) -> Any:
            before.append(given["cu_seqlens"])
            return original(self, *xs, **given | {"cu_seqlens": before[-2 if when() else -1 :][0]})

        return inner

    return changed(api.ContextParallel, "__call__", make)


PLANTS = [
    Plant("documents attend across borders", _planned_as_causal, "documents"),
    Plant("a window became causal", _planned_as_causal, "named window"),
    Plant("a mask built for another length", _built_for_fewer_tokens, "chunks"),
    Plant("ranks were given different masks", _other_mask_on_a_rank, "chunks"),
    Plant("stale keys in a ring's backward", _stale_keys_in_backward, "causal ring"),
    Plant("NaN gradients", kernel(change=_nan_gradients)),
    Plant("ring's last step dropped", lambda: steps(_last_step_dropped), "ring"),
    Plant("zigzag chunks swapped", _chunks_swapped),
    Plant("a shard's last key dropped", lambda: steps(_last_key_dropped), "ring"),
    Plant("one key too many", lambda: steps(_one_key_too_many)),
    Plant("backward scale x1.5", kernel(backward=scaled(1.5))),
    Plant("backward scale x1.01", kernel(backward=scaled(1.01))),
    Plant("backward scale x1.005", kernel(backward=scaled(1.005))),
    Plant("scale x1.01", kernel(scaled(1.01), scaled(1.01))),
    Plant("scale x1.0025", kernel(scaled(1.0025), scaled(1.0025))),
    Plant("dk of a head zeroed", lambda: outputs(_head_zeroed), "two heads"),
    Plant("dk of a head halved on remote keys", kernel(change=_head_halved), "two heads"),
    Plant("dk and dv swapped", lambda: _swap("dk", "dv")),
    Plant("dq of the last token zeroed", zeroed("dq", 1)),
    Plant("dq x1.005", times("dq", 1.005)),
    Plant("dq x1.01", times("dq", 1.01)),
    Plant("dk of the last 16 tokens zeroed", zeroed("dk", 16)),
    Plant("dk of one token and head zeroed", element("dk", Tensor.zero_)),
    Plant("dv of the last token zeroed", zeroed("dv", 1)),
    Plant("dv of the last 16 tokens zeroed", zeroed("dv", 16)),
    Plant("dv of the last 64 tokens zeroed", zeroed("dv", 64)),
    Plant("NaN in an element of out", element("out", lambda row: row[3].fill_(torch.nan)), "forward"),
    Plant("one element of out +0.03", element("out", lambda row: row[3].add_(0.03)), "forward"),
    Plant("out of the last sixteenth zeroed", zeroed("out", part=16), "forward"),
    Plant("out x1.002", _merge(_too_large(1.002)), "ring"),
    Plant("out x1.004", _merge(_too_large(1.004)), "ring"),
    Plant("out x1.006", _merge(_too_large(1.006)), "ring"),
    Plant("a merge does not rescale", _merge(_not_rescaled), "forward"),
    Plant("a merge does not normalise", _merge(_not_normalised), "forward"),
    Plant("a merge keeps the larger LSE", _merge(_largest_lse)),
    Plant("sums kept in bf16", _sums_in_bf16, "causal ring"),
    Plant("a step's gradients twice", kernel(change=_twice)),
    Plant("KV heads exchanged wrongly", _kv_heads_swapped, "ulysses"),
    Plant("a new packed batch has other borders", lambda: _borders_of_the_call_before(lambda: True), "new packs"),
    Plant(
        "a new packed batch has other borders once the check is over",
        lambda: _borders_of_the_call_before(lambda: STATE.checked),
        "new packs",
    ),
    Plant("a border token in the wrong sequence", _border_moved, "packed"),
    Plant("a packed batch leaks", _packed_batch_leaks, "packed"),
    Plant("a rank of a tree left out", kernel(change=_rank_left_out), "tree"),
    Plant("batch elements exchanged", _batch_exchanged, "batch"),
    Plant("tile off by one", _tile_wider, "ring window"),
    Plant("band_matrix off by one", _band_wider, "window"),
    Plant("decompose.parts off by one", _parts_narrower, "window"),
    Plant("causal lost in Band.of", _mask(lambda causal, window: Band(*window)), "causal ring"),
    Plant("window lost in Band.of", _mask(lambda causal, window: Band(-1, 0) if causal else Band(*window)), "window"),
    Plant("math scores wrong with kernel=math", _math_scores, "math"),
    Plant("LSE off by one token", _lse_shifted, "forward"),
    Plant("LSE of remote keys + log 2", kernel(change=_lse_of_remote_keys)),
    Plant("LSE for the backward + log 2", _lse_saved),
    Plant("LSE returned + log 2", _lse_returned, "forward"),
    Plant("keys used before they came", _keys_too_early),
    Plant("sinks dropped", lambda: sinks_dropped(), "sinks"),
    Plant("sinks applied in every step", lambda: _sinks_in_every_step(), "sinks"),
    Plant("a rank's part of the sinks' gradient lost", lambda: outputs(_sinks_gradient_lost), "sinks"),
    *(
        Plant(f"softcap={cap} {fault}", plant, f"softcap={cap}")
        for cap in SOFTCAPS
        for fault, plant in {
            "dropped": kernel(uncapped, uncapped),
            "dropped in the backward": kernel(backward=uncapped),
            "1% higher in the backward": kernel(backward=capped_higher),
            "with its slope twice": _slope_twice,
        }.items()
    ),
    Plant("the sinks' gradient halved", times("dsinks", 0.5), "sinks"),
    Plant("the sinks' gradient x1.02", times("dsinks", 1.02), "sinks"),
    Plant("sinks of a mixture dropped", lambda: sinks_dropped(), "dilated"),
    Plant("softcap of a mixture dropped", kernel(uncapped, uncapped), "dilated"),
    Plant("a pair of a mixture not merged", lambda: _pair_not_merged(), "dilated"),
    Plant("values cut off by one dim", lambda: _values_cut_elsewhere(), "values"),
    Plant("a decode's lengths dropped", lambda: argument_dropped("kv_lengths"), "lengths"),
    Plant("a decode's prefix dropped", lambda: argument_dropped("prefix", "prefix_tokens"), "prefix"),
    Plant("wrong from the second call on", _later(lambda number: number >= 2)),
    Plant("wrong in the timed call alone", _later(lambda number: number == 4)),
    Plant("wrong once the check is over", _later(lambda number: STATE.checked)),
]


def _head_zeroed(found: Tensors, plan: Plan) -> None:
    if "dk" in found:
        found["dk"][..., 1, :] = 0


@dataclass(frozen=True)
class Found:
    """What the gate said: why it failed, None where it passed; and of the numbers the worst parts of their tolerances."""

    why: str | None
    checked: dict[str, Any]
    timed: dict[str, Any] | None


def gate(me: Rank, spec: Experiment) -> Found:
    """Both checks, with an iteration between them as if it were timed."""
    STATE.checked = False
    work = AttentionWork(me, spec)
    with changed(Local, "__init__", _without_a_fault), changed(Local, "outputs", _without_a_fault):
        checked = check(me, spec, work)
    if not checked.fields["passed"]:
        return Found(checked.fields["why"], checked.fields, None)
    STATE.checked = True
    for which in work.passes:
        work.run(which)
    timed = check_timed(me, work, work, checked)
    return Found(timed["why"], checked.fields, timed)


def planted(me: Rank, runs: dict[str, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """For each run what the gate says of the code as it is, and for each plant why it failed (None: it passed)."""
    chosen = [plant for plant in PLANTS if plant.name in names]
    specs = {name: Experiment.from_plain(runs[name]) for name in dict.fromkeys(plant.run for plant in chosen)}
    shipped = {name: vars(gate(me, spec)) for name, spec in specs.items()}
    why = {}
    for plant in chosen:
        with plant.plant():
            try:
                why[plant.name] = gate(me, specs[plant.run]).why
            except UnsupportedHere as error:  # the ranks' agreement, before anything is computed
                why[plant.name] = str(error)
    return {"shipped": shipped, "why": why}


def timed(me: Rank, run: dict[str, Any], name: str) -> dict[str, Any]:
    """The result of a whole run with a fault, which knows when the timing begins."""
    STATE.checked = False

    def make(original: Any) -> Any:
        def inner(*args: Any) -> Any:
            STATE.checked = True
            return original(*args)

        return inner

    plant = next(plant for plant in PLANTS if plant.name == name)
    with changed(timing, "measure", make), plant.plant():
        return job.run(me, run, None)
