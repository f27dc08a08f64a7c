"""Every planted fault fails the gate, in fp32 and bf16, at 512 and 2,048 tokens, and the code as it is passes all of its runs."""

import pytest

from runner.launch.files import WorldSpec
from tests.gate import plants
from tests.gate.plants import PLANTS, RUNS
from tests.support.composing import resolved

NAMES = [plant.name for plant in PLANTS]
LENGTHS = {  # by the number of tokens: the lengths of a packed batch's sequences
    512: [100, 50, 62, 30, 70, 110, 90],
    2048: [400, 200, 248, 120, 280, 440, 360],
}
FEW = 512

# The sum of two parts, rounded to bf16, is the same number whether it is kept in bf16 or fp32. In a world of 4, at 512 tokens,
# keeping dv's sums in bf16 moves its relative L2 error from 0.0040 to 0.0049, where a call on one device has 0.0046.
INVISIBLE = {("sums kept in bf16", "bf16")}


@pytest.fixture(scope="module")
def said(pool):
    """What the gate says of all plants, one job for each dtype and length."""
    known = {}

    def ask(dtype, tokens):
        if (dtype, tokens) not in known:
            runs = {
                name: [*given, f"dtype={dtype}", f"seq_len={tokens}", "world_size=2"] for name, given in RUNS.items()
            }
            if tokens > FEW:  # one head is enough, except where a fault mixes heads up
                for name in runs.keys() - {"two heads", "ulysses"}:
                    runs[name].append("heads=1")
            for name in ("packed", "new packs"):
                runs[name].append(f"seqlens={LENGTHS[tokens]}".replace(" ", ""))
            arguments = {"runs": {name: resolved(*given).plain() for name, given in runs.items()}, "names": NAMES}
            world = pool.get(WorldSpec(2, "cpu"))
            outcome = world.call(plants.planted, arguments, 240.0)
            assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
            known[dtype, tokens] = outcome.result
        return known[dtype, tokens]

    return ask


everywhere = pytest.mark.parametrize(
    ("dtype", "tokens"),
    [pytest.param(d, n, marks=[pytest.mark.slow] * (n > FEW)) for d in ("fp32", "bf16") for n in LENGTHS],
)


def test_every_fault_has_a_name():
    assert len(set(NAMES)) == len(NAMES)


@everywhere
def test_every_planted_fault_is_found(said, dtype, tokens):
    why = said(dtype, tokens)["why"]
    assert {name for name in NAMES if why[name] is None} == {name for name, where in INVISIBLE if where == dtype}


@everywhere
def test_the_code_as_it_is_passes_with_room_to_spare(said, dtype, tokens):
    for run, found in said(dtype, tokens)["shipped"].items():
        assert found["why"] is None, run
        assert found["timed"]["passed"]
        limits = found["checked"]["tolerance"]
        for name, error in found["checked"]["tensors"].items():
            assert error["worst_row"] < limits["row" if name == "out" else "grad_row"] / 2, (run, name)
        assert found["checked"]["lse"]["worst_row"] < limits["lse"] / 2, run


@pytest.mark.parametrize("timing", [["timing=warmup"], ["timing=simple"], ["timing=warmup", "timing.layers=2"]])
def test_a_run_that_goes_wrong_once_it_is_timed_gives_no_timing(pool, timing):
    size = ["dtype=fp32", "seq_len=256", "world_size=2", "timing.timing_runs=2", "phases=false", "baseline=none"]
    run = resolved(*RUNS["zigzag"], *size, *timing).plain()
    outcome = pool.get(WorldSpec(2, "cpu")).call(
        plants.timed, {"run": run, "name": "wrong once the check is over"}, 120.0
    )
    assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
    result = outcome.result
    assert result["status"] == "incorrect" and not result["correctness"]["passed"]
    assert "the last timed iteration: out" in result["reason"]
    assert not result.keys() & {"timing", "samples", "metrics", "memory"}
