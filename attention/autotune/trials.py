"""`auto`'s trials: the variants that the model estimates best are run on random inputs of the task's shapes, and the fastest is taken.
They measure what no model knows, above all the CPU launch overhead of this host at this time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.autotune.choice import Choice, Estimate, Task
from attention.geometry.layouts import sizes_of
from attention.transports import captures_undone

if TYPE_CHECKING:
    from attention.api import ContextParallel

WARMUP = 4  # iterations before a candidate is timed: they compile, allocate, record and capture
ROUNDS = 3  # in which all candidates take turns; the best of each counts
ROUND_MS = 100.0  # length of a candidate's turn
MOST_RUNS = 20  # iterations of a turn
LONG_MS = 1000.0  # an iteration from which one is enough


@dataclass(frozen=True)
class Tried:
    """`ms`: of an iteration on the slowest rank, by label, the fastest first. `left_out`: why the others could not be run."""

    ms: dict[str, float]
    left_out: dict[str, str]


def by_trial(
    choice: Choice,
    most: int,
    task: Task,
    build: Callable[[Estimate], ContextParallel],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Choice:
    """The choice with measured times: of each of the first `most` variants the best estimated candidate, launched, and replayed where
    that is in question. One that can't be run is left out with its reason. Collective over the group. The memory of all candidates is
    held at once, first of those launched, then of those replayed. An error on one rank alone is raised there, and the other ranks wait
    for it."""
    estimates = contenders(choice, most)
    if len(estimates) < 2:
        return choice
    found: dict[str, float] = {}
    left_out = dict(choice.left_out)
    for replayed in (False, True):  # launched calls are slower once graphs were captured
        functions = {e.label: build(e) for e in estimates if e.graphs == replayed}
        tried = fastest(functions, task, device=device, dtype=dtype)
        found, left_out = found | tried.ms, left_out | tried.left_out
    return replace(choice, left_out=left_out, tried=_sorted(found))


def fastest(functions: Mapping[str, ContextParallel], task: Task, *, device: torch.device, dtype: torch.dtype) -> Tried:
    """Which of the functions, all over one group, is the fastest on random inputs of the task's shapes. Collective; memory and errors as
    in `by_trial`."""
    with torch.inference_mode(False), torch.enable_grad(), captures_undone():
        inputs = _Inputs(task, device, dtype)
        refusals = {label: _refusal(fn, inputs) for label, fn in functions.items()}
        ms = _timed({label: fn for label, fn in functions.items() if refusals[label] is None}, inputs)
        for fn in functions.values():
            fn.replay.graphs.forget()
    return Tried(_sorted(ms), {label: why for label, why in refusals.items() if why is not None})


def contenders(choice: Choice, most: int) -> list[Estimate]:
    """The best estimate of each of the first `most` variants; replayed ones beside launched ones only where the GPU may wait for
    launches."""
    names = list(dict.fromkeys(e.candidate.variant for e in choice.estimates))[:most]
    first: dict[tuple[str, bool], Estimate] = {}
    for e in choice.estimates:
        if e.candidate.variant in names:
            first.setdefault((e.candidate.variant, e.graphs), e)
    launched = {name: e for (name, replayed), e in first.items() if not replayed}
    return [
        e for (name, replayed), e in first.items() if not (replayed and name in launched) or launched[name].launch_bound
    ]


class _Inputs:
    """This rank's tensors, shared by all candidates with as many tokens a rank. The caller's random numbers stay as they were."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        self.task, self.dtype = task, dtype
        self.device = torch.empty(0, device=device).device  # with its number
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.options: dict[str, Any] = {
            "window": (task.mask.left, task.mask.right),  # a causal mask is a window, too
            "cu_seqlens": list(task.cu_seqlens) if task.packed else None,
            "kv_tokens": task.cu_seqlens[-1] if task.decode else None,
        }

    def iterate(self, fn: ContextParallel) -> None:
        """A forward and, where the task has one, a backward."""
        held = sizes_of(fn.layout, self.task.cu_seqlens, fn.world)[fn.rank]
        queries = held if self.task.q_tokens is None else self.task.q_tokens
        q, k, v = (self._tensor(name, n) for name, n in (("q", queries), ("k", held), ("v", held)))
        out = fn(q, k, v, **self.options)
        if self.task.backward:
            with torch.autograd.set_multithreading_enabled(
                False
            ):  # a model wakes autograd's thread once for its whole backward
                torch.autograd.grad(out, (q, k, v), self._tensor("dout", queries))

    def _tensor(self, name: str, tokens: int) -> Tensor:
        if (name, tokens) not in self.kept:
            shapes = self.task.shapes
            leading = (tokens,) if self.task.packed else (shapes.batch, tokens)
            shape = (*leading, shapes.kv_heads if name in ("k", "v") else shapes.heads, shapes.head_dim)
            x = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
            self.kept[name, tokens] = x.requires_grad_(self.task.backward and name != "dout")
        return self.kept[name, tokens]


def _refusal(fn: ContextParallel, inputs: _Inputs) -> str | None:
    """Warms a function up. Returns why it can't be run, on all ranks if on one, or None."""
    reason = None
    try:
        for _ in range(WARMUP):
            inputs.iterate(fn)
    except (ValueError, torch.OutOfMemoryError) as error:
        reason = str(error).partition("\n")[0]
    if _sum(fn, torch.tensor(float(reason is not None), device=inputs.device)) == 0:
        return None
    return reason or "another rank could not run it"


def _timed(functions: dict[str, ContextParallel], inputs: _Inputs) -> dict[str, float]:
    """Milliseconds of an iteration of each; all take turns."""
    once = {label: _ms(fn, inputs, 1) for label, fn in functions.items()}
    found = dict(once)
    if max(once.values(), default=LONG_MS) < LONG_MS:
        for _ in range(ROUNDS):
            for label, fn in functions.items():
                runs = max(1, min(MOST_RUNS, int(ROUND_MS / max(once[label], 1e-3))))
                found[label] = min(found[label], _ms(fn, inputs, runs))
    return found


def _ms(fn: ContextParallel, inputs: _Inputs, runs: int) -> float:
    """Of an iteration on the slowest rank, when they follow one another as in a model."""
    _sum(fn, torch.zeros(1, device=inputs.device))  # all ranks begin together
    start = time.perf_counter()
    for _ in range(runs):
        inputs.iterate(fn)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    slowest = torch.tensor((time.perf_counter() - start) / runs * 1e3, device=inputs.device)
    if fn.world > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=fn.group)
    return slowest.item()


def _sum(fn: ContextParallel, x: Tensor) -> float:
    """Over the ranks; waits for all of them."""
    if fn.world > 1:
        dist.all_reduce(x, group=fn.group)
    return x.item()


def _sorted(ms: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(ms.items(), key=lambda item: item[1]))
