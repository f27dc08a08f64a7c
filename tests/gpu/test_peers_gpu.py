"""External packages on real GPUs over NCCL, in bf16 against fp32, at all GPUs there and alone."""

import pytest
import torch

from attention.kernels import KERNELS
from runner.environment import gpu_count
from runner.launch.files import WorldSpec
from runner.peers import PEERS
from tests.jobs import peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")]
WORLDS = sorted({1, gpu_count() or 1})
FLASH_CALLERS = [name for name, package in PEERS.items() if {"ring_flash_attn", "yunchang"} & {*package.needs}]
SAME_KERNELS = ["flash2", "sdpa_cudnn", *(["flash4"] if "flash4" in KERNELS else [])]


@pytest.fixture
def in_world(pool):
    def call(job, world, **arguments):
        outcome = pool.get(WorldSpec(world, "cuda")).call(job, arguments, 300.0)
        assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
        return outcome.result

    return call


def near(found, kernel=None):
    for one in found:
        assert kernel is None or one["kernel"] == kernel
        for theirs, local in zip(one["errors"], one["local"], strict=True):
            assert theirs < 2 * local, one


def base(world, **other):
    return {"tokens": 512 * world, "heads": 16, "kv_heads": 4, "head_dim": 128, "causal": True, "batch": 1, **other}


def able(name, kernel="auto"):
    reason = PEERS[name].missing("cuda") or (KERNELS[kernel].missing("cuda") if kernel != "auto" else None)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", ("sdpa_flash", "sdpa_cudnn"))
@pytest.mark.parametrize("rotate", ("allgather", "alltoall"))
def test_pytorchs_context_parallel(in_world, rotate, kernel, world):
    able("torch_cp", kernel)
    cases = [base(world), base(world, kv_heads=16), base(world, causal=False), base(world, batch=2), base(world)]
    found = in_world(peers.compare, world, name="torch_cp", options={"rotate": rotate}, cases=cases, dtype="bf16", kernel=kernel)  # fmt: skip
    near(found, kernel)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", SAME_KERNELS)
@pytest.mark.parametrize("name", FLASH_CALLERS)
def test_a_package_over_each_local_kernel(in_world, name, kernel, world):
    able(name, kernel)
    cases = [base(world), base(world, kv_heads=16)]
    if not PEERS[name].causal_only:
        cases.append(base(world, causal=False))
    if PEERS[name].packs:
        cases.append(base(world, packs=[0, 64 * world, 320 * world + 1, 512 * world]))
    elif name != "usp_yunchang":
        cases.append(base(world, kv_heads=1, batch=2))
    near(in_world(peers.compare, world, name=name, options={}, cases=cases, dtype="bf16", kernel=kernel), kernel)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FLASH_CALLERS)
def test_a_packages_own_kernel_is_flash_attention_2(in_world, name, world):
    able(name)
    near(in_world(peers.compare, world, name=name, options={}, cases=[base(world)], dtype="bf16"), "flash2")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("comm", ("p2p", "all_gather"))
def test_transformer_engine(in_world, comm, world):
    able("transformer_engine")
    cases = [base(world, local="sdpa_cudnn"), base(world, kv_heads=16, local="sdpa_cudnn")]
    near(in_world(peers.compare, world, name="transformer_engine", options={"cp_comm_type": comm}, cases=cases, dtype="bf16"))  # fmt: skip
