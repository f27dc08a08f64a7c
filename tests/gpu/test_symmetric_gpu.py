"""Symmetric memory and NCCL on real GPUs: right over a thousand calls, in two groups at once, after an exception, with
launches that block, and the same bits from call to call."""

import os
import subprocess
import sys

import pytest

from attention.kernels import KERNELS
from attention.variants.registry import VARIANTS
from tests.jobs import groups, numerics, replay, shared_memory, trials
from tests.support.gpus import need_one, own_gpus, shared, worlds

pytestmark = [pytest.mark.gpu, need_one]
WORLDS = worlds(2, 4, 8)
SHARDED = [name for name, v in VARIANTS.items() if v.unsuitable(2, decode=False) is None and not v.alias_of]
every_transport = pytest.mark.parametrize("transport", ("symm", "nccl"))


@pytest.mark.parametrize("kernel, transport", [("auto", "symm"), ("auto", "nccl"), ("flash4", "symm")])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ("zigzag", "zigzag_llama3", "ulysses"))
def test_a_thousand_calls_of_changing_shapes_stay_right_and_hold_no_more_memory(
    in_world, name, kernel, transport, world
):
    if kernel == "flash4" and (reason := KERNELS["flash4"].missing("cuda")):
        pytest.skip(reason)
    given = {"name": name, "calls": 200 if shared(world) else 1000, "transport": transport}  # shared GPUs go in turns
    given |= {"kernel": kernel} if kernel != "auto" else {}
    found = in_world(shared_memory.many_calls, world, "cuda", timeout_s=200, **given)
    assert found["error"] < (1e-5 if kernel == "auto" else 1e-2)
    assert found["held"][0] == found["held"][1]
    assert found["held"][0] > 0 or transport == "nccl"
    assert kernel == "auto" or found["allocated"][1] <= found["allocated"][0] + (1 << 20)


@every_transport
@pytest.mark.parametrize("world", [w for w in WORLDS if w.values[0] > 2])
def test_two_groups_at_once(in_world, transport, world):
    assert in_world(groups.two_groups, world, "cuda", transport=transport) < 1e-5


@every_transport
@pytest.mark.parametrize("name", ("zigzag_llama3", "ulysses"))
def test_an_exception_in_between_leaves_the_next_call_right(in_world, name, transport):
    assert in_world(shared_memory.after_an_exception, 2, "cuda", name=name, transport=transport) < 1e-5


@pytest.mark.parametrize("before", ("zigzag", "ring_allgather"))
def test_a_call_of_another_variant_ends_what_an_exception_left(in_world, before):
    assert in_world(shared_memory.after_an_exception, 2, "cuda", name="ulysses", before=before, transport="symm") < 1e-5


@every_transport
@pytest.mark.parametrize("name", ("zigzag", "ulysses"))
def test_a_deterministic_call_gives_the_same_bits(in_world, name, transport):
    assert in_world(numerics.bitwise, 2, "cuda", name=name, kernel="flash2", transport=transport)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name, options, kernel",
    [
        ("ring", {}, "flash2"),
        ("zigzag", {}, "flash2"),
        ("zigzag", {}, "flash4"),  # which writes into results itself, strided ones too
        ("zigzag_llama3", {"own_first": True}, "flash4"),
        ("zigzag_llama3", {"own_first": True, "heads_k_stride": 1}, "flash2"),
    ],
    ids=str,
)
def test_own_keys_apart_give_right_results_whatever_is_late(in_world, name, options, kernel, packed, world):
    """A stream that did not follow another would read what is not there yet, or NaN where another's memory was."""
    if reason := KERNELS[kernel].missing("cuda"):
        pytest.skip(reason)
    given = {"name": name, "options": options, "kernel": kernel, "packed": packed}
    assert not any(in_world(shared_memory.local_kv_apart, world, "cuda", timeout_s=120, **given))


@own_gpus(2)
@pytest.mark.parametrize("transport", ("symm", "nccl"))
def test_blocking_launches_do_not_hang(transport, tmp_path):
    sizes = ["seq_len=2048", "heads=8", "kv_heads=2", "head_dim=128", "timing.timing_runs=3", "world_size=2"]
    for name in ("zigzag", "zigzag_llama3"):
        command = [sys.executable, "-m", "runner", f"attention={name}", f"transport={transport}", *sizes]
        done = subprocess.run([*command, f"output={tmp_path}"], env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"},
                              capture_output=True, text=True, timeout=200)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", ("flash2", "flash4"))
@pytest.mark.parametrize("name", [name for name in SHARDED if "ulysses_size" not in VARIANTS[name].options.names()])
def test_passes_replayed_from_graphs_give_what_calls_give(in_world, name, kernel, world):
    if reason := KERNELS[kernel].missing("cuda"):
        pytest.skip(reason)
    found = in_world(replay.graph_replay, world, "cuda", name=name, kernel=kernel, timeout_s=90)
    assert found["difference"] < 1e-2
    assert found["graphs"] == 6  # of two shapes: with and without gradients one forward each, and a backward


@own_gpus(2)
@pytest.mark.parametrize("way", ("none", "graphs", "auto"))
def test_trials_take_the_fastest_on_all_ranks_alike(in_world, way):
    given = {"tokens": 4096, "heads": 8, "kv_heads": 2, "head_dim": 128, "causal": True}
    first, *others = in_world(trials.auto_by_trial, 2, "cuda", replay=way, timeout_s=90, **given)
    assert others == [first] and first["random"]
    assert len(first["tried_ms"]) == (10 if way == "auto" else 5)
    assert list(first["tried_ms"].values()) == sorted(first["tried_ms"].values())
    assert next(iter(first["tried_ms"])).startswith(first["variant"]) and first["made"] == first["variant"]


def test_a_capture_that_broke_leaves_the_next_call_right(in_world):
    assert in_world(replay.after_a_broken_capture, 2, "cuda", name="ring_allgather", timeout_s=60) < 1e-2


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.gpu_smoke) for name in ("zigzag", "tree")), "zigzag_llama3", "ulysses"],
)
def test_calls_and_replays_of_a_graph_go_side_by_side(in_world, name):
    assert in_world(replay.captured_graph, 2, "cuda", name=name, transport="symm", timeout_s=60) < 1e-2
