"""The job of `runner.max_seq`: whether a forward, and backward, fits in the memory of every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention import transports
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory, memory_limit
from runner.measure import choosing, memory
from runner.measure.attention_work import AttentionWork, row_shape
from runner.measure.model_work import ModelWork
from runner.measure.timing import iterate
from runner.measure.workload import DTYPES


class LocalWork(AttentionWork):
    """Every rank makes its own shards, as a training step gets them: none holds a whole tensor."""

    def whole_input(self, which: str) -> Tensor:
        """Ones, in the memory of one."""
        work, shape = self.spec, row_shape(self.spec, which)
        one = torch.ones((), dtype=DTYPES[work.dtype], device=self.me.device)
        return one.expand(shape if work.seqlens else (work.batch, *shape))


def run(me: Rank, experiment: dict[str, Any], small: dict[str, Any] | None = None) -> dict[str, Any]:
    """kernel, transport, `memory` by rank in bytes, `free`: the bytes that a rank can still allocate on its GPU, the least of all, and
    `fits`: whether the step is within the limit, else `why`. In a world of several, a rank that runs out of memory ends the
    world. small: a short step before it without the limit, which takes what a process takes once."""
    if small is None:
        return _step(me, Experiment.from_plain(experiment))
    _step(me, Experiment.from_plain(small))
    spec = Experiment.from_plain(experiment)
    try:
        with memory_limit(me, spec.launch.memory_limit_gb):
            return _step(me, spec)
    except (RuntimeError, MemoryError) as error:
        if me.world > 1 or not is_out_of_memory(error):  # other ranks may wait for this one
            raise
        return {"fits": False, "why": str(error).splitlines()[0]}


def _step(me: Rank, spec: Experiment) -> dict[str, Any]:
    try:
        return _measured(me, spec)
    finally:
        transports.release()
        memory.empty_caches(me.device)


def _measured(me: Rank, spec: Experiment) -> dict[str, Any]:
    me.say("prepare")
    spec, about = choosing.resolved(me, spec)
    make = LocalWork if spec.model is None else ModelWork
    work = choosing.together(me, lambda: make(me, spec))
    me.say("timing", choosing.iteration_s(me, spec))
    inputs, free = memory.tensor_bytes(work.inputs), None
    if me.device.type == "cuda":
        memory.reset_peak(me.device)
        iterate(work)
        mine = memory.of_gpu(me.device)
        for name, which in {"needed": "allocated", "held": "reserved"}.items():
            mine[name] = mine[f"peak_{which}"] + mine["symmetric"]  # which the allocator's limit leaves out
        work.release()
        memory.empty_caches(me.device)
        free = min(me.gather(torch.cuda.mem_get_info()[0]))
    else:
        mine = memory.of_cpu(work, inputs)
        mine |= dict.fromkeys(("needed", "held"), mine["peak_resident"])
    limit = spec.launch.memory_limit_gb
    fits = all(me.gather(limit is None or mine["held"] <= limit * 2**30))
    return {**work.report(), **about, "fits": fits, "free": free, "memory": me.gather(mine | {"inputs": inputs})}
