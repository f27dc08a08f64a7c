"""External packages on real GPUs over NCCL, in bf16 against fp32, at all GPUs there and alone."""

import pytest
import torch

from attention.kernels import KERNELS
from runner.environment import gpu_count
from runner.launch.files import WorldSpec
from runner.peers import PEERS
from tests.jobs import peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")]
WORLDS = pytest.mark.parametrize("world", sorted({1, gpu_count() or 1}))
FLASH_CALLERS = [name for name, package in PEERS.items() if {"ring_flash_attn", "yunchang"} & {*package.needs}]


@pytest.fixture
def near(pool):
    """Runs a package's cases, whose errors must be near those of a local call of the kernel."""

    def check(name, world, *cases, kernel="auto", runs=None, **options):
        if reason := PEERS[name].missing("cuda") or (kernel != "auto" and KERNELS[kernel].missing("cuda")):
            pytest.skip(reason)
        base = {"tokens": 512 * world, "heads": 16, "kv_heads": 4, "head_dim": 128, "causal": True, "batch": 1}
        arguments = {"name": name, "options": options, "kernel": kernel, "dtype": "bf16"}
        arguments["cases"] = [base | case for case in cases]
        outcome = pool.get(WorldSpec(world, "cuda")).call(peers.compare, arguments, 300.0)
        assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
        for found in outcome.result:
            assert runs is None or found["kernel"] == runs
            assert all(theirs < 2 * local for theirs, local in zip(found["errors"], found["local"], strict=True)), found

    return check


@WORLDS
@pytest.mark.parametrize("kernel", ("sdpa_flash", "sdpa_cudnn"))
@pytest.mark.parametrize("rotate", ("allgather", "alltoall"))
def test_pytorchs_context_parallel(near, rotate, kernel, world):
    cases = {}, {"kv_heads": 16}, {"causal": False}, {"batch": 2}, {}
    near("torch_cp", world, *cases, kernel=kernel, runs=kernel, rotate=rotate)


@WORLDS
@pytest.mark.parametrize("kernel", ("auto", "flash2", "sdpa_cudnn", *({"flash4"} & KERNELS.keys())))
@pytest.mark.parametrize("name", FLASH_CALLERS)
def test_a_package_over_each_local_kernel(near, name, kernel, world):
    cases = [{}, {"kv_heads": 16}]
    if not PEERS[name].causal_only:
        cases.append({"causal": False})
    if PEERS[name].packs:
        cases.append({"packs": [0, 64 * world, 320 * world + 1, 512 * world]})
    elif name != "usp_yunchang":
        cases.append({"kv_heads": 1, "batch": 2})
    near(name, world, *cases, kernel=kernel, runs="flash2" if kernel == "auto" else kernel)


@WORLDS
@pytest.mark.parametrize("comm", ("p2p", "all_gather"))
def test_transformer_engine(near, comm, world):
    near("transformer_engine", world, *({"kv_heads": n, "local": "sdpa_cudnn"} for n in (4, 16)), cp_comm_type=comm)
