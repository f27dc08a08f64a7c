"""The configuration groups: every file composes and resolves, and each group is what the code knows."""

import inspect
import json
import math
import random
import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from attention import masks
from attention.kernels import KERNELS
from attention.transports import SUMMARIES
from attention.variants.registry import AUTO
from runner import rounds
from runner.config import overrides, schema
from runner.config.experiment import BEST, NONE
from runner.config.resolve import run_name
from runner.config.rules import model as model_rules
from runner.config.rules.attention import best_values
from runner.config.schema import groups
from runner.config.values import InvalidConfig
from runner.measure.workload import DTYPES
from runner.peers import PEERS, everything
from tests.support.composing import composed, configured, resolved
from tests.support.paths import ROOT

CONF = ROOT / "conf"


def plain(node):
    return OmegaConf.to_container(node, resolve=True)


def comment(group, name):
    lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
    return " ".join(line[1:].strip() for line in lines if line.startswith("#"))


def test_a_group_has_a_file_for_each_name_that_the_code_knows():
    known = {
        "attention": {AUTO, *everything()}, "kernel": {"auto", *KERNELS}, "transport": {"auto", *SUMMARIES}, "model": {*schema.MODELS},
        "mask": {NONE, *masks.names()}, "timing": {*schema.TIMING_METHODS}, "hardware": {*schema.HARDWARE}, "dtype": {*DTYPES},
    }  # fmt: skip
    for group, names in known.items():
        assert {path.stem for path in (CONF / group).iterdir()} <= {*groups()[group]} <= names, group
        assert group == "dtype" or {*groups()[group]} == names


@pytest.mark.parametrize("group", [group for group in groups() if group not in ("experiment", "topology", "tracker")])
def test_every_choice_makes_an_experiment(group):
    for choice in groups()[group]:
        able = ["attention=ring"] if group in ("mask", "config") else []
        if group == "config" and composed(f"config={choice}").q_len is not None:
            able = ["attention=tree"]
        able += ["model.type=llama"] if choice == "hf" else []
        spec = resolved(f"{group}={choice}", *able, gpus=1 if choice == "grouped" else 2)
        assert spec.workload.seq_len > 0


@pytest.mark.parametrize("name", groups()["experiment"])
def test_every_run_of_an_experiment_is_one_and_headlines_are_compared_in_rounds(name):
    jobs = overrides.jobs([f"+experiment={name}"])
    some = {jobs[0], jobs[-1], *random.Random(len(jobs)).sample(jobs, 2)}
    assert len({json.dumps(resolved(*job, gpus=8).plain()) for job in some}) == len(some) > 1  # no run twice
    assert re.search(r"Machine: .* Estimate: \d+ runs?, \d+ (min|h)", comment("experiment", name))
    for group in rounds.groups(jobs, "auto") if "Headline:" in comment("experiment", name) else []:
        spec = resolved(*jobs[group[0]], gpus=8)
        assert rounds.number(composed(f"+experiment={name}").order, spec, len(group)) == 3


def test_a_variant_s_file_has_its_options_source_and_use_and_packages_are_at_their_best():
    for name, variant in everything().items():
        options, text = plain(composed(f"attention={name}").attention), comment("attention", name)
        best = {option for option in variant.options.names() if name in PEERS and best_values(variant, option, 4, 4)}
        assert options == {"name": name, **variant.parse().plain()} | dict.fromkeys(best, BEST)
        assert all(year in text for year in re.findall(r"\b20\d\d\b", variant.source))
        assert f"Use: {variant.use}." in text


@pytest.mark.parametrize("name", masks.names())
def test_a_mask_s_file_has_its_definition_and_parameters(name):
    cfg = composed(f"mask={name} causal=true window=[3,0]")
    assert (cfg.causal, list(cfg.window)) == (True, [3, 0])
    assert set(cfg.mask) == {"name", *inspect.signature(getattr(masks, name)).parameters}
    assert "Definition: " in comment("mask", name)


@pytest.mark.parametrize("model", groups()["model"])
def test_a_model_has_its_options_and_a_variant_that_another_choice_replaces(model):
    more = () if model == "none" else (*model_rules.OPTIONS, *(model_rules.OF_HF if model == "hf" else ()))
    assert set(plain(composed(f"model={model}").model)) - {"name"} == {*more} - {"name"}
    kind = ["model.type=mistral"] if model == "hf" else []
    assert resolved(f"model={model}", *kind, "world_size=4", gpus=8).variant != "auto"
    assert composed(f"model={model} attention=ulysses").attention.name == "ulysses"


def test_tokens_per_rank_follow_the_world_size():
    assert resolved("+experiment=weak_scaling world_size=4", gpus=8).workload.seq_len == 8192 * 4
    assert resolved("config=tiny", "seq_len=${per_rank:96}", "hardware=cpu").workload.seq_len == 96 * 2
    cfg = configured("config=tiny", "seq_len=${per_rank:96}", "world_size=4 hardware=cpu")
    assert run_name(cfg, 0).startswith("zigzag_tiny_s384_w4_")
    assert len(overrides.jobs(["seq_len=${per_rank:96}", "world_size=1,2"])) == 2
    with pytest.raises(InvalidConfig, match="world_size=0: must be auto or a whole number"):
        resolved("config=tiny", "seq_len=${per_rank:96}", "hardware=cpu world_size=0")


def test_models_have_their_sinks_scales_values_and_layer_kinds():
    names = (
        "gpt_oss_120b gemma3_27b llama4_scout deepseek_v3 gpt_oss_120b_window gemma3_27b_window llama4_scout_chunked"
    )
    gpt, gemma, scout, deepseek, *local = (
        resolved(f"config={name} attention=ring", gpus=2).workload for name in names.split()
    )
    assert gpt.sinks and gemma.scale == pytest.approx(168**-0.5, rel=1e-15)
    assert deepseek.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-15)
    assert (deepseek.head_dim, deepseek.v_head_dim) == (192, 128)
    # a query of a local layer sees itself and the window's or chunk's other tokens; all else is alike
    pairs = [seen * (seen + 1) // 2 + (65536 - seen) * seen for seen in (128, 1024)] + [8 * 8192 * 8193 // 2]
    assert [layer.pairs for layer in local] == pairs
    assert [replace(layer, window=(-1, -1), named_mask=None) for layer in local] == [gpt, gemma, scout]
