"""`auto`'s trials: the variants with the best estimates run on random inputs of the task's shapes, and the fastest is
taken. That measures what no model knows, above all this host's CPU launch overhead at this time."""

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
from attention.runtime.private import default_group
from attention.transports import captures_undone
from attention.transports.fabric import agreed

if TYPE_CHECKING:
    from attention.api import ContextParallel

WARMUP = 4  # iterations before a candidate is timed: they compile, allocate, record and capture
ROUNDS = 3  # in which all candidates take turns; the best of each counts
ROUND_MS = 100.0  # length of a candidate's turn
MOST_RUNS = 20  # iterations of a turn
LONG_MS = 1000.0  # an iteration of this length is timed once


@dataclass(frozen=True)
class Tried:
    """ms: of an iteration on the slowest rank, by label, the fastest first. left_out: why the others failed."""

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
    """The choice with measured times of its `contenders`. Collective; memory and failures as for `fastest`, first of the
    launched candidates, then of the replayed ones."""
    estimates = contenders(choice, most)
    if len(estimates) < 2:
        return choice
    ms: dict[str, float] = {}
    left_out = dict(choice.left_out)
    for replayed in (False, True):  # launched calls are slower once graphs were captured
        functions = {e.label: build(e) for e in estimates if e.graphs == replayed}
        tried = fastest(functions, task, device=device, dtype=dtype)
        ms, left_out = ms | tried.ms, left_out | tried.left_out
    return replace(choice, left_out=left_out, tried=_sorted(ms))


def fastest(functions: Mapping[str, ContextParallel], task: Task, *, device: torch.device, dtype: torch.dtype) -> Tried:
    """Times functions over one group on random inputs of the task's shapes. Collective. The memory of all is held at
    once. A function that fails on any rank is left out on all of them, with the reason. If it fails within an exchange
    on some ranks only, the others wait until the group's timeout."""
    with torch.inference_mode(False), torch.enable_grad(), captures_undone():
        inputs = _Inputs(task, device, dtype)
        failures = {label: _failure(fn, inputs) for label, fn in functions.items()}
        ms = _timed({label: fn for label, fn in functions.items() if failures[label] is None}, inputs)
        for fn in functions.values():
            fn.graphs.forget()
    return Tried(_sorted(ms), {label: why for label, why in failures.items() if why is not None})


def contenders(choice: Choice, most: int) -> list[Estimate]:
    """The best estimate of each of the first `most` variants. The replayed one comes beside the launched one only if
    the GPU may wait for launches."""
    names = list(dict.fromkeys(e.candidate.variant for e in choice.estimates))[:most]
    first: dict[tuple[str, bool], Estimate] = {}
    for e in choice.estimates:
        first.setdefault((e.candidate.variant, e.graphs), e)
    busy = {name for (name, graphs), e in first.items() if not graphs and not e.launch_bound}
    return [e for (name, graphs), e in first.items() if name in names and not (graphs and name in busy)]


class _Inputs:
    """This rank's tensors, by role and tokens. The caller's random state stays as it was."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        self.task, self.dtype = task, dtype
        self.device = torch.empty(0, device=device).device  # with its index
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.options: dict[str, Any] = {
            "window": (task.mask.left, task.mask.right),  # a causal mask is also a window
            "mask": task.other_mask,
            "softcap": task.softcap,
            "cu_seqlens": list(task.cu_seqlens) if task.packed else None,
            "kv_tokens": task.cu_seqlens[-1] if task.decode else None,
        }

    def iterate(self, fn: ContextParallel) -> None:
        """A forward and, if the task has one, a backward."""
        held = sizes_of(fn.layout, self.task.cu_seqlens, fn.world)[fn.rank]
        queries = held if self.task.q_tokens is None else self.task.q_tokens
        q, k, v = (self._tensor(name, n) for name, n in (("q", queries), ("k", held), ("v", held)))
        out = fn(q, k, v, **self.options)
        if self.task.backward:
            # a model wakes autograd's thread once for its whole backward, not once for each call
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(out, (q, k, v), self._tensor("dout", queries))

    def _tensor(self, name: str, tokens: int) -> Tensor:
        if (name, tokens) not in self.kept:
            shapes = self.task.shapes
            heads = shapes.kv_heads if name in ("k", "v") else shapes.heads
            head_dim = shapes.v_head_dim if name in ("v", "dout") else shapes.head_dim
            shape = (shapes.batch, tokens, heads, head_dim)[self.task.packed :]
            x = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
            self.kept[name, tokens] = x.requires_grad_(self.task.backward and name != "dout")
        return self.kept[name, tokens]


def _failure(fn: ContextParallel, inputs: _Inputs) -> str | None:
    """Warms a function up. Returns why it failed, the same on every rank, or None. The ranks agree after each
    iteration, so that none starts one that another has given up."""
    for _ in range(WARMUP):
        reason = None
        try:
            inputs.iterate(fn)
        except Exception as error:
            kind = "" if isinstance(error, (ValueError, torch.OutOfMemoryError)) else f"{type(error).__name__}: "
            reason = kind + str(error).partition("\n")[0]
        if fn.world > 1:
            reason = agreed(fn.group or default_group(), reason)
        if reason is not None:
            return reason
    return None


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
    """Of an iteration on the slowest rank, when iterations follow one another as in a model."""
    _greatest(fn, 0.0, inputs.device)  # all ranks begin together
    start = time.perf_counter()
    for _ in range(runs):
        inputs.iterate(fn)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    return _greatest(fn, (time.perf_counter() - start) / runs * 1e3, inputs.device)


def _greatest(fn: ContextParallel, value: float, device: torch.device) -> float:
    """Of all ranks; waits for all of them."""
    x = torch.tensor(value, device=device)
    if fn.world > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=fn.group)
    return x.item()


def _sorted(ms: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(ms.items(), key=lambda item: item[1]))
