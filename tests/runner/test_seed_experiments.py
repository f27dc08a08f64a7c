"""The experiments that are earlier suites' default sets, and those of dilated attention: each of them in a tiny form on CPU
ranks; and the commands of docs/seeds.md."""

import re
import shlex
from itertools import product
from pathlib import Path

import pytest

from runner import app
from runner.config import overrides
from tests.support.composing import composed, configured, resolved

TINY = ["config=tiny", "hardware=cpu", "batch=1", "timing.timing_runs=2", "timing.warmup_runs=1", "timing.settle_ms=0"]
PAIRS = ["attention.segments=[32,64]", "attention.rates=[1,2]", "seq_len=128", "heads=2", "kv_heads=2"]
RUNS = {
    "backends": ["kernel=sdpa_flash", "seq_len=128", "heads=2", "kv_heads=2"],
    "ring_correctness": ["attention=ring_varlen", "seq_len=128"],
    "ring_performance": ["attention=ring", "seq_len=128"],
    "ring_multi_gpu": ["attention=zigzag", "seq_len=128"],
    "ring_gqa": ["attention=ring", "seq_len=128", "heads=8", "kv_heads=2"],
    "ring_zigzag": ["attention=zigzag", "seq_len=128"],
    "tree_profile": ["q_len=1", "causal=false", "seq_len=512"],
    "model_quick": ["model=encoder_decoder_tiny", "seq_len=64", "heads=2", "kv_heads=2", "head_dim=16", "model.layers=1",
                    "model.hidden=32", "model.vocabulary=256", "model.steps=2"],
    "extreme_lengths": ["mask=block_sparse", "attention=balanced", "mode=forward", "seq_len=1024", "heads=2", "kv_heads=2"],
    "dilated": ["attention=dilated_improved_longnet", *PAIRS],
    "dilated_suite": ["attention=dilated_multihead", "mode=forward_backward", *PAIRS],
    "dilated_ring": ["attention.mixing=longnet", *PAIRS],
    "dilated_features": ["attention.memory_pool=true", *PAIRS],
}  # fmt: skip
ALONE = ("backends", "dilated", "dilated_suite", "dilated_features")


@pytest.mark.parametrize("name", RUNS)
def test_a_tiny_run_of_an_earlier_suites_set_is_ok(name, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "pool", pool)
    world = [f"world_size={1 if name in ALONE else 2}"]
    value = app.run(configured(f"+experiment={name}", *TINY, *RUNS[name], *world), tmp_path, seed=1)
    assert value["status"] == "ok", value["reason"]
    assert value["correctness"]["passed"]
    if name == "dilated_features":
        assert "memory_pool=true keeps nothing" in value["chosen"]["note"]
    if name == "tree_profile":
        text = (tmp_path / "phases.csv").read_text()
        assert all(f",comm_{what}," in text for what in ("max_lse", "sum_den", "sum_num")), text[:300]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model_quick", "model_full", "model_sweep"])
def test_every_run_of_whole_models_is_one_on_cpu_ranks(name):
    params = composed(f"+experiment={name}", return_hydra_config=True).hydra.sweeper.params
    swept = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
    runs = [resolved(f"+experiment={name}", "hardware=cpu", "world_size=2", *each) for each in product(*swept)]
    assert len({run.model.name for run in runs}) == len(str(params.get("model", "")).split(","))
    assert all(run.baseline == "none" and run.mode in ("training", "inference") for run in runs)


def test_the_causal_variants_of_extreme_lengths_run_as_its_comment_says():
    for name in ("zigzag", "stripe", "zigzag_llama3", "usp"):
        assert resolved("+experiment=extreme_lengths", "mask=causal", f"attention={name}", gpus=4).variant == name


def test_every_command_of_the_table_of_earlier_suites_is_accepted():
    text = (Path(__file__).parents[2] / "docs" / "seeds.md").read_text()
    commands = re.findall(r"`(?:python -m runner )?((?:-m |\+experiment=|attention=\w+ )[^`]*)`", text)
    assert len(commands) > 30
    for command in commands:
        flags, arguments = overrides.split(shlex.split(command))
        assert overrides.problem(arguments, "-m" in flags) is None, command
