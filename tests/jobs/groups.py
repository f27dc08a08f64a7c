"""Jobs in process groups of some of the ranks."""

from __future__ import annotations

from itertools import product
from pickle import dumps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attention
from attention.masks.band import CAUSAL
from attention.variants.registry import VARIANTS
from runner.launch.rank import Rank
from tests.jobs.reference import drawn, exact, refusal, rel
from tests.support.cases import Case, compute, wrong


def mesh(me: Rank, name: str) -> list[list[str | None]]:
    """By rank, what is wrong with a function in each dimension of a 2-d DeviceMesh: in one, groups are of neighbouring ranks;
    in the other, of ranks that lie apart."""
    names, found = ("outer", "inner"), []
    grid = init_device_mesh("cpu", (2, me.world // 2), mesh_dim_names=names)
    how = {"queries": 3, "causal": False, "gradients": ""} if VARIANTS[name].decode else {}
    for inside, other in (names, names[::-1]):
        group = grid[inside].get_group()
        # each group has its own inputs
        case = Case(name, group.size(), 32, 4, 2, 16, grid[other].get_local_rank(), transport="auto", **how)
        found.append(wrong(case, compute(case, group)))
    return me.gather(found)


def two_groups(me: Rank, transport: str) -> float:
    """The largest error of two functions, called in turn, over two groups that both contain this rank."""
    rows = [dist.new_group(list(range(i, me.world, 2))) for i in range(2)]
    columns = [dist.new_group([i, i + 1]) for i in range(0, me.world, 2)]
    fns = [
        attention.make("zigzag", group=rows[me.rank % 2], transport=transport),
        attention.make("zigzag_llama3", group=columns[me.rank // 2], transport=transport),
    ]
    errors = []
    for i in range(6):
        outs = []
        for fn in fns:
            qkv = drawn(me, *[(1, 16 * fn.world, 4, 16)] * 3, seed=i)
            outs.append((fn, fn(*map(fn.shard, qkv), causal=True)))
            expected = exact(*qkv, CAUSAL)
        errors += [rel(fn.unshard(out), expected) for fn, out in outs]
    return max(me.gather(max(errors)))


def outside(me: Rank, kinds: list[str]) -> list[str]:
    """The messages of `make` on rank 1 for a group, and for a mesh, that contains rank 0 alone."""
    messages = []
    for name, group in product(kinds, (dist.new_group([0]), dist.DeviceMesh("cpu", [0]))):
        given = {"tokens": 8, "heads": 2, "head_dim": 16} if name == "auto" else {}
        messages.append(refusal(lambda how=given | {"group": group}, name=name: attention.make(name, **how)))
    return me.gather(messages)[1]


def made_alone(me: Rank) -> list[str]:
    """The message of a call, in a process group, of a function that was made without one."""
    fn = attention.make("ring")
    fn.alone = True
    x = torch.zeros(1, 8, 2, 8)
    return me.gather(refusal(lambda: fn(x, x, x)))


def pickled(me: Rank, name: str) -> list[tuple[str, Any]]:
    """By rank, a pickled function, in hex, and its shard of 16 numbers."""
    fn = attention.make(name, **({"mask": attention.masks.causal()} if name == "balanced" else {}))
    return me.gather((dumps(fn).hex(), fn.shard(torch.arange(16).view(1, 16), role="kv").tolist()))


def unsharded(me: Rank, names: list[str]) -> list[dict[str, str]]:
    """For each variant, by what a call with check=True gets: what it raises."""
    found = []
    for name in names:
        fn = attention.make(name, check=True)
        q, k, v = drawn(me, *[(1, 16, 2, 8)] * 3)
        sharded = [fn.shard(x, role=role) for x, role in ((q, "q"), (k, "kv"), (v, "kv"))]
        inputs = {
            "shards": sharded,
            "zeros": [x * 0 for x in sharded],
            "unsharded": [sharded[0], k[:, :8], v[:, :8]],
            "unsharded v": [*sharded[:2], v[:, :8]],
        }
        messages = {kind: refusal(lambda given=given: fn(*given, causal=True)) for kind, given in inputs.items()}  # noqa: B023
        assert len({str(x) for x in me.gather(messages)}) == 1
        found.append(messages)
    return found


def distributed_tensors(me: Rank, name: str) -> list[list[str]]:
    """By rank, the refusals of DTensors: as k alone, as sinks, to shard and to unshard."""
    from torch.distributed.tensor import DTensor, Shard

    fn, mesh = attention.make(name), init_device_mesh("cpu", (me.world,))
    x = torch.zeros(1, 8, 2, 8)
    whole = DTensor.from_local(x, mesh, [Shard(2)])
    calls = (
        lambda: fn(x, whole, x),
        lambda: fn(x, x, x, sinks=whole),
        lambda: fn.shard(whole),
        lambda: fn.unshard(whole),
    )
    return me.gather([refusal(call) for call in calls])


def meshes(me: Rank) -> list[tuple[bool, list[str]]]:
    """By rank, whether a function over a mesh is over the mesh's group; and the refusals of a mesh of two dimensions and of
    a list of ranks."""
    fn = attention.make("ring", group=init_device_mesh("cpu", (me.world,)))
    same = fn.group is not None and dist.get_process_group_ranks(fn.group) == list(range(me.world))
    wrong = (init_device_mesh("cpu", (1, me.world), mesh_dim_names=("dp", "cp")), [0, 1])
    return me.gather((same, [refusal(lambda group=group: attention.make("ring", group=group)) for group in wrong]))
