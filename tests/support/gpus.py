"""The worlds that tests can have on this machine's GPUs: one GPU for each rank, or, for few ranks, one GPU for all of
them (`launch.share_gpu`), where they exchange over symmetric memory only. And a job in a living world."""

from typing import Any

import pytest
import torch

from runner.environment import gpu_count
from runner.launch.files import WorldSpec
from runner.launch.worlds import Pool

MOST_SHARING = 4
GPUS = gpu_count() if torch.cuda.is_available() else 0
need_one = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA GPU")


def shared(world: int) -> bool:
    """Whether the ranks of a world on GPUs share one."""
    return world > GPUS


def worlds(*sizes: int) -> list:
    """Parameters for these world sizes; those that this machine cannot have are skipped."""
    return [pytest.param(n, marks=pytest.mark.skipif(not _possible(n), reason=_lack(n))) for n in sizes]


def result_of(pool: Pool, job: Any, world: int, device: str = "cpu", timeout_s: float = 120.0, **arguments: Any) -> Any:
    """What rank 0 returns of a job, which must end well."""
    spec = WorldSpec(world, device, share_gpu=device == "cuda" and shared(world))
    outcome = pool.get(spec).call(job, arguments, timeout_s)
    assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
    return outcome.result


def own_gpus(world: int):
    """A mark for tests that need one GPU for each rank: everything that is timed or uses NCCL."""
    return pytest.mark.skipif(world > GPUS, reason=f"needs {world} CUDA GPUs")


def _possible(world: int) -> bool:
    return world <= GPUS or (GPUS > 0 and world <= MOST_SHARING)


def _lack(world: int) -> str:
    return "needs a CUDA GPU" if world <= MOST_SHARING else f"needs {world} CUDA GPUs"
