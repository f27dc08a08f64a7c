"""What a rank holds of a global tensor is its own part and nothing else."""

import pickle
import re
from dataclasses import replace

import pytest
import torch

import attention
from attention.api import ContextParallel
from attention.variants.registry import VARIANTS
from tests.jobs import groups

WORLD = 4


def of_rank(name: str, rank: int) -> ContextParallel:
    """The function as rank `rank` of a world of four has it: sharding talks to nobody."""
    fn = attention.make(name)
    fn.world, fn.rank, fn.layout = WORLD, rank, fn.variant.border(WORLD, fn.options)
    fn.alone = False
    return fn


@pytest.mark.parametrize("name", ["ring", "zigzag", "stripe", "balanced", "tree"])
def test_a_shard_keeps_nothing_of_the_whole(name):
    batches = [((2, 64, 4, 8), None), ((64, 4, 8), [0, 32, 64])]
    for shape, packs in batches[: 2 - VARIANTS[name].decode]:  # a decode takes no packed batches
        x = torch.randn(shape)
        for rank in range(WORLD):
            mine = of_rank(name, rank).shard(x, packs, role="kv")
            assert mine.numel() * WORLD == x.numel()
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
            assert mine.is_contiguous()


@pytest.mark.parametrize("name", ("ring", "dense", "tree"))
def test_hidden_states_are_refused_and_their_way_out_works(name):
    x, fn = torch.randn(4, 16, 6), of_rank(name, 1)
    for sharded in (lambda: fn.shard(x, role="kv"), lambda: fn.shard(x, role="q"), lambda: fn.unshard(x)):
        with pytest.raises(ValueError, match=r"x has shape \[4, 16, 6\]: three dims .* give x.unsqueeze\(2\)"):
            sharded()
    assert fn.shard(x.unsqueeze(2), role="kv").shape == (4, 16 if name == "dense" else 4, 1, 6)


@pytest.mark.parametrize(
    "shape, packs, rule", [((16,), None, r"[B, S] or [B, S, H, D]"), ((8, 8), [0, 8], "[T], [1, T] or [T, H, D]")]
)
def test_other_shapes_are_not_sharded(shape, packs, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        of_rank("ring", 0).shard(torch.zeros(shape), packs)


def test_a_window_is_refused_where_the_chunks_are_fused():
    fn = of_rank("zigzag_llama3", 0)
    fn.options = replace(fn.options, grouping="fused")
    x = torch.randn(1, 16, 2, 64)
    with pytest.raises(ValueError, match=r"window=\(9, 0\).*grouping=separate and packed take windows"):
        fn.plan(x, x, x, causal=True, window=(9, 0))


@pytest.mark.parametrize("name", ("zigzag", "balanced", "tree"))
def test_a_function_shards_in_a_process_without_its_group_and_refuses_calls(in_world, name):
    x = torch.arange(16).view(1, 16)
    for rank, (pickled, expected) in enumerate(in_world(groups.pickled, 2, name=name)):
        fn = pickle.loads(bytes.fromhex(pickled))
        assert fn.rank == rank and fn.shard(x, role="kv").tolist() == expected
        q = torch.zeros(1, 8, 2, 8)
        for call in (lambda: fn(q, q, q), lambda: fn.unshard(q)):  # noqa: B023
            with pytest.raises(
                ValueError, match="was unpickled in a process without a process group: it can only shard"
            ):
                call()


def test_tensors_that_are_equal_on_two_ranks_are_no_shards(in_world):
    for said in in_world(groups.unsharded, 2, names=["ring", "zigzag", "ulysses", "tree"]):
        assert said == {
            "shards": "",
            "zeros": "",
            "unsharded": "k is equal on ranks 0 and 1: each rank must give its own shard; give fn.shard(k)",
            "unsharded v": "v is equal on ranks 0 and 1: each rank must give its own shard; give fn.shard(v)",
        }


@pytest.mark.parametrize("name", ("ring", "tree"))
def test_distributed_tensors_are_refused_on_every_rank(in_world, name):
    for messages in in_world(groups.distributed_tensors, 2, name=name):
        assert messages == [
            f"{x} is a DTensor: it must be the tensor that this rank holds; give {x}.to_local()"
            for x in ("k", "sinks", "x", "x")
        ]


def test_a_group_may_be_a_mesh_of_one_dimension(in_world):
    for same, refusals in in_world(groups.meshes, 2):
        assert same
        assert re.match(
            r"group=DeviceMesh.*: a mesh of 2 dimensions must be cut .*; for instance mesh\[\"cp\"\]", refusals[0]
        )
        assert re.match(r"group=\[0, 1\]: must be a process group or a device mesh of one dimension; give", refusals[1])
