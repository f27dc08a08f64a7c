"""Random calls of every variant under every mask, each compared with fp64 or refused in one line.

`--fuzz N` sets their number, `--fuzz-seed N` repeats a run; a failure prints the command that repeats it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runner.launch.files import WorldSpec
from tests.support.cases import draw, judge, variants

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
