"""Every planted fault fails the gate, at 512 tokens. The code as it is passes all of its runs, and right results of the kernels use
less than half of the tolerances, which are made so.

On one H200 of the row tolerance flash4 uses 0.22 in bf16, sdpa_cudnn and sdpa_flash 0.31, triton 0.22 (0.07 in fp32), all of them at
most 0.19 in fp16; of gain and LSE at most 0.01."""

import pytest

from tests.gate import plants
from tests.support.composing import resolved

# The sum of two parts, rounded to bf16, is the same number whether it is kept in bf16 or fp32. In a world of 4, at 512 tokens,
# keeping dv's sums in bf16 moves its relative L2 error from 0.0040 to 0.0049, where a call on one device has 0.0046.
INVISIBLE = {"fp32": set(), "bf16": {"sums kept in bf16"}}
SHORT = ["seq_len=64", "seq_len=96 causal=false head_dim=32", "seq_len=64 softcap=50", "seq_len=64 window=[20,0]"]


def parts_of(checked):
    """The worst row of each tensor and the LSE over its tolerance."""
    limits, lse = checked.tolerance, checked.lse
    rows = {
        name: error.worst_row / limits["row" if name == "out" else "grad_row"]
        for name, error in checked.tensors.items()
    }
    return rows | ({"lse": lse.worst_row / limits["lse"]} if lse.checked else {})


def worst_parts(in_world, overrides, calls):
    """Of the calls that a kernel does on one device."""
    size = "attention=dense batch=1 heads=4 kv_heads=2 head_dim=16 causal=true world_size=1"
    runs = {call: resolved(size, overrides, call, gpus=1).plain() for call in calls}
    device = "cuda" if "hardware=cuda" in overrides else "cpu"
    found = in_world(plants.shipped, 1, device, timeout_s=240.0, runs=runs)
    return {
        f"{name} of {run}": part for run, (_, checked, _) in found.items() for name, part in parts_of(checked).items()
    }


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_every_planted_fault_is_found_and_the_code_as_it_is_passes_with_room_to_spare(in_world, dtype):
    runs = {run: resolved(plants.overrides(run, dtype)).plain() for run in plants.RUNS}
    for run, (reason, checked, timed) in in_world(plants.shipped, 2, timeout_s=240.0, runs=runs).items():
        assert reason is None and timed.passed, run
        assert max(parts_of(checked).values()) < 0.5, (run, checked)
    why = in_world(plants.planted, 2, timeout_s=240.0, runs=runs)
    assert {name for name, reason in why.items() if reason is None} == INVISIBLE[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["math", "sdpa_flash"])
def test_right_results_use_less_than_half_of_the_tolerances(in_world, kernel, dtype):
    parts = worst_parts(in_world, f"kernel={kernel} dtype={dtype} hardware=cpu", SHORT)
    assert max(parts.values()) < 0.5, parts


@pytest.mark.parametrize("timing", ["timing=simple", "timing=warmup timing.layers=2"])
def test_a_run_that_goes_wrong_once_it_is_timed_gives_no_timing(in_world, timing):
    more = "timing.timing_runs=2 phases=false baseline=none"
    run = resolved(plants.overrides("zigzag", "fp32"), more, timing).plain()
    result, tables = in_world(plants.timed, 2, run=run, name="wrong once the check is over")
    assert result.status == "incorrect" and not result.correctness.passed
    assert "the last timed iteration: out" in result.reason
    assert {result.timing, result.metrics, result.memory} == {None} and not tables.samples
