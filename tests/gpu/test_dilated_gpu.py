"""Dilated attention on GPUs, in bf16, against its dense definition in fp64."""

import pytest

from tests.support.cases import assert_right
from tests.support.gpus import need_one
from tests.worlds.test_dilated import NAMES, WAYS, case

pytestmark = [pytest.mark.gpu, need_one]
SIZES = {
    "segments": [128, 256, 512],
    "rates": [1, 2, 4],
    "tokens": 1024,
    "head_dim": 64,
    "dtype": "bf16",
    "kernel": "auto",
}


def cases(name, world):
    heads = {"heads": 8, "kv_heads": 8}
    forms = [(way, more) for way in WAYS for more in (heads, {"heads": 8, "head_dim": 128})]
    forms.append((WAYS[1], heads | {"sinks": "bf16", "gradients": "qkvs"}))
    if world == 1:  # a shorter last segment; two sequences
        forms += [
            (WAYS[0], {"tokens": 1000, "heads": 6, "batch": 2}),
            (WAYS[1], {"kv_heads": 4, "lengths": (512, 512)}),
        ]
    return [case(name, world, way, **SIZES | more) for way, more in forms]


@pytest.mark.parametrize(("name", "world"), [*((name, 1) for name in NAMES), ("ring_dilated", 2), ("ring_dilated", 4)])
def test_dilated_is_its_definition(pool, name, world):
    assert_right(pool, cases(name, world), "cuda")
