"""Which worlds the tests can have on this machine's GPUs: with a GPU for each rank, or else, of few ranks, all on one GPU
(`launch.share_gpu`), where ranks exchange over symmetric memory only."""

import pytest
import torch

from runner.environment import gpu_count

MOST_SHARING = 4
GPUS = gpu_count() if torch.cuda.is_available() else 0
need_one = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA GPU")


def shared(world: int) -> bool:
    """Whether the ranks of a world on GPUs share one."""
    return world > GPUS


def worlds(*sizes: int) -> list:
    """Parameters, those skipped that this machine cannot have."""
    return [pytest.param(n, marks=pytest.mark.skipif(not _possible(n), reason=_lack(n))) for n in sizes]


def own_gpus(world: int):
    """A mark for what needs a GPU for each rank, as everything that is timed or goes over NCCL."""
    return pytest.mark.skipif(world > GPUS, reason=f"needs {world} CUDA GPUs")


def _possible(world: int) -> bool:
    return world <= GPUS or (GPUS > 0 and world <= MOST_SHARING)


def _lack(world: int) -> str:
    return "needs a CUDA GPU" if world <= MOST_SHARING else f"needs {world} CUDA GPUs"
