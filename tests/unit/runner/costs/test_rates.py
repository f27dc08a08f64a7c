"""The table of measured rates."""

import random

from attention.kernels import KERNELS
from runner.costs import rates
from runner.costs.rates import CallClass, Rate, parse, render, renewed

GPU = "NVIDIA Test 1"
CAUSAL_128 = CallClass(128, "gqa", "causal", "dense", "long")


def rate(kernel: str, forward: float, backward: float, call: CallClass = CAUSAL_128, gpu: str = GPU) -> Rate:
    return Rate(gpu, call, kernel, forward, backward, "torch=1")


TABLE = [rate("sdpa_cudnn", 600, 500), rate("flash2", 300, 300), rate("flash4", 650, 400)]


def test_a_table_is_read_as_it_was_written():
    calls = [
        CallClass(d, h, m, "packed", "short") for d in (64, 128) for h in ("gqa", "mha") for m in ("full", "window")
    ]
    table = [rate(name, f, 2 * f, call) for call in calls for name, f in (("flash2", 12.5), ("math", 0.125))]
    random.Random(0).shuffle(table)
    assert sorted(parse(render(table)), key=repr) == sorted(table, key=repr)
    assert render(parse(render(table))) == render(table)


def test_the_packages_own_table_is_one_with_known_kernels_only():
    assert {r.kernel for r in rates.table()} <= set(KERNELS)


def test_a_class_measured_again_is_replaced_as_a_whole():
    other = rate("math", 1, 1, CallClass(64, "mha", "full", "dense", "long"))
    table = renewed([*TABLE, other], [rate("flash2", 1, 1)])
    assert sorted(table, key=repr) == sorted([other, rate("flash2", 1, 1)], key=repr)
    assert rate("flash4", 1, 1, gpu="another") in renewed([rate("flash4", 1, 1, gpu="another")], TABLE)
