"""Jobs on a GPU that replay CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

import attention
from attention.masks.band import CAUSAL, FULL
from runner.launch.rank import Rank
from tests.jobs.reference import drawn, exact, give_kernel, rel


def after_a_broken_capture(me: Rank, name: str) -> float:
    """The largest difference that launched passes have to the first, behind a backward whose capture the kernel broke
    on every rank, with the room for an offer taken."""
    launched, captured = (
        attention.make(name, kernel="flash2", transport="symm", replay=way) for way in ("none", "graphs")
    )
    whole = drawn(me, *((1, 512 * me.world, heads, 64) for heads in (8, 4, 4, 8)), dtype=torch.bfloat16)
    *inputs, dout = map(launched.shard, whole)
    inputs = [x.requires_grad_() for x in inputs]

    def passes(fn: attention.ContextParallel) -> list[torch.Tensor]:
        out = fn(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    expected = [x.clone() for x in passes(launched)]
    kernel = launched.plan(*inputs, causal=True).kernel

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            if name in ("backward", "gradients") and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("half-way in a capture")
            return getattr(kernel, name)

    differences = []
    for _ in range(2):
        found = passes(captured)
        give_kernel(captured, Breaking())
        try:
            found = passes(captured)  # is right as it is run, and then captured
        except attention.UnsupportedCall as error:
            assert "half-way in a capture" in str(error)
        else:
            raise AssertionError("the backward was to be captured")
        left = launched.transport(me.device).pool.filling
        assert left and all(each.captured for each in left.values()), "no offer's room was taken"
        for _ in range(3):
            found = passes(launched)
            differences += [rel(x, wanted) for wanted, x in zip(expected, found, strict=True)]
        assert not launched.transport(me.device).pool.filling
        captured = attention.make(name, kernel="flash2", transport="symm", replay="graphs")
    return max(me.gather(max(differences)))


def captured_graph(me: Rank, name: str, transport: str) -> float:
    """Calls of a function and replays of a CUDA graph of it, in turn and behind other work: the largest error of
    either."""
    decode = name == "tree"
    fn = attention.make(name, transport=transport, kernel="auto" if decode else "flash2")
    lengths = (3 if decode else 512 * me.world, 512 * me.world, 512 * me.world)
    q, k, v = drawn(me, *((1, n, 4, 64) for n in lengths), dtype=torch.bfloat16)
    local = [fn.shard(x, role=role) for x, role in zip((q, k, v), ("q", "kv", "kv"), strict=True)]
    wanteds = []
    for sign in (1, -1):  # of the queries that each other call and replay has
        wanted = exact(sign * q, k, v, FULL if decode else CAUSAL)
        wanteds.append(wanted if decode else fn.shard(wanted))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn(*local, causal=not decode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = fn(*local, causal=not decode)
    busy = torch.randn(8192, 8192, device=me.device)
    errors = []
    for i in range(12):
        if i % 3 == me.rank % 3:
            busy = (busy @ busy).clamp_(-1, 1)
        graph.replay()
        if i % 2:
            errors.append(rel(fn(*local, causal=not decode), wanteds[i // 2 % 2]))
        errors.append(rel(captured, wanteds[i // 2 % 2]))
        if i % 2:
            torch.cuda.synchronize()
            local[0].neg_()
    return max(me.gather(max(errors)))


def graph_replay(me: Rank, name: str, kernel: str) -> dict[str, Any]:
    """Training of two layers, with activation checkpoints, without gradients, in inference mode, of two shapes and from
    strided tensors, by a function that replays graphs and by an eager one, in turn, with the symmetric memory given
    back in between: the largest relative difference of any out or gradient, and how many graphs there are at the end."""
    from torch.utils.checkpoint import checkpoint

    from attention.transports import release

    plain, replayed = (attention.make(name, transport="symm", kernel=kernel, replay=way) for way in ("none", "graphs"))
    differences = []
    for i in range(24):
        n = (256 if i % 5 == 4 else 512) * me.world
        layers = [plain.shard(x) for x in drawn(me, *[(1, n, 8, 64)] * 2, seed=i, dtype=torch.bfloat16)]
        results = []
        for fn in (plain, replayed):
            leaves = [x.clone().requires_grad_() for x in layers]
            inputs = [x.split((4, 2, 2), 2) for x in leaves]
            if i % 4 == 2:
                with torch.inference_mode(i % 8 == 2), torch.no_grad():
                    results.append([fn(*x, causal=True).clone() for x in inputs])
                continue
            if i % 4 == 3:
                outs = [checkpoint(fn, *x, causal=True, use_reentrant=False) for x in inputs]
            else:
                outs = [fn(*x, causal=True) for x in inputs]
            loss = sum((out * out.detach()).sum() for out in outs)
            results.append([*outs, *torch.autograd.grad(loss, leaves)])
        differences += [rel(x, wanted) for wanted, x in zip(*results, strict=True)]
        if i == 8:
            me.barrier()
            release()
            me.barrier()
    graphs = sum(graph is not None for graph in replayed.graphs.graphs.values())
    return {"difference": max(me.gather(max(differences))), "graphs": graphs}
