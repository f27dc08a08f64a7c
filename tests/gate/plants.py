"""Faults planted in the real code, one at a time, and what the gate says of them. A fault is an entry of `PLANTS`, under the run of
`RUNS` that it shows in: the seams that it changes."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attention import api, autograd, plan
from attention.executors import all_to_all, dilated, exchange, keys, tree
from attention.executors.plan import LocalCall
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
from runner.config.experiment import Experiment, NamedMask
from runner.config.values import UnsupportedHere
from runner.measure import timing
from runner.measure.attention_work import AttentionWork
from tests.jobs.program import begun

SOFTCAPS = (1, 50)
RUNS = {  # the variant and overrides, all in a world of 2
    "zigzag": "zigzag",
    "forward": "zigzag mode=forward",
    "ring": "ring causal=false mode=forward",
    "causal ring": "ring",
    "two heads": "zigzag kv_heads=2",
    "math": "zigzag mode=forward kernel=math",
    "ulysses": "ulysses mode=forward kv_heads=2",
    "documents": "ring mask=documents",
    "named window": "ring mask=sliding_window",
    "chunks": "llama3 mask=chunked",
    "ring window": "ring mode=forward window=[100,0]",
    "window": "ring_allgather mode=forward window=[100,0]",
    "packed": "llama3 mode=forward seqlens=[100,50,62,30,70,110,90]",
    "new packs": "llama3 timing.new_packs=true seqlens=[100,50,62,30,70,110,90]",
    "batch": "zigzag mode=forward batch=2",
    "tree": "tree causal=false mode=forward q_len=16",
    "lengths": "tree causal=false mode=forward batch=2 q_len=4 kv_lengths=[300,100]",
    "prefix": "tree causal=false mode=forward batch=2 q_len=4 prefix=64",
    "sinks": "zigzag sinks=true",
    **{f"softcap={cap}": f"zigzag softcap={cap}" for cap in SOFTCAPS},
    "dilated": "ring_dilated attention.mixing=longnet attention.segments=[64,512] attention.rates=[1,2] sinks=true softcap=1",
    "values": "zigzag v_head_dim=8 kernel=sdpa_flash",
}


def overrides(run, dtype):
    """The command line of a run of 512 tokens."""
    size = "batch=1 heads=2 kv_heads=1 head_dim=16 seq_len=512 world_size=2"
    return f"{size} dtype={dtype} {'' if 'mask=' in RUNS[run] else 'causal=true'} attention={RUNS[run]}"


@dataclass
class State:
    checked: bool = False  # whether the check before the timing is over
    alone: bool = False  # whether a local call runs, in which no fault is planted
    calls: int = 0  # forwards since the fault was planted
    backward: bool = False  # whether one runs
    before: Any = None  # what a fault remembers of an earlier call


STATE = State()


def _forget():
    built.cache_clear()
    schedules.known.cache_clear()


@contextmanager
def changed(*seams):
    """Functions are replaced. A seam: an object, the name of one of its functions, and what is called instead, with the function
    and its arguments. Schedules made with them or without are forgotten."""
    vars(STATE).update(vars(State()))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, planted in seams:
            patch.setattr(owner, name, _unless_alone(vars(owner)[name], planted))
        try:
            _forget()
            yield
        finally:
            _forget()


def _unless_alone(own, planted):
    def either(*args, **given):
        return own(*args, **given) if STATE.alone else planted(own, *args, **given)

    return staticmethod(either) if isinstance(own, staticmethod) else either


def _without_a_fault(original, *args):
    STATE.alone = True
    _forget()
    try:
        return original(*args)
    finally:
        STATE.alone = False
        _forget()


def result(owner, name, change):
    """Change what a function returns."""
    return [(owner, name, lambda original, *args: change(original(*args)))]


def argument(owner, name, at, change):
    """Change one of a function's arguments."""
    return [(owner, name, lambda original, *args: original(*args[:at], change(args[at]), *args[at + 1 :]))]


def call(change):
    """Change the keyword arguments of a call of the library."""
    return [(api.ContextParallel, "__call__", lambda original, *xs, **given: original(*xs, **change(given)))]


def outputs(change):
    """Change what a rank's forward or backward gives, as `change` finds it there by name; nothing that is saved."""

    def of(*names):
        def planted(original, *args):
            results = original(*args)
            mine = {name: x.clone() for name, x in zip(names, results, strict=False)}
            change(mine)
            return *mine.values(), *results[len(names) :]

        return planted

    return [(autograd, "_forward", of("out", "lse")), (autograd, "_backward", of("dq", "dk", "dv", "dsinks"))]


def output(name, change, rank=None):
    """Change one of them in place, on one rank or on all."""
    return outputs(lambda mine: change(mine[name]) if name in mine and rank in (None, dist.get_rank()) else None)


