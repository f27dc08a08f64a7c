"""Jobs in which ranks make different calls, or in which one makes none."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attention
from attention.agreement import calls_over
from attention.kernels.patterns import ForPatterns
from attention.masks import rectangles
from attention.masks.band import Band
from attention.masks.mask import Banded
from runner.launch.rank import Rank
from tests.jobs.reference import give_kernel, refusal

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPE = {"batch": 1, "tokens": 16, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "gradient": False}


def _inputs(packed: bool = False, queries: int | None = None, **given: Any) -> list[Tensor]:
    """Of one rank. tokens: of this rank."""
    x = SHAPE | given
    found = []
    for tokens, heads in [(queries or x["tokens"], x["heads"]), *[(x["tokens"], x["kv_heads"])] * 2]:
        shape = (tokens,) if packed else (x["batch"], tokens)
        found.append(torch.randn(*shape, heads, x["head_dim"], dtype=DTYPES[x["dtype"]], requires_grad=x["gradient"]))
    return found


def _function(name: str = "ring", agreement: Any = 60.0, group: Any = None, **options: Any) -> Any:
    """Waits longer than these jobs take, but not forever."""
    return attention.make(name, group=group, kernel=options.pop("kernel", "math"), agreement=agreement, **options)


def _group(me: Rank) -> dist.ProcessGroup:
    """All ranks, in a group of its own, which may be of no use afterwards."""
    return dist.new_group(list(range(me.world)))


def _message(fn: Any, inputs: list[Tensor], call: dict[str, Any]) -> str:
    try:
        fn(*inputs, **call)
    except (ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def messages(me: Rank, by_rank: list[list[Any]], apart: bool = False) -> list[list[tuple[str, float]]]:
    """By rank, the message of each of its calls and the seconds until it. A call: arguments of `make`, of the tensors and of the
    call, in which a mask is a band's bounds; or None, at which the ranks wait for each other. apart: in a group of
    their own."""
    said, group = [], _group(me) if apart else None
    for call in by_rank[me.rank]:
        if call is None:
            me.barrier()
            continue
        how, start = dict(call.get("call", {})), time.perf_counter()
        if "mask" in how:
            how["mask"] = Banded(Band(*how["mask"]))
        message = _message(_function(group=group, **call.get("make", {})), _inputs(**call.get("x", {})), how)
        said.append((message, time.perf_counter() - start))
    return me.gather(said)


def refuses_its_pattern(me: Rank) -> list[Any]:
    """The messages of two equal calls by rank. In the first, the kernel refuses the pattern of the last rank's block, as
    those that take some patterns only do."""

    def refuse(*_: object) -> None:
        raise attention.UnsupportedCall("not this pattern")

    fn, check, mask = _function("llama3"), ForPatterns.check, rectangles([((8, 24), (0, 8), (-1, -1))])
    if me.rank == me.world - 1:
        ForPatterns.check = refuse  # type: ignore[method-assign,assignment]
    try:
        first = _message(fn, _inputs(), {"mask": mask})
    finally:
        ForPatterns.check = check  # type: ignore[method-assign]
    return me.gather((first, _message(fn, _inputs(), {"mask": mask})))


def skips_a_batch(me: Rank, bad: int, transport: str) -> list[Any]:
    """By rank and step, the message, or the values of out, which should be the step's number: rank 1 refuses the call of
    step `bad`, and goes on to the next one."""
    fn = _function("zigzag", group=_group(me), transport=transport)
    steps: list[Any] = []
    for step in range(3):
        x = torch.full((1, 16, 2, 8), float(step))
        try:
            out = fn(x, x, x, causal=True, softcap=-1.0 if (me.rank, step) == (1, bad) else None)
            steps.append(sorted({round(value, 3) for value in out.flatten().tolist()}))
        except ValueError as error:
            steps.append(f"{type(error).__name__}: {error}")
    return me.gather(steps)


def raises_within(me: Rank) -> list[str]:
    """The message by rank of a call whose plan exists and whose kernel raises on the last rank."""
    fn = _function(group=_group(me))
    fn(*_inputs())
    if me.rank == me.world - 1:
        give_kernel(fn, None)
    return me.gather(_message(fn, _inputs(), {}))


def skips_a_backward(me: Rank) -> list[str]:
    """The messages of two ranks, of which rank 0 makes its next call in place of a backward."""
    fn = _function(group=_group(me), agreement=2)
    me.barrier()  # so that none is late for the first call
    out = fn(*_inputs(gradient=True))
    if me.rank == 0:
        return me.gather(_message(fn, _inputs(gradient=True), {}))
    return me.gather(refusal(out.sum().backward))


def keys_in_store(me: Rank, packs: int) -> list[int]:
    """The keys in the group's store after 3 plans, and after `packs` more plans of packed batches."""
    group = _group(me)
    fn = _function("llama3", group=group)
    keys = []
    for count in (3, packs):
        for i in range(count):
            cu = [0, 5 + i + count, 64 * me.world]
            fn(*_inputs(packed=True, tokens=64), cu_seqlens=cu, causal=True)
        me.barrier()
        keys.append(calls_over(group).store.num_keys())
        me.barrier()
    return keys


def in_groups_of_one(me: Rank) -> list[list[str]]:
    """Rank 0 makes two plans in a group of its own while the others make one, then all make one together."""
    groups = [dist.new_group([i]) for i in range(me.world)]
    fn = _function(group=groups[me.rank])
    messages = [_message(fn, _inputs(head_dim=head_dim), {}) for head_dim in ((16, 32) if me.rank == 0 else (16,))]
    return me.gather([*messages, _message(_function(), _inputs(), {})])


def leaves_first(rank: int, port: int, how: str, messages: Any) -> None:
    """The process of rank 0 holds the store, and ends as soon as its call has raised. how: ranks differ, or rank 0
    refuses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    call: dict[str, Any] = {"scale": 0.5 + rank} if how == "differ" else {"softcap": -1.0 if rank == 0 else 1.0}
    messages.put((rank, _message(_function(), _inputs(), call)))
    messages.close()
    messages.join_thread()
    os._exit(0)
