"""Memory under a mask grows linearly with the tokens: no tensor has an element for each pair."""

import pytest

from runner.launch.files import WorldSpec
from tests.jobs import memory

SIZES = (2048, 8192)
OF_REFERENCE = (1024, 4096)


def assert_linear(what: str, found: list[int], sizes: tuple[int, int] = SIZES) -> None:
    """The bytes grow as the tokens, and at most by a quarter more: layouts made for a mask differ."""
    each = [held / n for held, n in zip(found, sizes, strict=True)]
    fit = f"{what}: {found} bytes for {sizes} tokens, {[round(x) for x in each]} a token"
    assert each[-1] <= 1.25 * each[0], fit
    assert found[-1] < sizes[-1] ** 2, fit  # less than a byte for each pair of a whole matrix


@pytest.mark.slow
@pytest.mark.parametrize("world, names", [(1, ["dense"]), (2, ["balanced", "ring", "ring_allgather"])])
def test_memory_of_a_call_grows_linearly(pool, world, names):
    """Forward and backward, on every rank."""
    outcome = pool.get(WorldSpec(world, "cpu")).call(memory.under_masks, {"names": names, "sizes": SIZES}, 120.0)
    assert outcome.status == "ok", "\n".join(outcome.log_tail)
    for name, by_mask in outcome.result.items():
        for mask, by_rank in by_mask.items():
            for rank, found in enumerate(by_rank):
                assert_linear(f"{name} under {mask}, rank {rank}", found)
