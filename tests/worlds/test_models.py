"""Sequence-parallel models: loss and every parameter's gradient are those of a world of one, in fp64."""

import pytest
import torch

import attention
from runner.models import PRESETS, Latent, Transformer, preset
from tests.jobs import models

WINDOWS = [("sliding_window", {"left": 5}), ("causal", {})]
DOCUMENTS = [("documents", {"lengths": [5, 19, 8]})]
CASES = [
    {"name": "zigzag"},
    {"name": "zigzag", "labels": True, "recompute": True},
    {"name": "ulysses", "masks": [("dca", {"window": 8, "global_tokens": 2, "random": 3, "causal": True})]},
    {"name": "balanced", "masks": DOCUMENTS},
    {"name": "dense"},
    {"name": "zigzag", "sinks": True, "softcap": 2.0, "scale": 0.4},
    {"name": "ring", "masks": WINDOWS, "sinks": True, "layers": 3},
    {"name": "zigzag", "latent": {"q": 12, "kv": 8, "rotary": 4}, "v_head_dim": 6},
    {"name": "ulysses", "encoder_layers": 1},
    {"name": "ring", "encoder_layers": 2, "masks": WINDOWS, "labels": True},
]


@pytest.mark.parametrize("world", [1, 2])
def test_loss_and_gradients_are_those_of_a_world_of_one(in_world, world):
    for case, errors in zip(CASES, in_world(models.compare, world, cases=CASES), strict=True):
        assert max(errors.values()) < 1e-11, (case, errors)


def test_trains_under_fsdp_over_data_and_context_ranks(in_world):
    errors = in_world(models.under_fsdp, 4, shape=[2, 2], recompute=True)
    assert max(errors.values()) < 1e-9, errors


def test_refusals_name_the_value_and_the_way_out(in_world):
    found = in_world(models.refusals, 2)
    assert "is a decode" in found["decode"]
    assert "source=None" in found["source"] and "give source" in found["source"]
    assert "[1, 31]" in found["lengths"] and "[1, 32]" in found["lengths"]
    assert "causal=false" in found["mask"] and "zigzag is for causal masks" in found["mask"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropout": 0.1}, "dropout=0.1: .* use dropout=0"),
        ({"layers": 0}, "layers=0: must be a whole number of at least 1"),
        ({"kv_heads": 3}, "3"),
        ({"head_dim": 7}, "head_dim=7: rotary embedding needs an even number"),
        ({"latent": Latent(q=8, kv=8, rotary=4), "kv_heads": 2}, "kv_heads=2: MLA .* use kv_heads=8"),
        ({"kinds": ()}, "give .Kind"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        preset("decoder_tiny", **change)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="model=decoder_tin: did you mean decoder_tiny"):
        preset("decoder_tin")


@pytest.mark.parametrize("name", PRESETS)
def test_matrices_and_flops_are_those_of_the_model(name):
    config = preset(name)
    with torch.device("meta"):
        model = Transformer(config, attention.make("dense"))
    assert config.matrices == sum(p.numel() for p in model.parameters() if p.dim() == 2)
    pairs = config.kind(0).mask.pairs(512) * config.layers  # every preset has one mask or one layer
    pairs += (config.layers + config.encoder_layers) * 512**2 if config.encoder_layers else 0
    attended = 2 * pairs * config.heads * (config.head_dim + config.value_dim)
    assert config.flops(3, 512) == 3 * (2 * 512 * config.matrices + attended)
