"""Options that are `best`: each setting is tried within the run, and the fastest is taken."""

import pytest

from attention.masks.band import CAUSAL, FULL
from runner.config.rules.attention import setting_label, settings
from runner.config.values import InvalidConfig
from runner.peers import variant
from tests.jobs import program
from tests.support.composing import resolved

SMALL = ("seq_len=64", "batch=1", "head_dim=16", "dtype=fp32", "hardware=cpu", "phases=false", "baseline=none", "world_size=2",
         "timing.timing_runs=2", "timing.settle_ms=0")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "heads", "world", "mask", "best", "able", "reasons"),
    [
        ("usp_yunchang", (8, 2), 4, CAUSAL, ["ulysses_size"], ["ulysses_size=1", "ulysses_size=2"],
         {"ulysses_size=4": "are divided among 4 ranks"}),
        ("usp", (4, 4), 2, FULL, ["ulysses_size", "ring"], ["ulysses_size=1 ring=contiguous", "ulysses_size=2 ring=contiguous"],
         {"ulysses_size=1 ring=zigzag": "is for causal masks"}),
    ],
)  # fmt: skip
def test_best_is_of_all_combinations_that_the_call_allows(name, heads, world, mask, best, able, reasons):
    options = variant(name).parse().plain() | dict.fromkeys(best, "best")
    found, left_out = settings(variant(name), options, *heads, (0, 64), world, mask)
    assert [setting_label(setting, best) for setting in found] == able
    assert all(reason in left_out[label] for label, reason in reasons.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=grouped", "attention.n_groups=best", "world_size=1"],
         "n_groups=best: grouped has no list of its values; give one"),
        (["attention=usp_yunchang", "attention.ulysses_size=best", "causal=false"], "is for causal masks"),
    ],
)  # fmt: skip
def test_an_option_without_choices_and_settings_none_of_which_works_are_refused(overrides, message):
    with pytest.raises(InvalidConfig, match=message):
        resolved(*SMALL, *overrides)


def test_the_fastest_setting_is_taken_on_every_rank_checked_and_said_with_all_that_was_tried(in_world):
    spec = resolved(
        "attention=llama3", "heads=4", "kv_heads=4", "attention.heads_k_stride=best", "transport=symm", *SMALL
    )
    found = in_world(program.run_of, 2, experiment=spec.plain())
    assert found["status"] == "ok" and found["correctness"]["passed"]
    assert found["everyone"][0] == found["everyone"][1]
    tried = found["chosen"]["settings_ms"]
    assert set(tried) == {f"heads_k_stride={n}" for n in (1, 2, 4)} and found["chosen"]["settings_left_out"] == {}
    assert list(tried.values()) == sorted(tried.values())
    assert f"heads_k_stride={found['experiment']['options']['heads_k_stride']}" == next(iter(tried))
