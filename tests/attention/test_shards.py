"""What a rank holds of a global tensor is its own part and nothing else."""

from dataclasses import replace

import pytest
import torch

import attention
from attention.api import ContextParallel
from attention.variants.registry import VARIANTS

WORLD = 4


def of_rank(name: str, rank: int) -> ContextParallel:
    """The function as rank `rank` of a world of four has it: sharding talks to nobody."""
    fn = attention.make(name)
    fn.world, fn.rank, fn.layout = WORLD, rank, fn.variant.border(WORLD, fn.options)
    return fn


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if not v.layout.replicated])
@pytest.mark.parametrize("shape", [(1, 64, 4, 8), (2, 64, 4, 8), (64, 4, 8)], ids=str)
def test_a_shard_keeps_nothing_of_the_whole(name, shape):
    x = torch.randn(shape)
    packs = [0, 32, 64] if len(shape) == 3 else None
    if packs and VARIANTS[name].decode:
        pytest.skip("a decode takes no packed batches")
    for rank in range(WORLD):
        mine = of_rank(name, rank).shard(x, packs, role="kv")
        assert mine.numel() * WORLD == x.numel()
        assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
        assert mine.is_contiguous()


def test_a_window_is_refused_where_the_chunks_are_fused():
    fn = of_rank("zigzag_llama3", 0)
    fn.options = replace(fn.options, grouping="fused")
    x = torch.randn(1, 16, 2, 64)
    with pytest.raises(ValueError, match=r"window=\(9, 0\).*grouping=separate and packed take windows"):
        fn.plan(x, x, x, causal=True, window=(9, 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_what_is_not_floating_point_is_refused(dtype):
    x = torch.ones(1, 16, 2, 8, dtype=dtype)
    with pytest.raises(ValueError, match=rf"{dtype}: .* floating-point dtype; give q\.to\("):
        attention.make("ring")(x, x, x)


@pytest.mark.parametrize("name", ("dense", "zigzag", "tree"))
def test_graphs_are_refused_where_there_are_none(name):
    fn = attention.make(name, replay="graphs")
    q, k = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16)
    with pytest.raises(attention.UnsupportedCall, match="replay=graphs: a cpu has no CUDA graphs"):
        fn(q, k, k, causal=name == "zigzag")
