"""Jobs in which ranks ask for different plans, or in which one makes none."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attention
from attention import agreement as checked
from attention.agreement import Disagreement
from attention.masks.mask import Banded
from runner.launch.rank import Rank

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPE = {"batch": 1, "tokens": 16, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "gradient": False}


def _function(name: str = "ring", agreement: Any = 20.0, group: Any = None, **given: Any) -> Any:
    """Waits longer than these jobs take, but not forever."""
    return attention.make(name, group=group, kernel=given.pop("kernel", "math"), agreement=agreement, **given)


def _inputs(packed: bool = False, queries: int | None = None, **given: Any) -> list[Tensor]:
    """Of one rank. tokens: of this rank."""
    x = SHAPE | given
    found = []
    for tokens, heads in [(queries or x["tokens"], x["heads"]), *[(x["tokens"], x["kv_heads"])] * 2]:
        shape = (tokens,) if packed else (x["batch"], tokens)
        found.append(torch.randn(*shape, heads, x["head_dim"], dtype=DTYPES[x["dtype"]], requires_grad=x["gradient"]))
    return found


def _message(fn: Any, inputs: list[Tensor], call: dict[str, Any]) -> str:
    try:
        fn(*inputs, **call)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def disagree(me: Rank, odd: int, base: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    """The messages of ranks of which one, `odd`, has `other` in place of `base`, by rank; and those of an equal call after
    it. base, other: arguments of `make`, of the tensors and of the call; a mask is a band's bounds."""
    how = {part: base.get(part, {}) | (other.get(part, {}) if me.rank == odd else {}) for part in ("make", "x", "call")}
    if "mask" in how["call"]:
        how["call"]["mask"] = Banded(*how["call"]["mask"])
    fn = _function(**how["make"])
    first = _message(fn, _inputs(**how["x"]), how["call"])
    fn = _function()
    return {"first": me.gather(first), "then": me.gather(_message(fn, _inputs(), {}))}


def differ_in_lengths(me: Rank) -> list[str]:
    """The last of many sequences begins at another token on the last rank."""
    cu = list(range(0, 64 * me.world + 1, 4))
    cu[-2] += me.rank == me.world - 1
    return me.gather(_message(_function("llama3"), _inputs(packed=True, tokens=64), {"cu_seqlens": cu, "causal": True}))


def skip(me: Rank, absent: list[int], how: str) -> list[Any]:
    """(message, seconds until it) by rank, where the absent ranks make no plan while the others do. how: "skipped", they
    make no call; "reused", they repeat an earlier call; "off", they have agreement=False."""
    late = me.rank in absent
    fn = _function(agreement=False if late and how == "off" else 1.5)
    if how == "reused":
        fn(*_inputs())
    start = time.perf_counter()
    if not late:
        message = _message(fn, _inputs(head_dim=32), {})
    elif how == "reused":
        message = fn.plan(*_inputs()).variant.name  # without communication, which would wait for the others
    else:
        message = "none"
    return me.gather((message, time.perf_counter() - start))


def swapped(me: Rank) -> list[str]:
    """The last rank calls two functions in the other order."""
    fns = [_function("ring"), _function("ulysses", head_parts=1)]
    return me.gather(_message(fns[me.rank == me.world - 1], _inputs(), {}))


def late(me: Rank) -> list[tuple[str, str]]:
    """(Message of the first call, of the second) by rank. Rank 0 makes its first call when the others have given up, and
    they make their second when rank 0 has given up."""
    fn = _function(agreement=1.5)
    if me.rank == 0:
        me.barrier()
    first = _message(fn, _inputs(), {})
    if me.rank != 0:
        me.barrier()
    me.barrier()
    return me.gather((first, _message(_function(), _inputs(), {})))


def refused_by_one(me: Rank) -> list[Any]:
    """(Message, seconds) by rank, where rank 1 gives v a head too many, which is refused before its plan."""
    fn = _function()
    q, k, v = _inputs()
    if me.rank == 1:
        v = torch.cat([v, v], 2)
    start = time.perf_counter()
    return me.gather((_message(fn, [q, k, v], {}), time.perf_counter() - start))


def corrected(me: Rank) -> list[str]:
    """Rank 1 first tries a call that is refused, then makes the call that all make."""
    fn = _function()
    if me.rank == 1:
        q, k, v = _inputs()
        _message(fn, [q, k, torch.cat([v, v], 2)], {})
    return me.gather(_message(fn, _inputs(), {}))


def refused_by_two(me: Rank) -> list[Any]:
    """The messages of two calls by rank, the first of which ranks 1 and 2 refuse, each for its own reason, rank 2 when the
    others have given up."""
    fn = _function()
    q, k, v = _inputs()
    if me.rank == 2:
        time.sleep(2.0)
    first = [q, k, torch.cat([v] * (me.rank + 1), 2)] if me.rank in (1, 2) else [q, k, v]
    refused = _message(fn, first, {})
    if me.rank in (1, 2):
        time.sleep(2.0)  # a call that comes sooner would stand for the refused one
    return me.gather((refused, _message(fn, _inputs(), {})))


def refused_by_all(me: Rank) -> list[str]:
    """The messages of two calls, the first of which every rank refuses."""
    fn = _function()
    first = _message(fn, _inputs(), {"window": (-2, 0)})
    return me.gather((first, _message(fn, _inputs(), {})))


def keys_in_store(me: Rank, packs: int) -> list[int]:
    """The keys in the group's store after 3 plans, and after `packs` more plans of packed batches."""
    group = dist.new_group(list(range(me.world)))
    fn = _function("llama3", group=group)
    found = []
    for count in (3, packs):
        for i in range(count):
            cu = [0, 5 + i + count, 64 * me.world]
            fn(*_inputs(packed=True, tokens=64), cu_seqlens=cu, causal=True)
        me.barrier()
        found.append(_rounds(group).store.num_keys())
        me.barrier()
    return found


def _rounds(group: Any) -> Any:
    rounds = checked._rounds_of(group)
    assert rounds is not None
    return rounds


def in_subgroups(me: Rank) -> list[str]:
    """Ranks 0 and 2 make two plans while ranks 1 and 3 make one, then all make one together."""
    groups = [dist.new_group([i, i + 2]) for i in range(2)]
    fn = _function(group=groups[me.rank % 2])
    messages = [_message(fn, _inputs(), {})]
    if me.rank % 2 == 0:
        messages.append(_message(fn, _inputs(head_dim=32), {}))
    messages.append(_message(_function(), _inputs(), {}))
    return me.gather(messages)


def off(me: Rank) -> list[int]:
    """How many agreements calls of an equal function with agreement=False make."""
    group = dist.new_group(list(range(me.world)))
    _function(group=group, agreement=False)(*_inputs())
    return me.gather(_rounds(group).number)


def is_a_disagreement(me: Rank) -> list[bool]:
    try:
        _function()(*_inputs(), scale=0.5 + me.rank)
    except Disagreement:
        return me.gather(True)
    return me.gather(False)
