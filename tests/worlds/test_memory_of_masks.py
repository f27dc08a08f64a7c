"""Memory under a mask grows linearly with the tokens: no tensor has an element for each pair."""

import pytest
import torch

from runner.check import reference
from runner.check.reference import Seen
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


@pytest.mark.slow
def test_memory_of_the_reference_grows_linearly():
    """Beside a chunk of scores, whose number is fixed."""
    for number, mask in enumerate(memory.growing(OF_REFERENCE[0])):
        found = []
        for n in OF_REFERENCE:
            rectangles = torch.tensor(memory.growing(n)[number].rectangles(n))
            q, k, v, dout = (torch.randn(n, heads, 16) for heads in (2, 1, 1, 2))
            seen = Seen.band((n,), (n,), rectangles=rectangles)
            with memory.Live({x.untyped_storage().data_ptr() for x in (q, k, v, dout)}) as live:
                reference.attend(q, k, v, dout, seen, 0.25, scores=1 << 18)
            found.append(live.peak)
        assert_linear(f"the reference under {mask}", found, OF_REFERENCE)
