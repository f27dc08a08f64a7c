"""Attention as a workload: seeded inputs, sharded, with the forward and backward of one call."""

from __future__ import annotations

import math
import random
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attention
from attention.api import ContextParallel
from attention.call import Settings
from attention.executors.plan import Plan
from attention.geometry import counts
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import masks, steps
from attention.kernels import Call, Shape, passed_over
from attention.masks.mask import built
from attention.transports.interface import Transport
from attention.variants.registry import variant
from runner.config.experiment import NEW_PACKS, AttentionCall, Experiment
from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank
from runner.peers import Package, function

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NAMES = ("q", "k", "v", "dout")
SINKS = "dsinks"
# an output has a row for each query or each key, or one row for all
ROLES = {"out": "q", "dq": "q", "dk": "kv", "dv": "kv", "lse": "q", SINKS: "all"}
GRADIENTS = ("dq", "dk", "dv", SINKS)

_rates: dict[Any, float] = {}  # FLOP/s of kernels, measured by this process


def row_shape(work: AttentionCall, which: str) -> tuple[int, int, int]:
    """Tokens, heads and head dim of a batch element of a whole input."""
    keys = which in ("k", "v")
    tokens, heads = (work.seq_len, work.kv_heads) if keys else (work.queries, work.heads)
    return tokens, heads, work.value_dim if which in ("v", "dout") else work.head_dim


def global_input(experiment: Experiment, which: str, device: torch.device, batch: int | None = None) -> Tensor:
    """One whole input `[B, S, H, D]` (or one batch element of it; packed `[T, H, D]`), v and dout with their own head dim: normal,
    clamped to [-1, 1], the same on every rank. Each batch element has its own generator, so that one can be made without the
    others. q is multiplied by `score_factor`. Beside sinks v and dout are 0.5 higher, since in the sum of dout.out over all tokens,
    the sinks' gradient, symmetric ones cancel. The dout of dilated attention is multiplied by what its result is divided by: many
    elements are 1 or -1, and their thirds all round the same way."""
    work, seed, dilation = experiment.workload, experiment.seed, experiment.dilation
    factor = score_factor(work) if which == "q" else 1
    if which == "dout" and dilation is not None:
        factor = dilation.divisor
    parts = []
    for b in range(work.batch) if batch is None else [batch]:
        x = _normal(row_shape(work, which), which, seed, b, device)
        if work.sinks and which in ("v", "dout"):
            x += 0.5
        parts.append(x.mul_(factor).to(DTYPES[work.dtype]))
    return parts[0] if work.seqlens else torch.stack(parts)


def score_factor(work: AttentionCall) -> int:
    """What q is multiplied by so that scores come near a softcap: their standard deviation becomes about a quarter of it, at
    most 16. A power of two, which rounds nothing; 1 without a softcap."""
    deviation = abs(work.scale_of_scores) * work.head_dim**0.5 / 2
    if work.softcap is None or not deviation:
        return 1
    return 2 ** round(max(0.0, min(10.0, math.log2(min(work.softcap / 4, 16) / deviation))))


