"""The configuration groups: every file composes and resolves, and each group is what the code knows."""

import csv
import inspect
import itertools
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attention import masks
from attention.kernels import KERNELS
from attention.transports import SUMMARIES
from attention.variants.registry import AUTO, MIXTURES, VARIANTS
from runner import rounds
from runner.config.masks import NONE
from runner.config.overrides import groups, problem
from runner.config.resolve import run_name
from runner.config.rules import model as model_rules
from runner.config.schema import MODELS, TIMING_METHODS
from runner.config.values import InvalidConfig
from runner.config.variants import BEST, PACKED, best_values
from runner.measure.workload import DTYPES
from runner.peers import PEERS, everything
from tests.support.composing import composed, configured, resolved
from tests.support.paths import ROOT

HERE = Path(__file__).parent
CONF = ROOT / "conf"

with (HERE / "workloads.csv").open() as file:
    WORKLOADS = {row["name"]: row for row in csv.DictReader(file)}

CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices]


def able_to(workload: str) -> list[str]:
    """A variant that does the workload: not every one is causal, and some are decodes."""
    return ["attention=ring" if composed(f"config={workload}").q_len is None else "attention=tree"]


def plain(node) -> dict:
    return OmegaConf.to_container(node, resolve=True)


def test_every_file_of_every_group_is_a_choice():
    assert set(groups()) == {
        "attention", "config", "dtype", "experiment", "hardware", "kernel", "mask", "model", "timing", "tracker", "transport",
    }  # fmt: skip
    for group, choices in groups().items():
        assert choices == sorted(path.stem for path in (CONF / group).iterdir())


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_makes_an_experiment(group, choice):
    here = f"+experiment={choice}" if group == "experiment" else f"{group}={choice}"
    able = able_to(choice) if group == "config" else ["attention=ring"] if group == "mask" else []
    able = [*able, "model.type=llama"] if choice == "hf" else able
    alone = choice == "grouped" and group == "attention"
    spec = resolved(here, *able, gpus=1 if alone else 2)
    assert spec.workload.seq_len > 0
    chosen = {
        "attention": spec.variant,
        "dtype": spec.dtype.name,
        "kernel": spec.kernel,
        "model": configured(here, *able).model.name,
        "timing": spec.timing.method,
        "transport": spec.transport,
        "config": configured(here, *able).config,
        "hardware": {"cpu": "cpu"}.get(choice, "cuda") == spec.device and choice,
    }
    assert chosen.get(group, choice) == choice.removesuffix("_best").removesuffix("_longnet")


@pytest.mark.parametrize("model", groups()["model"])
def test_every_model_has_a_default_variant_for_its_masks_that_another_choice_replaces(model):
    kind = ["model.type=mistral"] if model == "hf" else []
    for world in (1, 2, 4, 8):
        assert resolved(f"model={model}", *kind, f"world_size={world}", gpus=8).variant != "auto"
    assert composed(f"model={model}", "attention=ulysses").attention.name == "ulysses"


@pytest.mark.parametrize("variant", PACKED)
def test_a_model_s_text_is_no_packed_batch(variant):
    spec = resolved("model=decoder_tiny", f"attention={variant}", "hardware=cpu", "world_size=2")
    assert (spec.variant, spec.workload.seqlens) == (variant, None)


@pytest.mark.parametrize("name", [name for name, row in WORKLOADS.items() if row["category"] == "decode"])
@pytest.mark.parametrize("variant", [name for name, v in VARIANTS.items() if v.decode])
def test_decode_workloads_are_one_query_on_all_keys(name, variant):
    spec = resolved(f"config={name}", f"attention={variant}", gpus=4)
    work = spec.workload
    assert (spec.mode, work.q_len, work.queries, work.causal, work.seqlens) == ("forward", 1, 1, False, None)
    assert work.pairs == work.seq_len == int(WORKLOADS[name]["seq_len"])


MOST_RUNS = 16  # of an experiment that are all looked at


