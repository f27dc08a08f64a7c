"""Random calls of every variant under every mask, each compared with fp64 or refused in one line: some in every run, and widely
`-m nightly`, where `--fuzz N` sets their number. The seed is the commit's; `--fuzz-seed N` is another, and repeats a run."""

import random

import pytest

from attention.variants.registry import VARIANTS
from tests.support.cases import draw, judged


@pytest.mark.parametrize(
    ("world", "share"), [(2, 0.1), *(pytest.param(n, 0.25, marks=pytest.mark.nightly) for n in (1, 2, 3, 4))]
)
def test_random_calls_are_right_or_refused(pool, request, world, share):
    """`pytest` writes the seed at its start."""
    seed, wanted = request.config.getoption("fuzz_seed"), int(request.config.getoption("fuzz") * share)
    rng = random.Random(f"{seed}/{world}")
    names = [name for name in VARIANTS if world == 1 or name != "grouped"]
    rng.shuffle(names)
    cases = [draw(names[i % len(names)], world, rng.randrange(1 << 30)) for i in range(wanted)]
    found = judged(pool, cases, timeout_s=120.0 + wanted)
    bad = [f"{case}: {said}" for case, said in zip(cases, found, strict=True) if said.startswith("wrong")]
    assert not bad, bad
    assert found.count("ok") >= wanted // 4, found
