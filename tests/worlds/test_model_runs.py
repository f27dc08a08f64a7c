"""Whole models through the program: the gate, the training loop, and what a result has of them."""

import math

import pytest

import runner
from runner import app
from runner.measure import metrics, model_work
from runner.models import preset
from tests.jobs import models
from tests.support.composing import resolved

SMALL = ("model.layers=2", "model.hidden=32", "model.vocabulary=256", "heads=4", "kv_heads=2", "head_dim=8", "seq_len=64",
         "hardware=cpu", "world_size=2")  # fmt: skip
TINY = ("model=decoder_tiny", *SMALL, "batch=2")
BOTH = ("model=encoder_decoder_tiny", "attention=ring", *SMALL, "batch=1")
LAYER = ("model=gpt_oss_layer", "attention=ring", *SMALL, "batch=2", "model.layers=3")


def test_the_gate_passes_a_model_and_finds_every_planted_fault(in_world):
    why = in_world(models.gated, 2, experiment=resolved(*TINY, "dtype=bf16").plain(), faults=list(models.FAULTS))
    assert why.pop("") is None
    assert all(why.values()), why


def test_the_gate_passes_every_kind_of_model(in_world):
    runs = {
        "recompute": (*TINY, "dtype=bf16", "attention=ulysses", "mask=chunked", "model.recompute=true"),
        "encoder": (*BOTH, "dtype=fp32"),
        "sinks": (*LAYER, "dtype=fp32", "model.sharded=true", "model.recompute=true", "model.offload=true"),
    }
    specs = {name: resolved(*overrides).plain() for name, overrides in runs.items()}
    assert in_world(models.each_gated, 2, experiments=specs) == dict.fromkeys(specs)


@pytest.mark.parametrize(
    ("overrides", "is_cut"),
    [
        ((*TINY, "attention=balanced", "mask=dca", "mask.window=8", "model.recompute=true"), True),
        ((*BOTH, "mode=training"), False),  # cross attention
        (LAYER, False),  # layers that alternate
    ],
)
def test_the_bytes_of_all_layers_are_those_that_the_transport_counts(in_world, overrides, is_cut):
    spec = resolved(*overrides, "dtype=fp32")
    by_rank, build_ms, pulls = in_world(models.received, 2, experiment=spec.plain())
    passes = metrics.compute(spec, dict.fromkeys(metrics.flops(spec), 1.0), None, pulls).passes
    expected = {which: entry.bytes_received_by_rank for which, entry in passes.items()}
    for which in ("forward", "backward", "optimizer"):
        assert [rank[which] for rank in by_rank] == [{k: n for k, n in rank.items() if n} for rank in expected[which]]
    assert expected["backward"] != expected["total"] != [{}, {}]
    assert (build_ms is not None) is is_cut


def test_fewer_layers_are_checked_where_a_device_has_no_memory_for_all(in_world):
    found = in_world(models.with_little_memory, 2, experiment=resolved(*TINY, "dtype=fp32").plain())
    assert (found.passed, found.checked_share) == (True, 0.5)


def test_a_fault_that_begins_after_the_check_is_found_after_the_timing(in_world):
    assert "negated" in in_world(models.timed_wrongly, 2, experiment=resolved(*TINY, "dtype=fp32").plain())


def test_a_training_is_timed_by_pass_and_its_loss_falls(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "pool", pool)
    given = [*TINY, "mode=training,inference", "model.sharded=false,true", "dtype=fp32", f"output={tmp_path}"]
    training, sharded, inference, _ = (result.plain() for result in runner.multirun(given))
    for value in (training, inference):
        assert value["status"] == "ok", value["reason"]
        assert value["correctness"]["passed"] and value["correctness"]["timed"]["passed"]
        spec = resolved(*TINY, f"mode={value['experiment']['mode']}")
        assert value["metrics"]["flops"]["forward"] == spec.model.config(spec.workload).flops(2, 64)
        assert value["model"]["parameter_bytes"] == 4 * value["model"]["parameters"]
        assert value["memory"]["by_rank"][0]["peak_resident"] > value["model"]["parameter_bytes"]
        for which, entry in value["metrics"]["passes"].items():
            assert entry["tokens_per_s"] == pytest.approx(128 / value["timing"]["passes"][which]["median"] * 1e3)
    assert list(inference["timing"]["passes"]) == ["forward"] and inference["model"]["loss_curve"] == []
    assert list(training["timing"]["passes"]) == ["forward", "backward", "optimizer", "total"]
    assert training["baseline"]["passes"].keys() == training["timing"]["passes"].keys()
    assert "wait_gradients" in training["phases"]["backward"]["phases"]
    curve = training["model"]["loss_curve"]
    assert len(curve) >= training["experiment"]["model"]["steps"] == 20
    assert sharded["model"]["loss_curve"][:20] == pytest.approx(curve[:20], abs=1e-3)
    assert sharded["model"]["parameter_bytes"] == training["model"]["parameter_bytes"] / 2
    assert curve[0] == pytest.approx(math.log(256), abs=0.1) and curve[-1] < curve[0] - 0.5


def test_a_batch_continues_where_the_one_before_ends_and_the_text_begins_again():
    whole = model_work.whole_text()
    assert bytes(whole[:14].tolist()) == b"First Citizen:" and int(whole.max()) < 128
    assert model_work.excerpts(1, 2, 100)[0].tolist() == whole[200:300].tolist()
    assert model_work.excerpts(0, 1, len(whole) + 1)[0, -1] == whole[0]


def test_a_mask_by_name_takes_the_presets_parameters_and_the_models_own_mask_is_described():
    sparse = resolved("model=decoder_tiny", "attention=ring", "mask=dca", "mask.window=64")
    parameters = sparse.workload.named_mask.parameters
    assert (parameters["window"], parameters["global_tokens"], parameters["random"]) == (64, 32, 16)
    medium = resolved("model=decoder_medium", "attention=ring")
    assert medium.workload.whole_mask == preset("decoder_medium").kind(0).mask
    assert medium.model.config(medium.workload) == preset("decoder_medium", kv_heads=16)
    assert resolved(*LAYER).workload.window == (127, -1)