def looked_at(swept: list[list[str]]) -> set[tuple[str, ...]]:
    """The runs of a sweep; of many, those that differ from the first in one value, those from the last, and some more."""
    everything = list(itertools.product(*swept))
    if len(everything) <= MOST_RUNS:
        return set(everything)
    ends = (everything[0], everything[-1])
    near = {(*end[:i], value, *end[i + 1 :]) for end in ends for i, values in enumerate(swept) for value in values}
    return near | set(random.Random(len(everything)).sample(everything, MOST_RUNS // 2))


@pytest.mark.parametrize("name", groups()["experiment"])
def test_every_run_of_an_experiment_is_one(name):
    params = plain(composed(f"+experiment={name}", return_hydra_config=True).hydra.sweeper.params)
    swept = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
    runs = [resolved(f"+experiment={name}", *overrides, gpus=8) for overrides in sorted(looked_at(swept))]
    assert len({json.dumps(run.plain()) for run in runs}) == len(runs) > 1  # no run twice


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_tokens_per_rank_follow_the_world_size(world):
    spec = resolved("+experiment=weak_scaling", f"world_size={world}", gpus=8)
    assert (spec.world_size, spec.workload.seq_len) == (world, 8192 * world)
    cfg = configured("config=tiny", "seq_len=${per_rank:96}", f"world_size={world}", "hardware=cpu")
    assert run_name(cfg, 0).startswith(f"zigzag_tiny_s{96 * world}_w{world}_")


def test_tokens_per_rank_are_of_the_ranks_that_auto_stands_for_and_leave_a_wrong_world_size_to_its_rule():
    assert resolved("config=tiny", "seq_len=${per_rank:96}", "hardware=cpu").workload.seq_len == 96 * 2
    assert problem(["seq_len=${per_rank:96}", "world_size=1,2"]) is None
    with pytest.raises(InvalidConfig, match="world_size=0: must be auto or a whole number"):
        resolved("config=tiny", "seq_len=${per_rank:96}", "hardware=cpu", "world_size=0")


def test_the_help_composes():
    hydra = composed("hydra/help=runner", return_hydra_config=True).hydra
    assert "python -m runner" in hydra.help.template


def test_the_workloads_are_those_of_the_table():
    assert len(WORKLOADS) == 38
    assert set(groups()["config"]) == {*WORKLOADS, "default"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_its_rows_values(name):
    cfg = composed(f"config={name}")
    row = WORKLOADS[name]
    assert {key: str(cfg[key]) for key in ("category", "batch", "heads", "head_dim", "seq_len")} == {
        key: row[key] for key in ("category", "batch", "heads", "head_dim", "seq_len")
    }
    assert str(cfg.kv_heads or cfg.heads) == row["kv_heads"]
    assert (cfg.config, cfg.dtype.name) == (name, row["dtype"])
    assert cfg.causal is (row["causal"] == "true")
    assert list(cfg.window) == [int(row["window_left"]), int(row["window_right"])]


def test_models_have_their_sinks_scales_values_and_layer_kinds():
    gpt, gemma, deepseek, scout = (
        resolved(f"config={name}", "attention=ring", gpus=2).workload
        for name in ("gpt_oss_120b", "gemma3_27b", "deepseek_v3", "llama4_scout")
    )
    assert gpt.sinks and not any(model.sinks for model in (gemma, deepseek, scout))
    assert (gemma.scale, gpt.scale, scout.scale) == (pytest.approx(168**-0.5, rel=1e-15), None, None)
    assert deepseek.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-15)
    assert (deepseek.head_dim, deepseek.v_head_dim) == (192, 128)
    assert all(model.softcap is None for model in (gpt, gemma, deepseek, scout))
    # a query of the other layers sees itself and the window's or chunk's other tokens; all else is alike
    tokens = 65536
    inner = {"gpt_oss_120b_window": 128, "gemma3_27b_window": 1024}
    for name, seen in inner.items():
        local, whole = (resolved(f"config={x}", "attention=ring", gpus=2).workload for x in (name, name[:-7]))
        assert local.pairs == seen * (seen + 1) // 2 + (tokens - seen) * seen
        assert replace(local, window=(-1, -1)) == whole
    local = resolved("config=llama4_scout_chunked", "attention=ring", gpus=2).workload
    assert local.pairs == 8 * 8192 * 8193 // 2
    assert replace(local, named_mask=None) == scout


@pytest.mark.parametrize("name", ["medium", "decode_1m", "small_fp16"])
def test_anything_of_a_workload_may_be_overridden(name):
    cfg = composed(f"config={name}", "dtype=fp32", "seq_len=640", "causal=false", "window=[3,4]")
    assert (cfg.dtype.name, cfg.seq_len, cfg.causal, list(cfg.window)) == ("fp32", 640, False, [3, 4])


@pytest.mark.slow
def test_every_variant_has_its_file_with_its_options():
    presets = {choice for choice in groups()["attention"] if choice.endswith(("_best", "_longnet"))}
    assert set(groups()["attention"]) - presets == {AUTO, *everything()}
    assert plain(composed("attention=auto").attention) == {"name": AUTO}
    for name, variant in everything().items():
        assert plain(composed(f"attention={name}").attention) == {"name": name, **variant.parse().plain()}


@pytest.mark.parametrize("choice", [choice for choice in groups()["attention"] if choice.endswith("_best")])
def test_a_package_at_its_best_is_that_package_with_settings_left_to_trials(choice):
    name = choice.removesuffix("_best")
    options = plain(composed(f"attention={choice}").attention)
    usual = plain(composed(f"attention={name}").attention)
    assert options.keys() == usual.keys() and options["name"] == name
    assert {options[key] for key in options if options[key] != usual[key]} == {BEST}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_preset_as_longnet_mixes_differs_in_that_alone(name):
    options = plain(composed(f"attention={name}_longnet").attention)
    assert options == plain(composed(f"attention={name}").attention) | {"mixing": "longnet"}


@pytest.mark.slow
def test_other_packages_with_settings_are_at_their_best_in_experiments():
    settings = {choice.removesuffix("_best") for choice in groups()["attention"] if choice.endswith("_best")}
    assert settings == {name for name, x in PEERS.items() if any(best_values(x, o, 4, 4) for o in x.options.names())}
    for name in groups()["experiment"]:
        params = plain(composed(f"+experiment={name}", return_hydra_config=True).hydra.sweeper.params)
        assert not settings & set(str(params.get("attention", "")).split(",")), name


@pytest.mark.parametrize("name", groups()["experiment"])
def test_a_headline_experiment_says_its_machine_and_length_and_compares_in_rounds(name):
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    if "Headline:" not in comment:
        return
    assert re.search(r"# Machine: .*H200.* Estimate: \d+ runs.*, \d+ min", comment), name
    cfg = composed(f"+experiment={name}", return_hydra_config=True)
    params = plain(cfg.hydra.sweeper.params)
    swept = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
    jobs = list(itertools.product(*swept))
    for group in rounds.groups(jobs):
        assert len(group) > 1
        assert rounds.number(cfg.order, resolved(f"+experiment={name}", *jobs[group[0]], gpus=8), len(group)) == 3


def years(text: str) -> set[str]:
    return set(re.findall(r"\b20\d\d\b", text))


def first_comment(name: str) -> str:
    lines = (CONF / "attention" / f"{name}.yaml").read_text().splitlines()
    return " ".join(line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def test_every_variant_and_its_file_name_its_source_with_its_year_and_when_to_use_it():
    for name, variant in everything().items():
        comment = first_comment(name)
        assert variant.source and variant.use, name
        assert years(variant.source) and years(variant.source) <= years(comment), name
        assert f"Use: {variant.use}." in comment, name
    for name, variant in VARIANTS.items():
        assert f"Source: {variant.source}." in first_comment(name), name


@pytest.mark.slow
def test_every_kernel_and_transport_has_its_file():
    assert set(groups()["kernel"]) == {"auto", *KERNELS}
    assert set(groups()["transport"]) == {"auto", *SUMMARIES}
    for group in ("kernel", "transport", "hardware"):
        for name in groups()[group]:
            assert plain(composed(f"{group}={name}")[group]) == {"name": name}


def test_every_model_has_its_file_and_none_is_the_default():
    assert set(groups()["model"]) == set(MODELS)
    assert plain(composed().model) == {"name": "none"}
    for name in MODELS[1:]:
        more = model_rules.OF_HF if name == "hf" else ()
        assert set(plain(composed(f"model={name}").model)) == {*model_rules.OPTIONS, *more}, name


@pytest.mark.parametrize("name", masks.names())
def test_every_mask_has_its_file_with_its_definition_and_parameters(name):
    cfg = composed(f"mask={name}")
    assert (cfg.causal, list(cfg.window)) == (False, [-1, -1])
    assert set(cfg.mask) == {"name", *inspect.signature(getattr(masks, name)).parameters}
    definition = masks.names()[name].split("; ")[0]
    text = " ".join(line[2:] for line in (CONF / "mask" / f"{name}.yaml").read_text().splitlines() if line[0] == "#")
    assert "Definition: " in text
    assert definition in text or name in ("full", "documents", "rectangles")
    beside = composed(f"mask={name}", "causal=true", "window=[3,0]", "attention=ring")
    assert (beside.causal, list(beside.window)) == (True, [3, 0])


def test_there_is_a_file_for_each_mask_and_none_is_the_default():
    assert set(groups()["mask"]) == {NONE, *masks.names()}
    assert plain(composed().mask) == {"name": NONE} and composed().causal


def test_every_timing_method_has_its_file():
    assert set(groups()["timing"]) == set(TIMING_METHODS)
    for name in TIMING_METHODS:
        assert composed(f"timing={name}").timing.method == name
    assert composed("timing=adaptive").timing.timing_runs == 30  # at least so many


def test_every_dtype_is_one_that_runs_and_has_its_tolerances():
    assert set(groups()["dtype"]) <= set(DTYPES)
    # atol with one KV head a query head, atol under GQA, relative L2 of the output
    expected = {"bf16": (2.5e-2, 3.5e-2, 5e-3), "fp16": (5e-3, 5e-3, 1e-3), "fp32": (1e-5, 1e-5, 1e-6)}
    for name in groups()["dtype"]:
        found = composed(f"dtype={name}").dtype
        assert (found.atol, found.gqa_atol, found.rel_l2) == expected[name]
    assert composed("dtype=bf16").dtype.grad_rel_l2 == 1e-2
    assert composed("dtype=fp32").dtype.grad_atol == 1e-4
