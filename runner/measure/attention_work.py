"""Attention as a workload: seeded inputs, sharded, with the forward and backward of one call; and multi-head dilated attention, the
module with its projections and LayerNorm."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.geometry.schedules import masks
from attention.kernels import passed_over
from attention.models import DilatedMultihead
from runner.config.experiment import NEW_PACKS, AttentionCall, Experiment
from runner.measure.kernels import call_shape
from runner.measure.workload import DTYPES, Workload, by_rows
from runner.peers import Package
from runner.record.fields import Chosen

NAMES = ("q", "k", "v", "dout")
SINKS = "dsinks"
# an output has a row for each query or each key, or one row for all
ROLES = {"out": "q", "dq": "q", "dk": "kv", "dv": "kv", "lse": "q", SINKS: "all"}
GRADIENTS = ("dq", "dk", "dv", SINKS)


def row_shape(work: AttentionCall, which: str) -> tuple[int, int, int]:
    """Tokens, heads and head dim of a batch element of a whole input."""
    keys = which in ("k", "v")
    tokens, heads = (work.seq_len, work.kv_heads) if keys else (work.queries, work.heads)
    return tokens, heads, work.value_dim if which in ("v", "dout") else work.head_dim


def global_input(experiment: Experiment, which: str, device: torch.device, batch: int | None = None) -> Tensor:
    """One whole input `[B, S, H, D]` (or one batch element of it; packed `[T, H, D]`), v and dout with their own head dim."""
    elements = range(experiment.workload.batch) if batch is None else [batch]
    parts = [_element(experiment, which, b, device) for b in elements]
    return parts[0] if experiment.workload.seqlens else torch.stack(parts)


def _element(experiment: Experiment, which: str, b: int, device: torch.device, tokens: int | None = None) -> Tensor:
    """Batch element b of an input: normal, clamped to [-1, 1], the same on every rank. Each has its own generator, so that one can be
    made without the others. q is multiplied by `score_factor`. Beside sinks v and dout are 0.5 higher, since in the sum of dout.out
    over all tokens, the sinks' gradient, symmetric ones cancel. The dout of dilated attention is multiplied by what its result is
    divided by: many elements are 1 or -1, and their thirds all round the same way."""
    work, dilation = experiment.workload, experiment.dilation
    n, heads, dim = row_shape(work, which)
    generator = torch.Generator(device).manual_seed((experiment.seed * 4 + NAMES.index(which)) * 65_537 + b)
    x = torch.empty(tokens or n, heads, dim, device=device).normal_(generator=generator).clamp_(-1, 1)
    if work.sinks and which in ("v", "dout"):
        x += 0.5
    if which == "q":
        x *= score_factor(work)
    elif which == "dout" and dilation is not None:
        x *= dilation.divisor
    return x.to(DTYPES[work.dtype])


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
    k, v = (_element(experiment, which, work.batch, device, work.prefix)[None] for which in ("k", "v"))
    return k, v


def global_sinks(work: AttentionCall, seed: int, device: torch.device) -> Tensor | None:
    """The sinks `[H]`, the same on every rank; None for a call without. They are normal around the logarithm of the keys that a query
    sees on average, so that a sink weighs about as much as these do, at any length."""
    if not work.sinks:
        return None
    generator = torch.Generator(device).manual_seed((seed * 4 + len(NAMES)) * 65_537 - 1)
    x = torch.empty(work.heads, device=device).normal_(generator=generator)
    return (x + math.log(max(work.batch_pairs / (work.batch * work.queries), 1))).to(DTYPES[work.dtype])


class AttentionWork(Workload):
    """A rank's shards of the inputs, and the passes over them."""

    results = ("out", "gradients")
    out: Tensor | None
    gradients: tuple[Tensor, ...] | None

    def prepare(self) -> None:
        work, seed, device = self.spec, self.experiment.seed, self.me.device
        self.passes = ("forward", "backward") if self.backward else ("forward",)
        self.cu_seqlens = work.cu_seqlens if work.seqlens else None
        self.inputs = [self.shard_of_input(which) for which in (NAMES if self.backward else NAMES[:3])]
        self.q, self.k, self.v = (x.requires_grad_(self.backward) for x in self.inputs[:3])
        self.dout = self.inputs[3] if self.backward else None
        self.wanted = [self.q, self.k, self.v]  # whose gradients a backward gives
        self.options: dict[str, Any] = {name: getattr(work, name) for name in ("causal", "window", "scale", "softcap")}
        self.options["cu_seqlens"] = self.cu_seqlens
        if (sinks := global_sinks(work, seed, device)) is not None:
            self.wanted.append(sinks.requires_grad_(self.backward))
            self.options["sinks"] = sinks
        if work.named_mask is not None:
            self.options["mask"] = work.named_mask.make()
        if work.q_len is not None:
            self.options |= {"kv_tokens": work.seq_len, "kv_lengths": work.kv_lengths}
        self.plans = [self.planned(self.q, self.k, self.v, self.options)]
        if (prefix := global_prefix(self.experiment, device)) is not None:
            self.inputs += [self.fn.shard(x, role="kv") for x in prefix]
            self.options |= {"prefix": tuple(self.inputs[-2:]), "prefix_tokens": work.prefix}

    def notes(self) -> list[str]:
        work, plan = self.spec, self.plan
        if plan.heads == work.heads:
            return []
        return [f"heads={work.heads}: computed as {plan.heads}, {plan.kv_heads} of KV, which the ranks divide"]

    def shard_of_input(self, which: str) -> Tensor:
        """Without a check each rank draws its own, as a training step gets them, so that none holds a whole tensor."""
        work, role, is_checked = self.spec, "kv" if which in ("k", "v") else "q", self.experiment.check.enabled
        if is_checked:
            whole = global_input(self.experiment, which, self.me.device)
        else:  # a shape, in the memory of one element
            shape = row_shape(work, which)
            one = torch.ones((), dtype=DTYPES[work.dtype], device=self.me.device)
            whole = one.expand(shape if work.seqlens else (work.batch, *shape))
        shard = self.fn.shard(whole, self.cu_seqlens, role=role).detach().contiguous()
        return shard if is_checked else shard.normal_()

    def call(self) -> Tensor:
        out: Tensor = self.fn(self.q, self.k, self.v, **self.options)
        return out

    def run(self, which: str, keep: bool = False) -> None:
        if which == "forward":
            self.out = None  # freed first: not part of this iteration's memory
            self.out = self.call()
            return
        assert self.out is not None and self.dout is not None, "backward before forward"
        self.gradients = None
        with torch.autograd.set_multithreading_enabled(self.experiment.timing.autograd_thread):
            self.gradients = torch.autograd.grad(self.out, self.wanted, self.dout, retain_graph=keep)

    def outputs(self) -> dict[str, Tensor]:
        if self.out is None or (self.backward and self.gradients is None):
            return {}
        return self.by_name(self.out, self.gradients or ())

    def by_name(self, out: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs by name: out, and the gradients of `wanted`."""
        outputs = {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=False))}
        return outputs | ({SINKS: outputs[SINKS].view(1, -1, 1)} if SINKS in outputs else {})

    def report(self) -> Chosen:
        """With kernel=auto also why preferred kernels were passed over."""
        chosen, problem = self.fn.variant, self.plan.problem
        if isinstance(chosen, Package) or self.experiment.kernel != "auto":
            return super().report()
        shape = call_shape(self.experiment, self.inputs[0].shape[0 if self.spec.seqlens else 1])
        if problem.is_cut:  # into packed calls
            shape = replace(shape, packed=True)
        skipped = passed_over(self.plan.kernel.name, shape, masks(problem), chosen.decode)
        return replace(super().report(), passed_over=skipped)

    def rows(self, name: str, output: Tensor) -> Tensor:
        role = ROLES[name]
        if role == "all":
            return super().rows(name, output)
        tokens = torch.arange(self.spec.seq_len if role == "kv" else self.spec.queries)
        shape = (-1, 1, 1) if self.cu_seqlens is not None else (1, -1, 1, 1)
        return self.fn.shard(tokens.view(shape), self.cu_seqlens, role=role).flatten()

    def other_packs(self, n: int) -> list[AttentionCall]:
        """So many calls of other packed batches: the same lengths in another order."""
        assert self.spec.seqlens, "new_packs for a batch that is not packed"
        orders = other_orders(self.spec.seqlens, n, self.experiment.seed)
        return [replace(self.spec, seqlens=order) for order in orders]

    @contextmanager
    def new_pack(self, sign: int) -> Iterator[AttentionCall]:
        (other,) = self.other_packs(1)
        self._take(other, sign)
        try:
            yield other
        finally:
            self._take(self.spec, 1)

    def _take(self, call: AttentionCall, sign: int) -> None:
        """Replaces the inputs by those of a packed batch, times the sign. Nothing is planned for it."""
        self.cu_seqlens = self.options["cu_seqlens"] = call.cu_seqlens
        with torch.no_grad():
            for which, x in zip(NAMES, self.inputs, strict=False):
                x.copy_(self.shard_of_input(which)).mul_(sign)

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """An output of all ranks, from this rank's. Collective."""
        if ROLES[name] != "all":
            return self.fn.unshard(mine, self.cu_seqlens)
        if self.fn.layout.replicated or self.me.world == 1:
            return mine
        total = mine.double()  # a parameter's gradient: each rank has its queries' part
        dist.all_reduce(total)
        return total


class ModuleWork(AttentionWork):
    """The passes of `attention.models.DilatedMultihead` on x `[B, S, H D]`, which every rank has whole. Its outputs are out and the
    gradients of x and of every parameter. The initial biases are 0, so that out is odd in x."""

    rows = Workload.rows  # each rank has all

    def prepare(self) -> None:
        super().prepare()
        work, experiment = self.spec, self.experiment
        torch.manual_seed(experiment.seed)
        sizes = work.heads * work.head_dim, work.heads, work.kv_heads
        module = DilatedMultihead(*sizes, experiment.variant, **experiment.options)
        self.module = module.to(self.me.device, self.q.dtype).to(self.dtype)
        self.module.attend = self.fn
        self.x = self.q.detach().flatten(-2).to(self.dtype).requires_grad_(self.backward)
        self.inputs = [self.x]
        if self.dout is not None:
            self.dout = self.dout.flatten(-2).to(self.dtype)
            self.inputs.append(self.dout)
        self.q = self.k = self.v = self.x.new_empty(0)  # the module makes them
        self.named = dict(self.module.named_parameters())
        self.wanted = [self.x, *self.named.values()]

    def call(self) -> Tensor:
        out: Tensor = self.module(self.x, causal=self.spec.causal)
        return out

    def by_name(self, out: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        outputs = {"out": out, **dict(zip(["dx", *(f"d{x}" for x in self.named)], gradients, strict=False))}
        # out and dx as `[B, S, 1, hidden]`, gradients of parameters by rows
        return {name: x.detach().unsqueeze(2) if name in ("out", "dx") else by_rows(x) for name, x in outputs.items()}


def other_orders(lengths: tuple[int, ...], n: int, seed: int) -> list[tuple[int, ...]]:
    """n different orders of the lengths, none of them the given one."""
    draw, order = random.Random(seed), list(lengths)
    orders = {lengths: None}
    while len(orders) <= n:
        draw.shuffle(order)
        orders[tuple(order)] = None
    return list(orders)[1:]


class Layers:
    """The passes of a model with `layers` layers, all with the same inputs: every layer's forward, then every layer's backward,
    the last layer first. new_packs: each iteration has another packed batch."""

    def __init__(self, work: AttentionWork, layers: int, new_packs: bool):
        self.work, self.layers, self.passes = work, layers, work.passes
        self.calls: Iterator[AttentionCall | AttentionWork] = cycle(
            work.other_packs(NEW_PACKS) if new_packs else [work]
        )
        self.outs: list[Tensor | None] = []

    def run(self, which: str) -> None:
        work = self.work
        if which == "forward":
            work.options["cu_seqlens"] = next(self.calls).cu_seqlens
            for _ in range(self.layers):
                work.run("forward")
                if work.backward:
                    self.outs.append(work.out)
            work.options["cu_seqlens"] = work.cu_seqlens
        else:
            while self.outs:
                work.out = self.outs.pop()
                work.run("backward")
