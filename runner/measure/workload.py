"""Measured work, for the modules that time and check it: what attention, a module and a model share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

import attention
from attention.api import ContextParallel
from attention.call import Settings
from attention.executors.plan import Plan
from attention.geometry.schedules import steps
from attention.masks.mask import built
from attention.transports.interface import Transport
from attention.variants.registry import variant
from runner.config.experiment import AttentionCall, Experiment
from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank
from runner.peers import Package, function
from runner.record.fields import Chosen, Model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
EVEN = frozenset(
    {"dsinks", "dqkv.weight", "dnorm.weight", "dout.weight"}
)  # outputs that keep their sign when all inputs change theirs


class Passes(Protocol):
    """The timed work. passes: in the order of an iteration, `forward`, then `backward` if it is timed."""

    passes: tuple[str, ...]

    def run(self, which: str) -> None:
        """Runs one pass; `backward` belongs to the last `forward`."""


def build(experiment: Experiment) -> ContextParallel:
    """A function of the library, or a peer. Raises UnsupportedHere or ValueError as `attention.make` does."""
    about = {name: getattr(experiment, name) for name in ("kernel", "transport", "deterministic", "replay")}
    if experiment.is_peer:
        return function.make(experiment.variant, **about, **experiment.options)
    return attention.make(experiment.variant, **about, agreement=experiment.agreement, **experiment.call_options)


def alone(experiment: Experiment) -> ContextParallel:
    """The same global call on one device, within a world of several."""
    chosen = variant(experiment.variant)
    about = chosen.parse(experiment.options), experiment.kernel, "auto", experiment.deterministic, "none"
    fn = ContextParallel(Settings(chosen, *about, 0.0, False))  # the other ranks do not make these calls: no agreement
    fn.world, fn.rank = 1, 0
    return fn


class Workload:
    """A rank's share of the work: inputs, and passes over them that can be timed and compared with a reference.

    fn: by default what `build` makes. dtype: of the computation, if it is not the run's. Raises UnsupportedHere if the kernel cannot
    do the call.

    results: the attributes with the last iteration's results. plans: of its attention calls, the first one for the result."""

    results: ClassVar[tuple[str, ...]] = ()
    passes: tuple[str, ...]
    inputs: Any  # a list of tensors
    plans: list[Plan]
    # within the context the inputs are those of another packed batch, times the sign; gives its call
    new_pack: Callable[[int], AbstractContextManager[AttentionCall]]

    def __init__(
        self, me: Rank, experiment: Experiment, fn: ContextParallel | None = None, dtype: torch.dtype | None = None
    ):
        self.me, self.experiment, self.spec = me, experiment, experiment.workload
        self.fn = build(experiment) if fn is None else fn
        self.dtype = DTYPES[self.spec.dtype] if dtype is None else dtype
        self.backward = experiment.backward
        self.prepare()
        self.release()

    def prepare(self) -> None:
        """Makes the inputs and the plans."""
        raise NotImplementedError

    def planned(self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Plan:
        """The plan of a call. Raises UnsupportedHere if the kernel cannot do it."""
        try:
            return self.fn.plan(q, k, v, **options)
        except ValueError as error:
            raise UnsupportedHere(str(error)) from None

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @property
    def transport(self) -> Transport:
        return self.plan.transport

    def report(self) -> Chosen:
        """The kernel and the transport, and a note on them."""
        kernel, chosen = self.plan.kernel, self.fn.variant
        notes = [self.transport.note, getattr(kernel, "note", None)]
        if isinstance(chosen, Package):
            notes = [chosen.served(kernel.name)]
        notes += [self.plan.problem.schedule.note(self.plan.problem), *self.notes()]
        note = "; ".join(filter(None, notes)) or None
        return Chosen(kernel=kernel.name, transport=self.transport.name, note=note)

    def notes(self) -> list[str]:
        """Further notes for the result."""
        return []

    def mask_build_ms(self) -> float | None:
        """ms to build the masks' rectangles and to cut them for this rank, without caches; None where nothing is cut. Layers with
        the same mask share it."""
        cut = [plan for plan in self.plans if plan.problem.is_cut]
        built.cache_clear()
        start = time.perf_counter()
        for plan in cut:
            steps(replace(plan.problem), plan.rank)
        return (time.perf_counter() - start) * 1e3 if cut else None

    def run(self, which: str, keep: bool = False) -> None:
        """Runs one pass; `backward` belongs to the last `forward`. keep: it can be repeated."""
        raise NotImplementedError

    def repeat(self, which: str, times: int) -> None:
        """Runs one pass `times` times; `backward` can be repeated after one `forward`."""
        for _ in range(times):
            self.run(which, keep=which == "backward")

    def outputs(self) -> dict[str, Tensor]:
        """The last iteration's results and gradients on this rank by name, `[B, tokens, H, D]` or `[tokens, H, D]` (the gradient of
        parameters of the heads: `[1, H, 1]`); empty after `release`."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops the results, so that their memory does not count for what comes next."""
        vars(self).update(dict.fromkeys(self.results))

    def negate(self) -> None:
        """Changes the sign of all inputs, in place: every output but those of `EVEN` changes its sign."""
        with torch.no_grad():
            for x in self.inputs:
                x.neg_()

    def trained(self) -> Model | None:
        """The model after its training. Collective."""
        return None

    def rows(self, name: str, output: Tensor) -> Tensor:
        """The token of each row of this rank's shard of an output, int64 on the CPU; all rows where it is not sharded."""
        return torch.arange(output.shape[-3])


def by_rows(x: Tensor) -> Tensor:
    """A matrix as its rows `[rows, 1, D]`, a vector as one row."""
    return x.detach().reshape(len(x) if x.dim() == 2 else 1, 1, -1)
