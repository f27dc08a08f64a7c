"""A few minutes' look at everything that runs on a GPU: `pytest -m gpu_smoke`. Each kernel, each exchange between ranks, which
share a GPU where there is one, CUDA graphs; waits that end and the command line are marked beside their own tests."""

import pytest
import torch

from attention.kernels import KERNELS, Call, Shape, refusal
from attention.masks.band import CAUSAL
from tests.jobs import numerics, replay
from tests.support.gpus import need_one
from tests.support.naive import assert_matches, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_smoke, need_one]

CASE = {"tokens": 1024, "heads": 8, "kv_heads": 2, "head_dim": 64, "causal": True, "batch": 1}
DECODE = {"batch": 2, "queries": 1, "keys": 3001, "heads": 32, "kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "decode"])
def test_a_kernel_matches_plain_attention_forward_and_backward(name):
    q, k, v, dout, call = inputs(lambda: Call(0.125, CAUSAL), (512, 512), 8, 2, 64, torch.bfloat16, "cuda")
    if reason := refusal(KERNELS[name], Shape.of(q, k, k, backward=True), CAUSAL):
        pytest.skip(f"{name}: {reason}")
    assert_matches(KERNELS[name], q, k, v, dout, call)


@pytest.mark.parametrize("name", ("ring", "zigzag", "ring_allgather", "zigzag_llama3", "ulysses", "usp"))
def test_an_exchange_stays_within_twice_the_error_of_one_gpu(in_world, name):
    packed = CASE | {"packs": [0, 256, 1024]}
    for found in in_world(numerics.compare, 2, "cuda", name=name, options={}, cases=[CASE, packed], dtype="bf16"):
        for ours, local in zip(found["errors"], found["local"], strict=True):
            assert ours < 2 * local + 1e-6, found


@pytest.mark.parametrize("options", ({"reduce": "packed"}, {"reduce": "fused"}), ids=str)
def test_a_decode_stays_within_twice_the_error_of_one_gpu(in_world, options):
    for found in in_world(
        numerics.decode, 2, "cuda", name="tree", options=options, cases=[DECODE, DECODE], dtype="bf16"
    ):
        assert found["error"] < 2 * found["local"] + 1e-6, found


@pytest.mark.parametrize("name", ("zigzag", "ulysses"))
def test_passes_replayed_from_graphs_give_what_calls_give(in_world, name):
    found = in_world(replay.graph_replay, 2, "cuda", name=name, kernel="flash2", timeout_s=90)
    assert found["difference"] < 1e-2
    assert found["graphs"] == 6


@pytest.mark.parametrize("name", ("zigzag", "tree"))
def test_calls_and_replays_of_a_graph_go_side_by_side(in_world, name):
    assert in_world(replay.captured_graph, 2, "cuda", name=name, transport="symm", timeout_s=90) < 1e-2
