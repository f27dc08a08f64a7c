"""A few minutes' look at everything that runs on a GPU: `pytest -m gpu_smoke`. Each kernel, each exchange between ranks, which
share a GPU where there is one, replays; calls beside replays, waits that end and the command line are marked beside their own tests."""

import pytest
import torch

from attention.kernels import KERNELS, Call, Shape, refusal
from attention.masks.band import CAUSAL
from tests.jobs import replay
from tests.support.cases import Case, assert_right
from tests.support.gpus import need_one
from tests.support.naive import assert_matches, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_smoke, need_one]


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "decode"])
def test_a_kernel_matches_plain_attention_forward_and_backward(name):
    q, k, v, dout, call = inputs(Call(0.125, CAUSAL), (512, 512), 8, 2, 64, torch.bfloat16, "cuda")
    if reason := refusal(KERNELS[name], Shape.of(q, k, k, backward=True), CAUSAL):
        pytest.skip(f"{name}: {reason}")
    assert_matches(KERNELS[name], q, k, v, dout, call)


@pytest.mark.parametrize("name", ("ring", "zigzag", "ring_allgather", "zigzag_llama3", "ulysses", "usp"))
def test_an_exchange_matches_fp64(pool, name):
    common = {"head_dim": 64, "seed": 1, "dtype": "bf16", "transport": "auto"}
    assert_right(pool, [Case(name, 2, 1024, 8, 2, lengths=x, **common) for x in (None, (256, 768))], "cuda")


@pytest.mark.parametrize("reduce", ("packed", "fused"))
def test_a_decode_matches_fp64(pool, reduce):
    common = {"dtype": "bf16", "transport": "auto", "queries": 1, "causal": False, "gradients": "", "batch": 2}
    every = [Case("tree", 2, 3001, 32, 8, 128, seed, {"reduce": reduce}, **common) for seed in range(2)]
    assert_right(pool, every, "cuda")


@pytest.mark.parametrize("name", ("zigzag", "ulysses"))
def test_passes_replayed_from_graphs_give_what_calls_give(in_world, name):
    found = in_world(replay.graph_replay, 2, "cuda", name=name, kernel="flash2", timeout_s=90)
    assert found["difference"] < 1e-2
    assert found["graphs"] == 6
