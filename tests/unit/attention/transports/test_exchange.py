"""The fused tree reduction's kernel: ranks that write into each other's memory. Under Triton's interpreter every rank is a
process over shared memory."""

import multiprocessing

import pytest
import torch

from attention.geometry.mailbox import Mailbox
from attention.reduction.parts import merge_n_eager
from tests.support.naive import assert_lse, normal, relative

pytest.importorskip("triton")

from attention.ops.tree import exchange

# batch, queries, heads, head dim, and how many partial results each rank has; the last calls again like the first
CALLS = [
    (1, 1, 4, 64, (3, 1, 70)),
    (2, 3, 2, 80, (2, 0, 5)),
    (1, 1, 4, 64, (0, 0, 0)),
    (1, 2, 3, 33, (0, 130, 0)),
    (1, 1, 4, 64, (1, 1, 2)),
]
WORLD = 3


BOX = Mailbox(WORLD, 64)


def partials(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By rank, of the call of that number."""
    batch, queries, heads, head_dim, counts = CALLS[number]
    found = []
    for rank, n in enumerate(counts):
        seed = 100 * number + 10 * rank
        parts = normal(n, batch, queries, heads, head_dim, dtype=torch.float32, seed=seed)
        found.append((parts, 3 * normal(n, batch, heads, queries, dtype=torch.float32, seed=seed + 1)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU see the fused reduction in test_worlds_gpu.py")
def test_ranks_write_into_each_others_memory_and_merge_alike(tmp_path):
    memory = [torch.zeros(BOX.numel).share_memory_() for _ in range(WORLD)]
    table = torch.tensor([x.data_ptr() for x in memory])
    given = [partials(number) for number in range(len(CALLS))]
    context = multiprocessing.get_context("fork")

    def ranks_calls(rank: int) -> None:
        likes = [torch.empty(call[:4]) for call in CALLS]
        done = [exchange(*x[rank], table.data_ptr(), BOX, rank, like) for x, like in zip(given, likes, strict=True)]
        torch.save(done, tmp_path / str(rank))

    processes = [context.Process(target=ranks_calls, args=(rank,), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()  # where another failed it would wait for ever
    assert [process.exitcode for process in processes] == [0] * WORLD
    everyones = [torch.load(tmp_path / str(rank)) for rank in range(WORLD)]
    for number, ((out, lse), *others) in enumerate(zip(*everyones, strict=True)):
        assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in others), f"call {number}: ranks differ"
        parts, lses = (torch.cat(x) for x in zip(*given[number], strict=True))
        if not len(parts):
            assert not out.any() and (lse == -torch.inf).all()
            continue
        expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
        merge_n_eager(parts, lses, expected, expected_lse)
        assert relative(out, expected) < 1e-6
        assert_lse(lse, expected_lse, 1e-5)
    for x in memory:
        words = x.view(torch.int32)
        assert not words[BOX.flags : BOX.turns].any() and not words[BOX.marks :].any()
        assert torch.equal(words[BOX.turns : BOX.marks], memory[0].view(torch.int32)[BOX.turns : BOX.marks])
