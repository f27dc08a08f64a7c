"""Jobs that count the bytes a transport receives."""

from __future__ import annotations

from typing import Any

import torch

import attention
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork


def counted(
    me: Rank,
    name: str,
    options: dict[str, Any],
    causal: bool,
    window: list[int],
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    transport: str = "auto",
    packs: list[int] | None = None,
) -> list[dict[str, Any]]:
    """The bytes that the transport counted into each rank, forward and backward."""
    fn = attention.make(name, transport=transport, **options)
    lead = (tokens,) if packs else (batch, tokens)
    q, k, v = (fn.shard(torch.randn(*lead, h, 16), packs).requires_grad_() for h in (heads, kv_heads, kv_heads))
    mask: dict[str, Any] = {"causal": causal, "window": tuple(window), "cu_seqlens": packs}
    counter = fn.plan(q, k, v, **mask).transport.bytes_received
    counter.clear()
    out = fn(q, k, v, **mask)
    forward = dict(counter)
    counter.clear()
    out.sum().backward()
    return me.gather({"forward": forward, "backward": dict(counter)})


def counted_of_runs(me: Rank, experiments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each experiment: the transport, whether it pulls, and the bytes counted into each rank by forward and
    backward."""
    found = []
    for plain in experiments:
        spec = Experiment.from_plain(plain)
        work = AttentionWork(me, spec)
        transport, received = work.plan.transport, {}
        for which in work.passes:
            transport.bytes_received.clear()
            work.run(which)
            received[which] = dict(transport.bytes_received)
        found.append({"name": transport.name, "pulls": transport.pulls, "received": me.gather(received)})
    return found
