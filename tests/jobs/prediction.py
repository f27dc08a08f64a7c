"""What a world measures of itself, and of a ring."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import attention
from runner.costs.links import Link
from runner.launch.rank import Rank

TIMES = 7


def _seconds(me: Rank, run: Callable[[], object]) -> float:
    """The median of the slowest rank's times, all beginning together."""
    found = []
    for _ in range(TIMES):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(max(me.gather(time.perf_counter() - start)))
    return sorted(found)[TIMES // 2]


def measured(me: Rank, tokens: int, heads: int, head_dim: int) -> list[dict[str, Any]]:
    """Rates while all ranks compute, the link to a neighbour, and the ms of a ring's forward of so many tokens a rank."""
    q, k, v = (torch.randn(1, tokens, heads, head_dim) for _ in range(3))
    ring = attention.make("ring", kernel="sdpa_flash")
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    compute = _seconds(me, lambda: attend(q_, k_, v_))
    large = torch.ones(1 << 24, dtype=torch.uint8)
    copy = _seconds(me, large.clone)

    def pass_on(size: int) -> Callable[[], None]:
        sent, received = (torch.ones(size, dtype=torch.uint8) for _ in range(2))

        def once() -> None:
            after, before = (me.rank + 1) % me.world, (me.rank - 1) % me.world
            for each in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            ):
                each.wait()

        return once

    few, many = 1 << 16, 1 << 22
    soon, late = (_seconds(me, pass_on(size)) for size in (few, many))
    seconds_a_byte = max(late - soon, soon / 100) / (many - few)
    link = Link(1e-9 / seconds_a_byte, max(0.0, soon - few * seconds_a_byte) * 1e6)
    with torch.no_grad():
        ms = _seconds(me, lambda: ring(q, k, v)) * 1e3
    flops = 4 * heads * head_dim * tokens**2
    found = {
        "tflops": flops / compute / 1e12, "copy_gb_s": 2 * large.numel() / copy / 1e9, "gb_s": link.gb_s,
        "latency_us": link.latency_us, "ms": ms,
    }  # fmt: skip
    return me.gather(found)
