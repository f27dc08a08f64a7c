"""How long ranks take to agree on a new plan, on one host over gloo.

    python -m benchmarks.agreement [--world 4] [--calls 300] [--sequences 64]

Each call is of a new packed batch, so that each makes a plan. Ranks start together. Prints for each rank the median and the 90th
percentile in milliseconds: of `Calls.check` alone, waits for the other ranks included, and of a whole new plan with and without
agreement."""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attention
from attention.agreement import calls_over

TOKENS = 4096  # of each rank


def lengths(seed: int, total: int, sequences: int) -> list[int]:
    """cu_seqlens of random sequences, at least one token each."""
    cuts = random.Random(seed).sample(range(1, total), sequences - 1)
    return [0, *sorted(cuts), total]


def milliseconds(call: Callable[[int], Any], calls: int) -> str:
    found = []
    for i in range(calls):
        dist.barrier()
        start = time.perf_counter()
        call(i)
        found.append((time.perf_counter() - start) * 1e3)
    found = found[calls // 10 :]  # the first ones connect
    return f"{statistics.median(found):7.3f} {statistics.quantiles(found, n=10)[-1]:7.3f}"


def ranks_main(rank: int, world: int, port: int, calls: int, sequences: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    q, k, v = (torch.empty(TOKENS, heads, 64) for heads in (8, 2, 2))
    asked = {f"field {i}": "some value of it" for i in range(22)}
    seeds = itertools.count()

    def plan(fn: Any) -> Any:
        packs = lengths(next(seeds), TOKENS * world, sequences)
        return lambda: fn.plan(q, k, v, cu_seqlens=packs, causal=True)

    found = [milliseconds(lambda _: calls_over(None).check(asked), calls)]
    for given in (True, False):
        fn = attention.make("llama3", agreement=given)
        ready = [plan(fn) for _ in range(calls)]
        found.append(milliseconds(lambda i, ready=ready: ready[i](), calls))  # type: ignore[misc]
    print(f"{rank:4} |", " | ".join(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=64, help="of each packed batch")
    given = parser.parse_args()
    print("rank | check: median, p90 | new plan: median, p90 | without agreement: median, p90   (ms)")
    mp.spawn(ranks_main, (given.world, free_port(), given.calls, given.sequences), nprocs=given.world)


if __name__ == "__main__":
    main()
