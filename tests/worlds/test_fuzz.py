"""Random calls of every variant under every mask, each compared with fp64 or refused in one line: some in every run, and widely
`-m nightly`, where `--fuzz N` sets their number. The seed is the commit's; `--fuzz-seed N` is another, and repeats a run."""

import random
from dataclasses import replace

import pytest

from attention.variants.registry import VARIANTS
from tests.gate import plants
from tests.support.cases import Case, compute, draw, judged, wrong


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
    assert not bad, "\n".join(bad)
    assert found.count("ok") >= wanted // 2, found


@pytest.mark.parametrize("name", ["ring", "llama3", "tree"])  # one of each executor that applies sinks
def test_dropped_sinks_and_softcaps_are_found(name):
    decode = {"queries": 2, "causal": False, "gradients": ""} if name == "tree" else {"gradients": "qkvs"}
    case = Case(name, 1, 24, 2, 1, 8, 1, transport="auto", value_dim=16, softcap=0.5, sinks="fp32", **decode)
    assert wrong(case, compute(case)) is None
    for seams in (plants.SINKS_DROPPED, plants.UNCAPPED):
        with plants.changed_all(seams):
            assert wrong(case, compute(case)) is not None


@pytest.mark.parametrize("asked", [{"window": (5, 0)}, {"kv_lengths": (24, 7)}, {"prefix": 3}], ids=str)
def test_a_decode_that_drops_its_window_its_lengths_or_its_prefix_is_found(asked):
    case = Case("tree", 1, 24, 2, 1, 8, 1, transport="auto", batch=2, queries=2, causal=False, gradients="")
    assert wrong(replace(case, **asked), compute(replace(case, **asked))) is None
    assert wrong(replace(case, **asked), compute(case)) is not None
