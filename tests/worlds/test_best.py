"""Options that are `best`: each setting is tried within the run, and the fastest is taken."""

import pytest

from attention.masks.band import CAUSAL, FULL
from runner.config.values import InvalidConfig
from runner.config.variants import setting_label, settings
from runner.peers import variant
from tests.jobs import program
from tests.support.composing import resolved

SMALL = ("seq_len=64", "batch=1", "head_dim=16", "dtype=fp32", "hardware=cpu", "phases=false", "baseline=none",
         "timing.timing_runs=2", "timing.settle_ms=0")  # fmt: skip


def labels(name: str, heads: int, kv_heads: int, world: int, mask=CAUSAL, **options):
    given = {**variant(name).parse().plain(), **options}
    asked = [option for option, value in given.items() if value == "best"]
    able, left_out = settings(variant(name), given, heads, kv_heads, (0, 64), world, mask)
    return [setting_label(setting, asked) for setting in able], left_out


def test_best_is_of_all_choices_that_the_heads_allow():
    found, left_out = labels("usp_yunchang", 8, 2, 4, ulysses_size="best")
    assert found == ["ulysses_size=1", "ulysses_size=2"]
    assert "the same number of heads" in left_out["ulysses_size=4"]
    assert labels("rfa_llama3", 8, 4, 2, heads_k_stride="best")[0] == [f"heads_k_stride={n}" for n in (1, 2, 4)]
    assert labels("torch_cp", 8, 4, 2, rotate="best")[0] == ["rotate=allgather", "rotate=alltoall"]
    assert labels("transformer_engine", 8, 4, 2, cp_comm_type="best")[0] == [
        "cp_comm_type=p2p",
        "cp_comm_type=all_gather",
    ]


def test_several_options_are_tried_in_every_combination_that_works():
    found, left_out = labels("usp", 4, 4, 2, FULL, ulysses_size="best", ring="best")
    assert found == ["ulysses_size=1 ring=contiguous", "ulysses_size=2 ring=contiguous"]
    assert "is for causal masks" in left_out["ulysses_size=1 ring=zigzag"]


def test_an_option_without_choices_and_settings_none_of_which_works_are_refused():
    with pytest.raises(
        InvalidConfig, match=r"n_groups=best: grouped has no list of its values; best may be heads_k_stride, grouping"
    ):
        resolved("attention=grouped", "attention.n_groups=best", "world_size=1", *SMALL)
    with pytest.raises(InvalidConfig, match="is for causal masks"):
        resolved("attention=usp_yunchang", "attention.ulysses_size=best", "causal=false", "world_size=2", *SMALL)
    with pytest.raises(InvalidConfig, match=r"attention.ulysses_size=best timing=cudagraph"):
        resolved(
            "attention=usp", "attention.ulysses_size=best", "timing=cudagraph", "hardware=cuda", "world_size=2", gpus=2
        )


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (("attention=usp", "heads=4", "kv_heads=2", "attention.ulysses_size=best"), {"ulysses_size=1", "ulysses_size=2"}),
        (("attention=llama3", "heads=4", "kv_heads=4", "attention.heads_k_stride=best", "transport=symm"),
         {"heads_k_stride=1", "heads_k_stride=2", "heads_k_stride=4"}),
    ],
)  # fmt: skip
def test_the_fastest_setting_is_taken_on_every_rank_checked_and_said_with_all_that_was_tried(
    in_world, overrides, settings
):
    spec = resolved(*overrides, "world_size=2", *SMALL)
    found = in_world(program.run_of, 2, experiment=spec.plain())
    assert found["status"] == "ok" and found["correctness"]["passed"]
    assert found["everyone"][0] == found["everyone"][1]
    tried = found["chosen"]["settings_ms"]
    assert set(tried) == settings and found["chosen"]["settings_left_out"] == {}
    assert list(tried.values()) == sorted(tried.values())
    (option,) = (name for name, value in spec.options.items() if value == "best")
    assert f"{option}={found['experiment']['options'][option]}" == next(iter(tried))
    for entry in found["metrics"]["passes"].values():  # of that setting
        assert entry["bytes_received_by_rank"] is not None
