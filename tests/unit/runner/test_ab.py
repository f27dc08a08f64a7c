"""Two settings of one key: what `ab=` stands for, what it refuses, and its verdict."""

import random

import pytest

from runner import command, rounds
from runner.config import overrides
from runner.config.values import InvalidConfig
from runner.output import results
from tests.support.recorded import result, timed, written


@pytest.mark.parametrize("values", ["kernel:sdpa_flash,math", "window:[512,0],[64,0]", "launch.env:{A:1},{A:2}"])
def test_it_is_a_sweep_over_two_values_that_take_turns(values):
    key, _, both = values.partition(":")
    sweep = command.expand(["seq_len=1,2", f"ab={values}"])
    assert sweep == ["seq_len=1,2", f"{key}={both}", f"order=interleaved:{key}"]
    assert rounds.groups(overrides.jobs(sweep), sweep[-1][6:]) == [[0, 1], [2, 3]]
    assert command.expand(["kernel=math", "order=auto"]) == ["kernel=math", "order=auto"]


@pytest.mark.parametrize("values", ["kernel", "kernel:math", "kernel:math,flex,sdpa_flash", "kernel:math,math"])
def test_what_it_cannot_compare_is_refused_in_a_line(values):
    with pytest.raises(InvalidConfig, match=f"^ab={values}: must be ab=KEY:FIRST,SECOND, two different values"):
        command.expand([f"ab={values}"])


def in_rounds(folder, kernel, seq_len, ms, clocks, seed):
    draw = random.Random(seed)
    samples = [{"forward": [clock * ms * (1 + 0.01 * draw.gauss(0, 1)) for clock in clocks for _ in range(7)]}]
    value = result("zigzag", ms, kernel=kernel, seq_len=seq_len, started_at=float(seed))
    value["timing"] |= timed(samples) | {"rounds": {"done": 3, "of": 3, "drift": {}, "by_round": []}}
    value["config"]["order"] = "interleaved:kernel"
    value["environment"]["overrides"] = [f"seq_len={seq_len}", f"kernel={kernel}", "order=interleaved"]
    written(folder, value)
    results.write_samples(folder / value["name"] / "samples.parquet", samples, [7] * len(clocks))


def test_there_is_a_verdict_for_each_combination_of_the_other_keys(tmp_path):
    same, other = [1.0, 1.1, 0.95], [0.9, 1.05, 1.1]
    for seq_len, ms, clocks in ((8192, 12.0, same), (16384, 10.05, same), (32768, 10.05, other)):
        in_rounds(tmp_path, "math", seq_len, 10.0, same, 1)
        in_rounds(tmp_path, "flex", seq_len, ms, clocks, 2)
    even, inconclusive, slower = sorted(command.verdicts(tmp_path))
    start = "kernel=flex against kernel=math:"
    assert even.startswith(f"seq_len=16384: {start} even")  # the clock that both had is taken out
    assert inconclusive.startswith(f"seq_len=32768: {start} inconclusive") and inconclusive.count("narrows it") == 1
    assert slower.startswith(f"seq_len=8192: {start} slower, +1")
