"""The main job on GPUs, through its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner.environment import gpu_count
from tests.support.gpus import need_one, own_gpus

pytestmark = [pytest.mark.gpu, need_one]
SMALL = ["seq_len=2048", "heads=8", "kv_heads=2", "head_dim=128", "timing.timing_runs=3"]


def run(tmp_path, *arguments):
    command = [sys.executable, "-m", "runner", f"output={tmp_path}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done, [json.loads(p.read_text()) for p in sorted(Path(tmp_path).glob("**/result.json"))]


def test_the_default_takes_all_gpus_and_nccl(tmp_path):
    done, (value,) = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert value["experiment"]["device"] == "cuda"
    assert value["experiment"]["world_size"] == gpu_count()
    assert value["experiment"]["workload"]["seq_len"] == 32768
    assert value["environment"]["gpus_before"]


def test_every_timing_method_runs(tmp_path):
    done, values = run(
        tmp_path, "-m", *SMALL, "timing=simple,warmup,adaptive,cudagraph,profiler", "timing.time_cap_s=5"
    )
    assert done.returncode == 0, done.stderr
    assert {v["timing"]["method"]: v["status"] for v in values} == dict.fromkeys(
        ("simple", "warmup", "adaptive", "cudagraph", "profiler"), "ok"
    )


@own_gpus(2)
@pytest.mark.parametrize("transport", ["symm", "nccl"])
def test_a_profile_shows_whom_a_causal_ring_keeps_waiting(tmp_path, transport):
    done, (value,) = run(tmp_path, "attention=ring", "world_size=2", "timing=profiler", f"transport={transport}",
                         "timing.timing_runs=3", "baseline=none")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert value["chosen"]["transport"] == transport
    first, last = value["profile"]  # the first has a third of the last's pairs, and waits for its dk and dv
    assert first["exposed_communication_ms"] > last["exposed_communication_ms"]


@pytest.mark.gpu_smoke
def test_ranks_that_share_a_gpu_are_checked_and_not_timed(tmp_path):
    names = ("ring", "zigzag_llama3", "ulysses", "tree")
    done, values = run(tmp_path, "-m", *SMALL, f"attention={','.join(names)}", "world_size=2", "launch.share_gpu=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {v["experiment"]["variant"]: v["status"] for v in values} == dict.fromkeys(names, "ok")
    for value in values:
        assert value["correctness"]["passed"] and value["chosen"]["transport"] == "symm"
        assert value["timing"] is None and "launch.share_gpu=true" in value["reason"]


def test_too_little_memory_is_oom_and_the_sweep_goes_on(tmp_path):
    done, values = run(tmp_path, "-m", *SMALL, "launch.memory_limit_gb=0.05,null", "batch=16")
    assert done.returncode == 1, done.stderr
    assert sorted(v["status"] for v in values) == ["ok", "oom"]


def test_a_model_of_transformers_passes_its_gate_and_is_timed(tmp_path):
    pytest.importorskip("transformers")
    sizes = ["model.layers=2", "model.hidden=256", "model.mlp=512", "model.vocabulary=256", "heads=4", "kv_heads=2"]
    done, (value,) = run(tmp_path, "model=hf", "model.type=mistral", *sizes, "head_dim=64", "seq_len=1024")
    assert done.returncode == 0, done.stderr
    assert (value["status"], value["correctness"]["passed"]) == ("ok", True), value["reason"]
    assert value["experiment"]["device"] == "cuda" and value["model"]["loss_curve"]
