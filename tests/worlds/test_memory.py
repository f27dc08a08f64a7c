"""The peak memory of a dry run against what executors really hold, scratch of kernels left out."""

import pytest

from attention.geometry.counts import Shapes
from attention.masks.band import CAUSAL
from attention.variants.registry import MIXTURES, VARIANTS, everything
from runner.costs import dry_run, step_peak
from tests.jobs import memory

TOKENS, HEADS, HEAD_DIM = 1024, (16, 4), 16
PLAIN = [(name, {}) for name, v in VARIANTS.items() if not v.decode and name != "grouped"]
FOR_PACKS = [(v.name, {}) for v in VARIANTS.values() if v.alias_of]  # for a single sequence they are the other variant
WITH_OPTIONS = [
    ("zigzag", {"head_parts": 2}),
    ("ulysses", {"head_parts": 2}),
    ("zigzag_llama3", {"own_first": False}),
    ("zigzag_llama3", {"heads_k_stride": 1}),
    ("zigzag_llama3", {"grouping": "packed"}),
]
DILATED = [
    (name, {"segments": [128, 256, 1024], "rates": [1, 2, 4], "mixing": mixing, "weights": weights})
    for name in MIXTURES
    for mixing, weights in (("head_groups", "joint"), ("longnet", "joint"), ("longnet", "detached"))
]
ALONE = [("grouped", {"n_groups": 4}), ("grouped", {"n_groups": 4, "grouping": "packed"})]


@pytest.mark.parametrize("world, packs", [(1, 1), (2, 1), (2, 16)])
def test_the_peak_of_a_dry_run_is_what_a_world_holds(in_world, world, packs):
    cases = [case for case in PLAIN + WITH_OPTIONS if packs > 1 or case not in FOR_PACKS]
    cases += DILATED * (packs == 1) + ALONE * (world == 1)
    cu_seqlens = tuple(range(0, TOKENS + 1, TOKENS // packs))
    arguments = {"cases": cases, "tokens": TOKENS, "heads": HEADS, "head_dim": HEAD_DIM}
    if packs > 1:
        arguments["packs"] = cu_seqlens
    held = in_world(memory.held, world, **arguments)
    shapes = Shapes(1, *HEADS, HEAD_DIM, 2)
    for (name, options), by_rank in zip(cases, held, strict=True):
        variant = everything()[name]
        problem = variant.problem(cu_seqlens, world, CAUSAL, options)
        for rank, real in enumerate(by_rank):
            for backward in (False, True):
                passes = dry_run(
                    variant, problem, shapes, options, rank=rank, pulls=True, packed=packs > 1, backward=backward
                )
                assert step_peak(passes) == pytest.approx(real[backward], rel=0.07), (name, options, backward, rank)


def test_training_on_ever_new_packed_batches_holds_no_more_memory(in_world):
    """Each would otherwise add some KB to what is kept of problems: 5 to 8 MiB from the 100th to the 300th."""
    early, _, late = in_world(memory.resident, 2, name="balanced", packs=300)
    assert late - early < 5  # the allocator keeps some


def test_memory_of_a_call_under_a_mask_grows_linearly(in_world):
    """Forward and backward, on every rank: no tensor has an element for each pair."""
    sizes = (2048, 8192)
    for what, by_rank in in_world(memory.under_masks, 2, names=["balanced", "ring_allgather"], sizes=sizes).items():
        for short, long in by_rank:  # layouts made for a mask differ
            assert long / sizes[1] <= 1.25 * short / sizes[0] and long < sizes[1] ** 2, (what, short, long)
