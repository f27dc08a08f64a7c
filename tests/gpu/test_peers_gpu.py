"""External packages on real GPUs over NCCL, in bf16 against fp64, at all GPUs there and alone."""

import pytest
import torch

from attention.kernels import KERNELS
from runner.environment import gpu_count
from runner.peers import PEERS
from tests.jobs import peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")]
WORLDS = pytest.mark.parametrize("world", sorted({1, gpu_count() or 1}))
FLASH_CALLERS = [name for name, package in PEERS.items() if package.needs in ("ring_flash_attn", "yunchang")]


def matches(in_world, name, world, *cases, kernel="auto", runs=None, **options):
    if reason := PEERS[name].missing("cuda") or (kernel != "auto" and KERNELS[kernel].missing("cuda")):
        pytest.skip(reason)
    base = {"tokens": 512 * world, "heads": 16, "kv_heads": 4, "head_dim": 128, "seed": 1, "dtype": "bf16"}
    given = {"name": name, "options": options, "kernel": kernel, "cases": [base | case for case in cases]}
    for kernel, why in in_world(peers.judged, world, "cuda", timeout_s=300.0, **given):
        assert why is None and runs in (None, kernel)


@WORLDS
@pytest.mark.parametrize("kernel", ("sdpa_flash", "sdpa_cudnn"))
@pytest.mark.parametrize("rotate", ("allgather", "alltoall"))
def test_pytorchs_context_parallel(in_world, rotate, kernel, world):
    cases = {}, {"kv_heads": 16}, {"causal": False}, {"batch": 2}, {}
    matches(in_world, "torch_cp", world, *cases, kernel=kernel, runs=kernel, rotate=rotate)


@WORLDS
@pytest.mark.parametrize("kernel", ("auto", "flash2", "sdpa_cudnn", *({"flash4"} & KERNELS.keys())))
@pytest.mark.parametrize("name", FLASH_CALLERS)
def test_a_package_over_each_local_kernel(in_world, name, kernel, world):
    cases = [{}, {"kv_heads": 16}]
    if not PEERS[name].causal_only:
        cases.append({"causal": False})
    if PEERS[name].packs:
        cases.append({"lengths": (64 * world, 256 * world + 1, 192 * world - 1)})
    elif name != "usp_yunchang":
        cases.append({"kv_heads": 1, "batch": 2})
    matches(in_world, name, world, *cases, kernel=kernel, runs="flash2" if kernel == "auto" else kernel)


@WORLDS
@pytest.mark.parametrize("comm", ("p2p", "all_gather"))
def test_transformer_engine(in_world, comm, world):
    matches(in_world, "transformer_engine", world, {}, {"kv_heads": 16}, cp_comm_type=comm)