def last_zeroed(name, tokens):
    """Of the sequence: in a zigzag of two they are rank 0's last."""
    return output(name, lambda x: x[:, -tokens:].zero_(), rank=0)


def _row(x):
    """One row of a head, `[D]`."""
    return x[0, x.shape[1] // 2, 0]


def scaled(factor):
    return lambda call: replace(call, scale=call.scale * factor)


def uncapped(call):
    return replace(call, softcap=None)


class Faulty:
    """A kernel that is given other calls than it was asked for, and whose results are changed."""

    def __init__(self, kernel, calls, change):
        self.kernel, self.calls, self.change = kernel, calls, change

    def __getattr__(self, name):
        own = getattr(self.kernel, name)
        return partial(self.run, own, self.calls[name]) if name in self.calls else own

    def takes_whole(self, *_):
        """Else a local call would go past this kernel."""
        return False

    def run(self, own, other, *args):
        results = own(*(other(x) if isinstance(x, Call) else x for x in args))
        self.change(next(x for x in args if isinstance(x, Call)), *results)
        return results


def kernel(forward=lambda call: call, backward=lambda call: call, change=lambda call, *results: None):
    """forward, backward: another call. change: of a call's results in place."""
    return result(plan.kernels, "select", lambda own: Faulty(own, {"forward": forward, "backward": backward}, change))


def of_remote(results, change):
    """Change results of calls on a remote rank's keys: two of a forward, or three of a backward."""
    return kernel(change=lambda call, *xs: change(*xs) if len(xs) == results and call.mask.full else None)


def steps(change):
    """Change a rank's planned steps."""
    return result(plan, "plan_steps", change)


def _last_key_dropped(planned):
    """Of the remote shard's."""
    *before, last = planned
    calls = tuple(LocalCall(local.q, ((0, last.n_keys - 1),), local.call) for local in last.calls)
    return *before, replace(last, calls=calls)


def _one_key_too_many(planned):
    def wider(local):
        return replace(local, call=replace(local.call, mask=Band(-1, 1))) if local.call.mask == CAUSAL else local

    return tuple(replace(step, calls=tuple(map(wider, step.calls))) for step in planned)


def merge(share):
    """share: of both LSEs and the merged one, the factors of both parts and the LSE that is written."""

    def merged(_, out, lse, a, lse_a, b, lse_b):
        *factors, total = share(lse_a, lse_b, torch.logaddexp(lse_a, lse_b))
        of_a, of_b = (x.transpose(-1, -2).unsqueeze(-1) for x in factors)
        out.copy_(a * of_a + b * of_b)
        lse.copy_(total)

    return [(parts, "merge_eager", merged)]


def _kv_heads_swapped(original, self, *args):
    """The ranks of an exchange get each other's KV heads: those of the tensors behind the queries."""
    original(self, *args)
    self.heads[1:] = [[list(reversed(part)) for part in share] for share in self.heads[1:]]


def lengths(change):
    """A problem is made for other sequences."""
    return argument(Variant, "problem", 1, change)


def _wider(mask):
    """Of a window one key more."""
    mask = mask.copy()
    mask[mask[:, LO] > -UNBOUNDED, LO] -= 1
    return mask


def band(make):
    return [(Band, "of", lambda original, causal=False, window=(-1, -1): make(causal, window))]


def _too_early(original, self):
    """A step computes on what lies in its buffers before anything has come."""
    arrived = original(self)
    return arrived if self.transfer is None else tuple(map(torch.zeros_like, arrived))


def _in_backward(original, *args):
    STATE.backward = True
    grads = original(*args)
    STATE.backward = False
    return grads


def _stale(original, self):
    arrived, before = original(self), STATE.before
    if STATE.backward:
        STATE.before = tuple(x.clone() for x in arrived)
    return before if STATE.backward and before and before[0].shape == arrived[0].shape else arrived


def _raise_last(lse):
    """By log 2, of the last quarter of the tokens."""
    lse[..., -(lse.shape[-1] // 4) :] += math.log(2)
    return lse


def _sinks_noted(original, q, k, v, plan, sinks=None):
    STATE.before = sinks
    return original(q, k, v, plan, sinks)


SINKS_DROPPED = [
    (executor, "with_sinks", lambda original, out, lse, sinks: (out, lse)) for executor in (exchange, tree, dilated)
]
SINKS_IN_EVERY_STEP = [
    SINKS_DROPPED[0],
    (exchange, "forward", _sinks_noted),
    *kernel(change=lambda call, *xs: with_sinks(*xs, STATE.before) if len(xs) == 2 else None),
]
UNCAPPED = kernel(uncapped, uncapped)
PLANNED_AS_CAUSAL = result(plan, "mask_of", lambda mask: CAUSAL)


def argument_dropped(*names):
    return call(lambda given: {name: x for name, x in given.items() if name not in names})


def borders_of_the_call_before(when):
    def change(given):
        before, STATE.before = STATE.before, given["cu_seqlens"]
        return given | {"cu_seqlens": before} if before is not None and when() else given

    return call(change)


def later(when):
    """The last token of every output but the LSE is zeroed."""

    def change(mine):
        STATE.calls += "out" in mine
        if when():
            for name in mine.keys() - {"lse"}:
                mine[name][:, -1:] = 0

    return outputs(change)


PLANTS = {
    "zigzag": {
        "NaN gradients": kernel(change=lambda call, *xs: xs[1].view(-1)[0].fill_(torch.nan) if len(xs) == 3 else None),
        "chunks swapped": result(api.ContextParallel, "_shards", lambda shards: tuple(shard[::-1] for shard in shards)),
        "one key too many": steps(_one_key_too_many),
        "backward scale x1.005": kernel(backward=scaled(1.005)),
        "scale x1.0025": kernel(scaled(1.0025), scaled(1.0025)),
        "dk and dv swapped": outputs(lambda x: x.update(dk=x["dv"], dv=x["dk"]) if "dk" in x else None),
        "dq of the last token zeroed": last_zeroed("dq", 1),
        "dv of the last token zeroed": last_zeroed("dv", 1),
        "dq x1.005": output("dq", lambda x: x.mul_(1.005)),
        "dk of the last 16 tokens zeroed": last_zeroed("dk", 16),
        "dk of one token and head zeroed": output("dk", lambda x: _row(x).zero_(), rank=1),
        "a merge keeps the larger LSE": merge(
            lambda a, b, lse: ((a - lse).exp(), (b - lse).exp(), torch.maximum(a, b))
        ),
        "a step's gradients twice": of_remote(3, lambda *gradients: [x.mul_(2) for x in gradients]),
        "LSE of remote keys + log 2": of_remote(2, lambda out, lse: lse.add_(math.log(2))),
        "LSE for the backward + log 2": argument(autograd, "_backward", 6, lambda lse: _raise_last(lse.clone())),
        "keys used before they came": [(keys.Arriving, "wait", _too_early)],
        "wrong from the second call on": later(lambda: STATE.calls >= 2),
        "wrong in the timed call alone": later(lambda: STATE.calls == 4),
        "wrong once the check is over": later(lambda: STATE.checked),
    },
    "forward": {
        "NaN in an element of out": output("out", lambda x: _row(x)[3].fill_(torch.nan), rank=1),
        "one element of out +0.03": output("out", lambda x: _row(x)[3].add_(0.03), rank=1),
        "out of the last 32 tokens zeroed": last_zeroed("out", 32),
        "a merge does not rescale": merge(lambda a, b, lse: (torch.ones_like(a), (b - lse).exp(), lse)),
        "a merge does not normalise": merge(
            lambda a, b, lse: ((a - torch.maximum(a, b)).exp(), (b - torch.maximum(a, b)).exp(), lse)
        ),
        "LSE off by one token": output("lse", lambda x: x.copy_(x.roll(1, -1))),
        "LSE returned + log 2": output("lse", _raise_last),
    },
    "ring": {
        "ring's last step dropped": steps(lambda planned: (*planned[:-1], replace(planned[-1], calls=()))),
        "a shard's last key dropped": steps(_last_key_dropped),
        # before out is rounded: 1.002 times a number that is rounded to bf16 is mostly the same number again
        "out x1.002": merge(lambda a, b, lse: ((a - lse).exp() * 1.002, (b - lse).exp() * 1.002, lse)),
    },
    "causal ring": {
        "stale keys in a ring's backward": [(autograd, "_backward", _in_backward), (keys.Arriving, "wait", _stale)],
        "sums kept in bf16": [
            *result(grad_sum, "accumulation_dtype", lambda dtype: torch.bfloat16),
            *result(parts, "accumulation_dtype", lambda dtype: torch.bfloat16),
        ],
        "causal lost in Band.of": band(lambda causal, window: Band(*window)),
    },
    "two heads": {
        "dk of a head zeroed": output("dk", lambda x: x[..., 1, :].zero_()),
        "dk of a head halved on remote keys": of_remote(3, lambda dq, dk, dv: dk[..., 1, :].mul_(0.5)),
    },
    "math": {"math scores wrong with kernel=math": argument(math_kernel, "_scores", 2, scaled(1.05))},
    "ulysses": {"KV heads exchanged wrongly": [(all_to_all.Group, "__init__", _kv_heads_swapped)]},
    "documents": {"documents attend across borders": PLANNED_AS_CAUSAL},
    "named window": {"a window became causal": PLANNED_AS_CAUSAL},
    "chunks": {
        "a mask built for another length": argument(Mask, "rectangles", 1, lambda tokens: tokens - tokens // 8),
        "ranks were given different masks": argument(
            NamedMask, "make", 0, lambda mask: replace(mask, parameters={"chunk": 96}) if dist.get_rank() == 1 else mask
        ),
    },
    "ring window": {"tile off by one": argument(cuts, "cut", 0, _wider)},
    "window": {
        "band_matrix off by one": argument(
            decompose, "band_matrix", 0, lambda mask: Band(mask.left + 1, mask.right) if mask.left > 0 else mask
        ),
        "decompose.parts off by one": result(  # of each part's keys the first is lost
            decompose, "cut", lambda parts: [(q, (c + (d - c > 1), d), mask) for q, (c, d), mask in parts]
        ),
        "window lost in Band.of": band(lambda causal, window: Band(-1, 0) if causal else Band(*window)),
    },
    "packed": {
        "a border token in the wrong sequence": lengths(lambda cu: (cu[0], cu[1] + 1, *cu[2:])),
        "a packed batch leaks": lengths(lambda cu: (cu[0], *cu[2:])),
    },
    "new packs": {
        "a new packed batch has other borders": borders_of_the_call_before(lambda: True),
        "a new packed batch has other borders once the check is over": borders_of_the_call_before(
            lambda: STATE.checked
        ),
    },
    "batch": {"batch elements exchanged": output("out", lambda x: x.copy_(x.flip(0)))},
    "tree": {
        "a rank of a tree left out": kernel(
            change=lambda call, out, lse: (out.zero_(), lse.fill_(-torch.inf)) if dist.get_rank() == 1 else None
        )
    },
    "lengths": {"a decode's lengths dropped": argument_dropped("kv_lengths")},
    "prefix": {"a decode's prefix dropped": argument_dropped("prefix", "prefix_tokens")},
    "sinks": {
        "sinks dropped": SINKS_DROPPED,
        "sinks applied in every step": SINKS_IN_EVERY_STEP,
        "a rank's part of the sinks' gradient lost": output("dsinks", Tensor.zero_, rank=1),
        "the sinks' gradient x1.02": output("dsinks", lambda x: x.mul_(1.02)),
    },
    **{
        f"softcap={cap}": {
            f"softcap={cap} dropped": UNCAPPED,
            f"softcap={cap} dropped in the backward": kernel(backward=uncapped),
            f"softcap={cap} 1% higher in the backward": kernel(
                backward=lambda call: replace(call, softcap=call.softcap and call.softcap * 1.01)
            ),
            f"softcap={cap} with its slope twice": result(math_kernel, "_slope", Tensor.square_),
        }
        for cap in SOFTCAPS
    },
    "dilated": {
        "sinks of a mixture dropped": SINKS_DROPPED,
        "softcap of a mixture dropped": UNCAPPED,
        "a pair of a mixture not merged": [(dilated, "merge", lambda original, *args: None)],
    },
    "values": {"values cut off by one dim": argument(padded_values, "_cut", 0, lambda x: x.roll(-1, -1))},
}


def gate(me, spec):
    """Why both checks, with an iteration between them as if it were timed, fail, None where they pass; and what they found."""
    work = AttentionWork(me, spec)
    with changed((Local, "__init__", _without_a_fault), (Local, "outputs", _without_a_fault)):
        checked = check(me, spec, work)
    correctness = checked.correctness
    if not correctness.passed:
        return correctness.why, correctness, None
    STATE.checked = True
    for which in work.passes:
        work.run(which)
    timed = check_timed(me, work, work, checked)
    return timed.why, correctness, timed


def shipped(me, runs):
    """By run what the gate says of the code as it is, without the runs that the kernel cannot do."""
    found = {}
    for name, run in runs.items():
        with suppress(UnsupportedHere):
            found[name] = gate(me, Experiment.from_plain(run))
    return found


def planted(me, runs):
    """By fault why the gate failed (None: it passed)."""
    why = {}
    for run, faults in PLANTS.items():
        for name, seams in faults.items():
            with changed(*seams):
                try:
                    why[name] = gate(me, Experiment.from_plain(runs[run]))[0]
                except UnsupportedHere as error:  # the ranks' agreement, before anything is computed
                    why[name] = str(error)
    return why


def timed(me, run, name):
    """A whole run with a fault of a zigzag, which knows when the timing begins."""

    def measured(original, *args):
        STATE.checked = True
        return original(*args)

    with changed((timing, "measure", measured), *PLANTS["zigzag"][name]):
        return job.run(me, begun(run))
