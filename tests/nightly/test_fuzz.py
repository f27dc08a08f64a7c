"""Random calls of every variant under every mask, each compared with fp64 or refused in one line.

`--fuzz N` sets their number, `--fuzz-seed N` repeats a run; a failure prints the command that repeats it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from runner.launch.files import WorldSpec
from tests.gate import plants
from tests.support.cases import Case, compute, draw, judge, variants, wrong

WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="session")
def fuzz_seed(request):
    return request.config.getoption("fuzz_seed")


@pytest.mark.parametrize("world", WORLDS)
def test_random_calls_are_right_or_refused(pool, request, world, fuzz_seed):
    """Half of them with uninitialised memory filled with NaN."""
    wanted = request.config.getoption("fuzz") // len(WORLDS)
    rng = random.Random(f"{fuzz_seed}/{world}")
    names = [name for name in variants() if world == 1 or name != "grouped"]  # a variant of one rank alone
    cases = [draw(names[i % len(names)], world, rng.randrange(1 << 30)) for i in range(wanted)]
    poisoned = [i % 2 == 0 for i in range(wanted)]
    outcome = pool.get(WorldSpec(world, "cpu")).call(
        judge, {"cases": [case.plain() for case in cases], "poisoned": poisoned}, 120.0 + wanted
    )
    count = wanted * len(WORLDS)
    where = f"python -m pytest -n 0 tests/{Path(__file__).name} --fuzz {count} --fuzz-seed {fuzz_seed} -k '[{world}]'"
    assert outcome.status == "ok", f"{where}: {outcome.reason}\n" + "\n".join(outcome.log_tail)
    bad = [f"{case}: {said}" for case, said in zip(cases, outcome.result, strict=True) if said.startswith("wrong")]
    assert not bad, f"{where}:\n" + "\n".join(bad)
    done = outcome.result.count("ok")
    assert done >= wanted // 2, f"{where}: only {done} of {wanted} calls were done: {outcome.result}"


@pytest.mark.parametrize("name", ["ring", "llama3", "tree"])  # one of each executor that applies sinks
def test_dropped_sinks_and_softcaps_are_found(name):
    decode = {"queries": 2, "causal": False, "gradients": ""} if name == "tree" else {"gradients": "qkvs"}
    case = Case(name, 1, 24, 2, 1, 8, 1, transport="auto", value_dim=16, softcap=0.5, sinks="fp32", **decode)
    assert wrong(case, compute(case)) is None
    for plant in (plants.sinks_dropped, plants.kernel(plants.uncapped, plants.uncapped)):
        with plant():
            assert wrong(case, compute(case)) is not None


def test_a_decode_that_drops_its_window_its_lengths_or_its_prefix_is_found():
    case = Case("tree", 1, 24, 2, 1, 8, 1, transport="auto", batch=2, queries=2, causal=False, gradients="")
    for given in ({"window": (5, 0)}, {"causal": True}, {"kv_lengths": (24, 7)}, {"prefix": 3}):
        asked = replace(case, **given)
        assert wrong(asked, compute(asked)) is None
        assert wrong(asked, compute(case)) is not None, given
