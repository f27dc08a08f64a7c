"""Sequence-parallel models: loss and every parameter's gradient are those of a world of one, in fp64."""

from dataclasses import replace

import pytest
import torch

import attention
from runner.models import PRESETS, Latent, Transformer, preset, shard
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


def test_loss_and_gradients_are_those_of_a_world_of_one(in_world):
    for case, errors in zip(CASES, in_world(models.compare, 2, cases=CASES), strict=True):
        assert max(errors.values()) < 1e-11, (case, errors)


@pytest.mark.parametrize(
    ("name", "encoder_layers", "source", "words"),
    [
        ("tree", 0, None, "is a decode"),
        ("ring", 1, None, "source=None: .*give source"),
        ("ring", 0, models.TOKENS - 1, r"\[1, 31\].*\[1, 32\]"),
        ("zigzag", 1, models.TOKENS, "causal=false.*zigzag is for causal masks"),
    ],
)
def test_what_a_model_cannot_do_is_refused(name, encoder_layers, source, words):
    config = replace(models.config_of({"masks": [("causal", {}), ("full", {})]}), encoder_layers=encoder_layers)
    attend, ids = attention.make(name), torch.zeros(1, models.TOKENS, dtype=torch.long)
    with pytest.raises(ValueError, match=words):
        Transformer(config, attend)(shard(attend, ids, source=None if source is None else ids[:, :source]))


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
