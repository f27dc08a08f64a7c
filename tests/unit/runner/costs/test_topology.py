"""Links within and between nodes, and what crosses them."""

from dataclasses import replace

import pytest

from attention.geometry.counts import Shapes
from attention.masks.band import CAUSAL
from attention.variants.registry import VARIANTS
from runner.costs import dry_run
from runner.costs.links import Link
from runner.costs.topology import ONE_NODE, Topology, Transfer

INSIDE = Link(400, 10)
NODES = Topology("nodes of 4", 4, Link(50, 20), 4)
SHAPES = Shapes(1, 8, 4, 64, 2)


def seconds(topology, total, *sources, rank=0, world=8, kind="one"):
    """Of a transfer. sources: pairs of a rank and its bytes."""
    return topology.seconds(Transfer(kind, total, sources), rank, world, INSIDE)


def test_ranks_of_one_node_use_its_link_and_others_that_between_nodes():
    assert seconds(NODES, 4e9, (3, 4e9)) == seconds(ONE_NODE, 4e9, (4, 4e9), rank=3) == INSIDE.seconds(4e9)
    assert seconds(NODES, 4e9, (4, 4e9), rank=3) == Link(50, 20).seconds(4e9)


def test_gpus_that_cross_together_share_the_nics():
    scarce = replace(NODES, nics=1)
    assert scarce.shared(4) == Link(12.5, 20)
    # in a ring only the node's first rank has its neighbour elsewhere; four ranks away all have
    assert seconds(scarce, 5e9, (7, 5e9)) == pytest.approx(0.1, abs=1e-3)
    assert seconds(scarce, 5e9, (0, 5e9), rank=4) == pytest.approx(0.4, abs=1e-3)


def test_what_comes_from_the_node_and_from_elsewhere_comes_at_once():
    both = seconds(NODES, 5e9, (1, 4e9), (4, 1e9), kind="all")
    assert both == pytest.approx(1e9 / 50e9 + 20e-6)
    assert seconds(NODES, 4e9, (1, 4e9), kind="all") == INSIDE.seconds(4e9)


def test_a_collective_takes_each_byte_into_a_node_once():
    assert seconds(NODES, 7e9, kind="gather") == pytest.approx(7e9 / 200e9, rel=0.01)
    assert seconds(NODES, 7e9, kind="gather", world=4) == INSIDE.seconds(7e9)


@pytest.mark.parametrize("name", ["zigzag", "llama3", "usp"])
def test_a_transfer_names_the_ranks_that_all_its_bytes_come_from(name):
    problem = VARIANTS[name].problem((0, 512), 4, CAUSAL)
    for rank in range(4):
        passes = dry_run(VARIANTS[name], problem, SHAPES, rank=rank, pulls=True, backward=True)
        moved = [e.transfer for x in passes for e in x.events if e.kind == "pull"]
        assert moved or rank == 0
        for transfer in moved:
            assert sum(size for _, size in transfer.sources) == transfer.bytes
            assert rank not in dict(transfer.sources)
