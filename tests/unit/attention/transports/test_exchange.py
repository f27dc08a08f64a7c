"""The fused tree reduction's kernel: ranks that write into each other's memory. Under Triton's interpreter every rank is a
process over shared memory; on a GPU all ranks run on it at once, each on a stream of its own."""

import multiprocessing
import time

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


def boxes_for(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's memory, and the table of where it is."""
    memory = [torch.zeros(BOX.numel, device=device) for _ in range(WORLD)]
    if device == "cpu":
        memory = [x.share_memory_() for x in memory]
    return memory, torch.tensor([x.data_ptr() for x in memory], device=device)


def partials(number: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By rank, of the call of that number."""
    batch, queries, heads, head_dim, counts = CALLS[number]
    found = []
    for rank, n in enumerate(counts):
        seed = 100 * number + 10 * rank
        parts = normal(n, batch, queries, heads, head_dim, dtype=torch.float32, seed=seed, device=device)
        lses = 3 * normal(n, batch, heads, queries, dtype=torch.float32, seed=seed + 1, device=device)
        found.append((parts, lses))
    return found


def called(number: int, rank: int, given, boxes, dtype: torch.dtype):
    batch, queries, heads, head_dim, _ = CALLS[number]
    _, table = boxes
    like = torch.empty(batch, queries, heads, head_dim, dtype=dtype, device=table.device)
    return exchange(*given[rank], table.data_ptr(), BOX, rank, like)


def check(number: int, given, results, tolerance: float) -> None:
    parts, lses = (torch.cat(x) for x in zip(*given, strict=True))
    expected, expected_lse = parts.new_empty(parts.shape[1:]), lses.new_empty(lses.shape[1:])
    if any(CALLS[number][4]):
        merge_n_eager(parts, lses, expected, expected_lse)
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"call {number}: ranks differ"
        if any(CALLS[number][4]):
            assert relative(out, expected) < tolerance
            assert_lse(lse, expected_lse, 1e-5)
        else:
            assert (out == 0).all() and (lse == -torch.inf).all()


def check_taken_down(boxes) -> None:
    memory, _ = boxes
    flags = [x.view(torch.int32)[BOX.flags : BOX.turns] for x in memory]
    turns = [x.view(torch.int32)[BOX.turns : BOX.marks] for x in memory]
    marks = [x.view(torch.int32)[BOX.marks :] for x in memory]
    assert all((x == 0).all() for x in (*flags, *marks))
    assert all(torch.equal(x, turns[0]) for x in turns)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted where there is a GPU")
def test_ranks_write_into_each_others_memory_and_merge_alike(tmp_path):
    boxes = boxes_for("cpu")
    given = [partials(number, "cpu") for number in range(len(CALLS))]
    context = multiprocessing.get_context("fork")

    def ranks_calls(rank: int) -> None:
        done = [called(number, rank, given[number], boxes, torch.float32) for number in range(len(CALLS))]
        torch.save(done, tmp_path / str(rank))

    processes = [context.Process(target=ranks_calls, args=(rank,), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    end = time.monotonic() + 100
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()  # where another failed it would wait for ever
    assert [process.exitcode for process in processes] == [0] * WORLD
    by_rank = {rank: torch.load(tmp_path / str(rank)) for rank in range(WORLD)}
    for number in range(len(CALLS)):
        results = [by_rank[rank][number] for rank in range(WORLD)]
        check(number, given[number], results, 1e-6)
    check_taken_down(boxes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_on_streams_of_one_gpu_write_into_each_others_memory(dtype):
    boxes = boxes_for("cuda")
    given = [partials(number, "cuda") for number in range(len(CALLS))]
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    for number in range(len(CALLS)):  # compiled, before any program waits for another
        for rank in range(WORLD):
            warm = boxes_for("cuda")
            warm[0][rank].view(torch.int32)[BOX.flags : BOX.turns] = 1
            called(number, rank, given[number], warm, dtype)
            torch.cuda.synchronize()
    for repeat in range(20):
        done = {}
        for number in range(len(CALLS)):
            for rank in range(WORLD) if repeat % 2 else reversed(range(WORLD)):
                with torch.cuda.stream(streams[rank]):
                    done[number, rank] = called(number, rank, given[number], boxes, dtype)
        torch.cuda.synchronize()
        for number in range(len(CALLS)):
            results = [done[number, rank] for rank in range(WORLD)]
            check(number, given[number], results, 1e-6 if dtype == torch.float32 else 4e-3)
    check_taken_down(boxes)
