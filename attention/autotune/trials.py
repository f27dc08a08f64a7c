"""What `auto` takes by trial: the variants that the model has in front are run on random inputs of the problem's shapes, and the
fastest is taken. For what no model knows, of which the host's speed of the day is the most."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.api import ContextParallel
from attention.autotune.model import Choice, Estimate, Task
from attention.geometry.layouts import sizes_of
from attention.transports import captures_undone
from attention.variants.registry import VARIANTS

LEADING = 4  # iterations before a candidate is timed: what is compiled, allocated, recorded and captured is, then
ROUNDS = 3  # in which all candidates take turns; the best of each counts
ROUND_MS = 100.0  # that a round of a candidate takes
MOST_RUNS = 20  # of a candidate in a round
LONG_MS = 1000.0  # an iteration from which one is enough


def by_trial(
    choice: Choice,
    most: int,
    task: Task,
    *,
    group: dist.ProcessGroup | None,
    kernel: str,
    deterministic: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Choice:
    """The choice with what was tried, by label the ms of an iteration on the slowest rank: of each of the first `most` variants
    the best estimated candidate, launched, and replayed where that is in question. One that can't be run is left out with its
    reason. Collective over the group. All candidates' memory is held at once, launched ones' and replayed ones' by turns. Raises
    what running them raises on one rank alone, whose peers then wait for it."""
    estimates = contenders(choice, most)
    if len(estimates) < 2:
        return choice
    inputs, left_out = _Inputs(task, device, dtype), dict(choice.left_out)
    found: dict[str, float] = {}
    with torch.inference_mode(False), torch.enable_grad(), captures_undone():
        for replayed in (False, True):  # what is launched waits for more once graphs were captured
            functions: dict[str, ContextParallel] = {}
            for e in estimates:
                if e.graphs == replayed:
                    variant, options = VARIANTS[e.candidate.variant], e.candidate.options
                    fn = ContextParallel(variant, group, kernel, e.transport, deterministic, options, replayed)
                    functions[e.label] = fn
            ms, refused = _tried(functions, inputs)
            found, left_out = found | ms, left_out | refused
    return replace(choice, left_out=left_out, tried=dict(sorted(found.items(), key=lambda item: item[1])))


@dataclass(frozen=True)
class Tried:
    """By label the ms of an iteration of what was tried, on the slowest rank, the fastest first; and why the rest could not be
    run."""

    ms: dict[str, float]
    left_out: dict[str, str]


def fastest(functions: Mapping[str, ContextParallel], task: Task, *, device: torch.device, dtype: torch.dtype) -> Tried:
    """Which of functions by label, all over one group, is the fastest on random inputs of the task's shapes. Collective; memory
    and errors as of `by_trial`."""
    with torch.inference_mode(False), torch.enable_grad(), captures_undone():
        ms, left_out = _tried(functions, _Inputs(task, device, dtype))
    return Tried(dict(sorted(ms.items(), key=lambda item: item[1])), left_out)


def contenders(choice: Choice, most: int) -> list[Estimate]:
    """The best estimate of each of the first `most` variants; replayed ones beside launched ones only where a host may be late."""
    names = list(dict.fromkeys(e.candidate.variant for e in choice.estimates))[:most]
    first: dict[tuple[str, bool], Estimate] = {}
    for e in choice.estimates:
        if e.candidate.variant in names:
            first.setdefault((e.candidate.variant, e.graphs), e)
    launched = {name: e for (name, replayed), e in first.items() if not replayed}
    return [e for (name, replayed), e in first.items() if not (replayed and name in launched) or launched[name].late]


def _tried(functions: Mapping[str, ContextParallel], inputs: _Inputs) -> tuple[dict[str, float], dict[str, str]]:
    """The ms of those that can be run, and why the others can't."""
    reasons = {label: _refused(fn, inputs) for label, fn in functions.items()}
    found = _timed({label: fn for label, fn in functions.items() if reasons[label] is None}, inputs)
    for fn in functions.values():
        if fn.replays is not None:
            fn.replays.forget()
    return found, {label: reason for label, reason in reasons.items() if reason is not None}


def _timed(functions: dict[str, ContextParallel], inputs: _Inputs) -> dict[str, float]:
    """The ms of an iteration of each, all of which take turns."""
    once = {label: _ms(fn, inputs, 1) for label, fn in functions.items()}
    found = dict(once)
    if max(once.values(), default=LONG_MS) < LONG_MS:
        for _ in range(ROUNDS):
            for label, fn in functions.items():
                runs = max(1, min(MOST_RUNS, int(ROUND_MS / max(once[label], 1e-3))))
                found[label] = min(found[label], _ms(fn, inputs, runs))
    return found


class _Inputs:
    """This rank's tensors, the same for all candidates that give it as many tokens; the caller's random numbers stay as they
    were."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        self.task, self.dtype = task, dtype
        self.device = torch.empty(0, device=device).device  # with its number
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.options: dict[str, Any] = {
            "window": (task.mask.left, task.mask.right),  # causal is a window, too
            "cu_seqlens": list(task.cu_seqlens) if task.packed else None,
            "kv_tokens": task.cu_seqlens[-1] if task.decode else None,
        }

    def iterate(self, fn: ContextParallel) -> None:
        task = self.task
        held = sizes_of(fn.layout, task.cu_seqlens, fn.world)[fn.rank]
        queries = held if task.q_tokens is None else task.q_tokens
        q, k, v = (self._made(name, n) for name, n in (("q", queries), ("k", held), ("v", held)))
        out = fn(q, k, v, **self.options)
        if task.backward:
            with torch.autograd.set_multithreading_enabled(False):  # whose thread a model's whole backward wakes once
                torch.autograd.grad(out, (q, k, v), self._made("dout", queries))

    def _made(self, name: str, tokens: int) -> Tensor:
        if (name, tokens) not in self.kept:
            shapes = self.task.shapes
            leading = (tokens,) if self.task.packed else (shapes.batch, tokens)
            heads = shapes.kv_heads if name in ("k", "v") else shapes.heads
            x = torch.randn(
                *leading, heads, shapes.head_dim, generator=self.generator, device=self.device, dtype=self.dtype
            )
            self.kept[name, tokens] = x.requires_grad_(self.task.backward and name != "dout")
        return self.kept[name, tokens]


def _refused(fn: ContextParallel, inputs: _Inputs) -> str | None:
    """The iterations that lead; why there can be none, on all ranks if on one."""
    reason = None
    try:
        for _ in range(LEADING):
            inputs.iterate(fn)
    except (ValueError, torch.OutOfMemoryError) as error:
        reason = str(error).partition("\n")[0]
    refusals = torch.tensor(float(reason is not None), device=inputs.device)
    if _summed(fn, refusals) == 0:
        return None
    return reason or "another rank could not run it"


def _ms(fn: ContextParallel, inputs: _Inputs, runs: int) -> float:
    """An iteration's, on the slowest rank, called one after another as a model does."""
    _summed(fn, torch.zeros(1, device=inputs.device))  # all begin together, with nothing left to do
    start = time.perf_counter()
    for _ in range(runs):
        inputs.iterate(fn)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    slowest = torch.tensor((time.perf_counter() - start) / runs * 1e3, device=inputs.device)
    if fn.world > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=fn.group)
    return slowest.item()


def _summed(fn: ContextParallel, x: Tensor) -> float:
    """Over the ranks, and waited for."""
    if fn.world > 1:
        dist.all_reduce(x, group=fn.group)
    return x.item()
