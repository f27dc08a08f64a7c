"""Dilated attention on GPUs, in bf16, against its dense definition in fp64."""

import pytest

from tests.jobs import dilated
from tests.support.gpus import need_one, worlds
from tests.worlds.test_dilated import NAMES, WAYS, assert_right, case

pytestmark = [pytest.mark.gpu, need_one]
SIZES = {
    "tokens": 1024,
    "segments": [128, 256, 512],
    "rates": [1, 2, 4],
    "dtype": "bf16",
    "kernel": "auto",
    "device": "cuda",
}


def cases(name, world=1):
    found = [
        case(name, way, **SIZES, heads=heads, dims=(d, d)) for way in WAYS for heads, d in (((8, 8), 64), ((8, 2), 128))
    ]
    if world == 1:  # a shorter last segment; two sequences
        found.append(case(name, WAYS[0], **SIZES | {"tokens": 1000}, heads=(6, 2), dims=(64, 64), batch=2))
        found.append(case(name, WAYS[1], **SIZES, heads=(4, 4), dims=(64, 64), cu_seqlens=[0, 512, 1024]))
    return found + [case(name, WAYS[1], **SIZES, heads=(8, 8), dims=(64, 64), sinks=True)]


@pytest.mark.parametrize("name", NAMES)
def test_dilated_is_its_definition(name):
    every = cases(name)
    assert_right(every, dilated.compare(None, every), 2e-2)


@pytest.mark.parametrize("world", worlds(2, 4))
def test_ring_dilated_is_its_definition(in_world, world):
    every = cases("ring_dilated", world)
    assert_right(every, in_world(dilated.compare, world, "cuda", cases=every), 2e-2)
