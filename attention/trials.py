"""What `auto` takes by trial: the variants that the model has in front are run on random inputs of the problem's shapes, and the
fastest is taken. For what no model knows, of which the host's speed of the day is the most."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.choice import Choice, Estimate, Task
from attention.function import ContextParallel
from attention.layouts import sizes_of
from attention.variants import VARIANTS

LEADING = 3  # iterations before a candidate is timed: what is compiled, allocated and captured is, then
ROUNDS = 3  # in which all candidates take turns; the best of each counts
ROUND_S = 0.1  # that a round of a candidate takes, about
MOST_RUNS = 20  # of a candidate in a round
LONG_S = 1.0  # an iteration from which one is enough, behind one that leads


def take(
    choice: Choice,
    most: int,
    task: Task,
    group: dist.ProcessGroup | None,
    kernel: str,
    deterministic: bool,
    graphs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Choice:
    """The choice with the ms of the best estimated candidate of each of the first `most` variants, as measured on the slowest rank.
    Collective over the group."""
    estimates = contenders(choice, most)
    if len(estimates) < 2:
        return choice
    tried: dict[str, ContextParallel] = {}
    for e in estimates:
        variant = VARIANTS[e.candidate.variant]
        options = dict(e.candidate.options)
        tried[e.label] = ContextParallel(variant, group, kernel, e.transport, deterministic, options, graphs)
    inputs = _Inputs(task, device, dtype)
    long = max(e.ms for e in estimates) / 1e3 >= LONG_S
    found = dict.fromkeys(tried, float("inf"))
    with torch.inference_mode(False), torch.enable_grad():
        for fn in tried.values():
            for _ in range(1 if long else LEADING):
                inputs.iterate(fn)
        for _ in range(1 if long else ROUNDS):
            for e in estimates:
                runs = max(1, min(MOST_RUNS, int(ROUND_S / (e.ms / 1e3))))
                found[e.label] = min(found[e.label], _ms(tried[e.label], inputs, runs))
    return replace(choice, tried=dict(sorted(found.items(), key=lambda item: item[1])))


def contenders(choice: Choice, most: int) -> list[Estimate]:
    """The best estimate of each of the first `most` variants."""
    first: dict[str, Estimate] = {}
    for e in choice.estimates:
        first.setdefault(e.candidate.variant, e)
    return list(first.values())[:most]


class _Inputs:
    """This rank's tensors, the same for all candidates that give it as many tokens."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        self.task, self.device, self.dtype = task, device, dtype
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.options: dict[str, Any] = {
            "window": (task.mask.left, task.mask.right),
            "cu_seqlens": list(task.cu_seqlens) if task.packed else None,
            "kv_tokens": task.cu_seqlens[-1] if task.decode else None,
        }

    def iterate(self, fn: ContextParallel) -> None:
        task, shapes = self.task, self.task.shapes
        held = sizes_of(fn.layout, task.cu_seqlens, fn.world)[fn.rank]
        queries = held if task.q_tokens is None else task.q_tokens
        q = self._made(queries, shapes.heads).detach().requires_grad_(task.backward)
        k, v = (self._made(held, shapes.kv_heads).detach().requires_grad_(task.backward) for _ in range(2))
        out = fn(q, k, v, **self.options)
        if task.backward:
            torch.autograd.grad(out, (q, k, v), self._made(queries, shapes.heads))

    def _made(self, tokens: int, heads: int) -> Tensor:
        if (tokens, heads) not in self.kept:
            shapes = self.task.shapes
            leading = (tokens,) if self.task.packed else (shapes.batch, tokens)
            self.kept[tokens, heads] = torch.randn(
                *leading, heads, shapes.head_dim, device=self.device, dtype=self.dtype
            )
        return self.kept[tokens, heads]


def _ms(fn: ContextParallel, inputs: _Inputs, runs: int) -> float:
    """An iteration's, on the slowest rank, called one after another as a model does."""
    _settle(fn, inputs.device)
    start = time.perf_counter()
    for _ in range(runs):
        inputs.iterate(fn)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    slowest = torch.tensor((time.perf_counter() - start) / runs * 1e3, dtype=torch.float32, device=inputs.device)
    if fn.world > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=fn.group)
    return slowest.item()


def _settle(fn: ContextParallel, device: torch.device) -> None:
    """All ranks begin together, with nothing left to do."""
    if fn.world > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=fn.group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
