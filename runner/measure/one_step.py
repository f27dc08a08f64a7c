"""The job of `runner.max_seq`: whether a forward, and backward, fits in the memory of every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention import transports
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory, memory_limit
from runner.measure import memory
from runner.measure.attention_work import DTYPES, AttentionWork, row_shape
from runner.measure.choosing import resolved, together
from runner.measure.model_work import ModelWork
from runner.measure.timing import iterate

PEAKS = {"needed": "allocated", "held": "reserved"}  # with symmetric memory, which the allocator's limit leaves out


class LocalWork(AttentionWork):
    """Every rank draws its own shards, as a training step gets them: none holds a whole tensor."""

    def whole_input(self, which: str) -> Tensor:
        """A shape without memory."""
        work, shape = self.spec, row_shape(self.spec, which)
        return torch.empty(shape if work.seqlens else (work.batch, *shape), dtype=DTYPES[work.dtype], device="meta")

    def drawn(self, shard: Tensor) -> Tensor:
        return torch.empty(shard.shape, dtype=shard.dtype, device=self.me.device).normal_()


def run(me: Rank, experiment: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """kernel, transport, `memory` by rank in bytes, and `fits`: whether it is within the limit, else `why`. In a world of
    several, a rank that runs out of memory ends the world. small: a short step before it without the limit, which takes
    what a process takes once."""
    _step(me, Experiment.from_plain(small))
    spec = Experiment.from_plain(experiment)
    try:
        with memory_limit(me, spec.launch.memory_limit_gb):
            return _step(me, spec)
    except (RuntimeError, MemoryError) as error:
        if me.world > 1 or not is_out_of_memory(error):  # other ranks may wait for this one
            raise
        return {"fits": False, "why": str(error).splitlines()[0]}


def facts(me: Rank, small: dict[str, Any]) -> tuple[str, int | None]:
    """The kernel of a short step, and after it the bytes that a rank can still allocate on its GPU, the least of all."""
    kernel = _step(me, Experiment.from_plain(small))["kernel"]
    return kernel, min(me.gather(torch.cuda.mem_get_info()[0])) if me.device.type == "cuda" else None


def _step(me: Rank, spec: Experiment) -> dict[str, Any]:
    try:
        return _measured(me, spec)
    finally:
        transports.release()
        memory.empty_caches(me.device)


def _measured(me: Rank, spec: Experiment) -> dict[str, Any]:
    me.say("prepare")
    spec, about = resolved(me, spec)
    make = LocalWork if spec.model is None else ModelWork
    work = together(me, lambda: make(me, spec))
    me.say("timing", work.flops() / work.rate())
    inputs = memory.tensor_bytes(work.inputs)
    if me.device.type == "cuda":
        memory.reset_peak(me.device)
        iterate(work)
        mine = memory.of_gpu(me.device)
        mine |= {name: mine[f"peak_{which}"] + mine["symmetric"] for name, which in PEAKS.items()}
    else:
        mine = memory.of_cpu(work, inputs)
        mine |= dict.fromkeys(PEAKS, mine["peak_resident"])
    limit = spec.launch.memory_limit_gb
    fits = all(me.gather(limit is None or mine["held"] <= limit * 2**30))
    return {**work.report(), **about, "fits": fits, "memory": me.gather(mine | {"inputs": inputs})}
