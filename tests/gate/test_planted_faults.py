"""Every planted fault fails the gate, at 512 tokens, and the code as it is passes all of its runs."""

import pytest

from runner.launch.files import WorldSpec
from tests.gate import plants
from tests.support.composing import resolved

# The sum of two parts, rounded to bf16, is the same number whether it is kept in bf16 or fp32. In a world of 4, at 512 tokens,
# keeping dv's sums in bf16 moves its relative L2 error from 0.0040 to 0.0049, where a call on one device has 0.0046.
INVISIBLE = {"fp32": set(), "bf16": {"sums kept in bf16"}}


def called(pool, job, **arguments):
    outcome = pool.get(WorldSpec(2, "cpu")).call(job, arguments, 240.0)
    assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
    return outcome.result


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_every_planted_fault_is_found_and_the_code_as_it_is_passes_with_room_to_spare(pool, dtype):
    runs = {run: resolved(*plants.overrides(run, dtype)).plain() for run in plants.RUNS}
    shipped, why = called(pool, plants.planted, runs=runs)
    assert {name for name, reason in why.items() if reason is None} == INVISIBLE[dtype]
    for run, (reason, checked, timed) in shipped.items():
        assert reason is None and timed["passed"], run
        limits = checked["tolerance"]
        for name, error in checked["tensors"].items():
            assert error["worst_row"] < limits["row" if name == "out" else "grad_row"] / 2, (run, name)
        assert checked["lse"]["worst_row"] < limits["lse"] / 2, run


@pytest.mark.parametrize("timing", [["timing=simple"], ["timing=warmup", "timing.layers=2"]])
def test_a_run_that_goes_wrong_once_it_is_timed_gives_no_timing(pool, timing):
    more = ["timing.timing_runs=2", "phases=false", "baseline=none"]
    run = resolved(*plants.overrides("zigzag", "fp32"), *more, *timing).plain()
    result = called(pool, plants.timed, run=run, name="wrong once the check is over")
    assert result["status"] == "incorrect" and not result["correctness"]["passed"]
    assert "the last timed iteration: out" in result["reason"]
    assert not result.keys() & {"timing", "samples", "metrics", "memory"}