def global_prefix(experiment: Experiment, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The shared prefix's (k, v) `[1, N_p, Hk, .]`, made like one more batch element; None for a call without."""
    work = experiment.workload
    if not work.prefix:
        return None
    found = []
    for which in ("k", "v"):
        shape = (work.prefix, *row_shape(work, which)[1:])
        found.append(_normal(shape, which, experiment.seed, work.batch, device).to(DTYPES[work.dtype]).unsqueeze(0))
    return found[0], found[1]


def _normal(shape: tuple[int, int, int], which: str, seed: int, element: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed((seed * 4 + NAMES.index(which)) * 65_537 + element)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(generator=generator).clamp_(-1, 1)


def global_sinks(work: AttentionCall, seed: int, device: torch.device) -> Tensor | None:
    """The sinks `[H]`, the same on every rank; None for a call without. They are normal around the logarithm of the keys that a query
    sees on average, so that a sink weighs about as much as these do, at any length."""
    if not work.sinks:
        return None
    generator = torch.Generator(device).manual_seed((seed * 4 + len(NAMES)) * 65_537 - 1)
    x = torch.empty(work.heads, dtype=torch.float32, device=device).normal_(generator=generator)
    return (x + math.log(max(work.batch_pairs / (work.batch * work.queries), 1))).to(DTYPES[work.dtype])


def build(experiment: Experiment, group: Any = None) -> ContextParallel:
    """A function of the library, or a peer. Raises UnsupportedHere or ValueError as `attention.make` does."""
    if experiment.is_peer:
        return function.make(
            experiment.variant,
            group=group,
            kernel=experiment.kernel,
            transport=experiment.transport,
            deterministic=experiment.deterministic,
            replay=experiment.replay,
            **experiment.options,
        )
    return attention.make(
        experiment.variant,
        group=group,
        kernel=experiment.kernel,
        transport=experiment.transport,
        deterministic=experiment.deterministic,
        replay=experiment.replay,
        agreement=experiment.agreement,
        **experiment.call_options,
    )


def alone(experiment: Experiment) -> ContextParallel:
    """The same global call on one device, within a world of several."""
    chosen = variant(experiment.variant)
    options = chosen.parse(experiment.options)
    # the other ranks do not make these calls: no agreement
    fn = ContextParallel(
        Settings(chosen, options, experiment.kernel, "auto", experiment.deterministic, "none", 0.0, False)
    )
    fn.world, fn.rank = 1, 0
    return fn


class AttentionWork:
    """A rank's shards of the inputs, and the passes over them: implements `workload.Workload`. Raises UnsupportedHere if the
    kernel cannot do the call."""

    def __init__(self, me: Rank, experiment: Experiment, fn: ContextParallel | None = None):
        fn = build(experiment) if fn is None else fn
        work = self.spec = experiment.workload
        self.me, self.experiment, self.fn = me, experiment, fn
        self.has_phases = not experiment.is_peer
        self.autograd_thread: bool = experiment.timing.autograd_thread
        self.backward = experiment.backward
        self.passes: tuple[str, ...] = ("forward", "backward") if self.backward else ("forward",)
        self.cu_seqlens = work.cu_seqlens if work.seqlens else None
        self.inputs: list[Tensor] = []
        for which in NAMES if self.backward else NAMES[:3]:
            shard = self.drawn(self.shard_of_input(which).detach())
            self.inputs.append(shard.requires_grad_(self.backward and which != "dout"))
        self.q, self.k, self.v = self.inputs[:3]
        self.dout = self.inputs[3] if self.backward else None
        self.wanted = [self.q, self.k, self.v]  # whose gradients a backward gives
        self.options: dict[str, Any] = {"causal": work.causal, "window": work.window, "cu_seqlens": self.cu_seqlens}
        self.options |= {"scale": work.scale, "softcap": work.softcap}
        if (sinks := global_sinks(work, experiment.seed, me.device)) is not None:
            self.wanted.append(sinks.requires_grad_(self.backward))
            self.options["sinks"] = sinks
        if work.named_mask is not None:
            self.options["mask"] = work.named_mask.make()
        if work.q_len is not None:
            self.options |= {"kv_tokens": work.seq_len, "kv_lengths": work.kv_lengths}
        try:
            self.plan = fn.plan(self.q, self.k, self.v, **self.options)
        except ValueError as error:
            raise UnsupportedHere(str(error)) from None
        if (prefix := global_prefix(experiment, me.device)) is not None:
            self.inputs += [self.drawn(fn.shard(x, role="kv")) for x in prefix]
            self.options |= {"prefix": tuple(self.inputs[-2:]), "prefix_tokens": work.prefix}
        self.out: Tensor | None = None
        self.gradients: tuple[Tensor, ...] = ()
        self.last: Tensor | None = None  # the out of the last backward

    def whole_input(self, which: str) -> Tensor:
        return global_input(self.experiment, which, self.me.device)

    def shard_of_input(self, which: str) -> Tensor:
        return self.fn.shard(self.whole_input(which), self.cu_seqlens, role="kv" if which in ("k", "v") else "q")

    def drawn(self, shard: Tensor) -> Tensor:
        """The values of a shard of `whole_input`."""
        return shard

    def call(self) -> Tensor:
        out: Tensor = self.fn(self.q, self.k, self.v, **self.options)
        return out

    def run(self, which: str) -> None:
        if which == "forward":
            self.out = self.last = None  # freed first: not part of this iteration's memory
            self.out = self.call()
        else:
            self._backward(keep=False)

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            if which == "forward":
                self.run("forward")
            else:
                self._backward(keep=True)

    def _backward(self, keep: bool) -> None:
        assert self.out is not None and self.dout is not None, "backward before forward"
        self.gradients = ()
        with torch.autograd.set_multithreading_enabled(self.autograd_thread):
            self.gradients = torch.autograd.grad(self.out, self.wanted, self.dout, retain_graph=keep)
        self.last = self.out
        if not keep:
            self.out = None

    def outputs(self) -> dict[str, Tensor]:
        if not self.backward:
            return {} if self.out is None else {"out": self.out.detach()}
        if self.last is None or not self.gradients:
            return {}
        found = {"out": self.last.detach(), **dict(zip(GRADIENTS, self.gradients, strict=False))}
        return found | ({SINKS: found[SINKS].view(1, -1, 1)} if SINKS in found else {})

    @property
    def left(self) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        return self.out, self.last, self.gradients

    @left.setter
    def left(self, left: tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]) -> None:
        self.out, self.last, self.gradients = left

    def negate(self) -> None:
        """Changes the sign of q, k, v and dout, in place. The scores keep theirs; out, dq, dk and dv change it, dsinks does not."""
        with torch.no_grad():
            for x in self.inputs:
                x.neg_()

    def release(self) -> None:
        self.out = self.last = None
        self.gradients = ()

    @property
    def transport(self) -> Transport:
        return self.plan.transport

    def resolved(self) -> dict[str, Any]:
        return self.plan.options.plain()

    def report(self) -> dict[str, Any]:
        """kernel, transport and a note on them; with kernel=auto why preferred kernels were passed over."""
        kernel, chosen = self.plan.kernel.name, self.fn.variant
        own = chosen.served(kernel) if isinstance(chosen, Package) else getattr(self.plan.kernel, "note", None)
        divided = self.plan.problem.schedule.note(self.plan.problem)
        notes = [None if isinstance(chosen, Package) else self.transport.note, own, divided]
        found: dict[str, Any] = {"kernel": kernel, "transport": self.transport.name}
        found["note"] = "; ".join(filter(None, notes)) or None
        if not isinstance(chosen, Package) and self.experiment.kernel == "auto":
            shape = Shape.of(self.q, self.k, self.v, self.backward, self.spec.softcap is not None)
            if self.plan.problem.is_cut:  # into packed calls
                shape = replace(shape, packed=True)
            found["passed_over"] = passed_over(kernel, shape, masks(self.plan.problem), chosen.decode)
        return found

    def mask_build_ms(self) -> float | None:
        return build_ms(self.plan)

    def flops(self) -> float:
        forward = max(counts.rank_flops(self.plan.problem, self.spec.shapes))
        return forward * (1 + self.spec.shapes.backward_ratio if self.backward else 1)

    def rate(self) -> float:
        """FLOP/s of a small call of the same kernel on this rank."""
        spec, kernel = self.spec, self.plan.kernel
        key = kernel.name, spec.dtype, spec.head_dim, spec.value_dim, self.me.device.type
        if key not in _rates:
            n, heads = min(spec.seq_len, 4096 if self.me.device.type == "cuda" else 512), min(spec.heads, 8)
            sizes = counts.Shapes(1, heads, heads, spec.head_dim, self.q.itemsize, spec.v_head_dim)
            q, v = (
                torch.randn(1, n, heads, dim, device=self.me.device).to(self.q.dtype)
                for dim in (spec.head_dim, spec.value_dim)
            )

            def call() -> None:
                kernel.forward(q, q, v, Call(spec.head_dim**-0.5))
                self.me.synchronize()

            self.me.synchronize()
            _rates[key] = counts.forward_flops(sizes, n * n) / min(timeit.repeat(call, number=1, repeat=3))
        return _rates[key]

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, which has the rows of the output `name`."""
        return whole if ROLES[name] == "all" else self.fn.shard(whole, self.cu_seqlens, role=ROLES[name])

    def rows(self, name: str) -> Tensor:
        if ROLES[name] == "all":
            return torch.zeros(1, dtype=torch.int64)
        tokens = torch.arange(self.spec.seq_len if ROLES[name] == "kv" else self.spec.queries)
        shape = (-1, 1, 1) if self.cu_seqlens is not None else (1, -1, 1, 1)
        return self.shard(name, tokens.view(shape)).flatten()

    def layered(self, layers: int, new_packs: bool) -> Layers:
        return Layers(self, layers, self.other_packs(NEW_PACKS) if new_packs else ())

    def other_packs(self, n: int) -> list[CuSeqlens]:
        lengths = self.spec.seqlens
        assert lengths, "new_packs for a batch that is not packed"
        return other_orders(lengths, n, self.experiment.seed)

    @contextmanager
    def new_pack(self, sign: int) -> Iterator[AttentionCall]:
        original = self.cu_seqlens
        (other,) = self.other_packs(1)
        self._take(other, sign)
        try:
            yield replace(self.spec, seqlens=tuple(b - a for a, b in pairwise(other)))
        finally:
            self._take(original, 1)

    def _take(self, cu_seqlens: CuSeqlens | None, sign: int) -> None:
        """Replaces the inputs by those of a packed batch, times the sign. Nothing is planned for it."""
        self.cu_seqlens = self.options["cu_seqlens"] = cu_seqlens
        with torch.no_grad():
            for which, x in zip(NAMES, self.inputs, strict=False):
                x.copy_(self.shard_of_input(which)).mul_(sign)

    def more(self) -> dict[str, Any]:
        return {}

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """An output of all ranks, from this rank's. Collective."""
        if ROLES[name] != "all":
            return self.fn.unshard(mine, self.cu_seqlens)
        if self.fn.layout.replicated or self.me.world == 1:
            return mine
        total = mine.double()  # a parameter's gradient: each rank has its queries' part
        dist.all_reduce(total)
        return total


def other_orders(lengths: Sequence[int], n: int, seed: int) -> list[CuSeqlens]:
    """n different packed batches: the same lengths, not in the given order."""
    draw, order = random.Random(seed), list(lengths)
    found: dict[CuSeqlens, None] = {}
    given = tuple(accumulate(lengths, initial=0))
    while len(found) < n:
        draw.shuffle(order)
        one = tuple(accumulate(order, initial=0))
        if one != given:
            found[one] = None
    return list(found)


class Layers:
    """The passes of a model with `layers` layers, all with the same inputs: every layer's forward, then every layer's backward,
    the last layer first. batches: the cu_seqlens of the iterations, in turn; by default always those of `work`."""

    def __init__(self, work: AttentionWork, layers: int, batches: Sequence[CuSeqlens] = ()):
        self.work, self.layers, self.passes = work, layers, work.passes
        self.batches = cycle(batches or [work.cu_seqlens])
        self.outs: list[Tensor | None] = []

    def run(self, which: str) -> None:
        work = self.work
        if which == "forward":
            work.options["cu_seqlens"] = next(self.batches)
            for _ in range(self.layers):
                work.run("forward")
                if work.backward:
                    self.outs.append(work.out)
            work.options["cu_seqlens"] = work.cu_seqlens
        else:
            while self.outs:
                work.out = self.outs.pop()
                work.run("backward")


def build_ms(plan: Plan) -> float | None:
    """The time to build a call's mask and cut it for this rank; None for a mask that is not cut."""
    problem = plan.problem
    if not problem.is_cut:
        return None
    built.cache_clear()
    anew = replace(problem)
    start = time.perf_counter()
    steps(anew, plan.rank)
    return (time.perf_counter() - start) * 1e3
