"""The table of measured rates."""

from runner.costs.rates import CallClass, Rate, renewed

GPU = "NVIDIA Test 1"
CAUSAL_128 = CallClass(128, "gqa", "causal", "dense", "long")


def rate(kernel, forward, backward, call=CAUSAL_128, gpu=GPU):
    return Rate(gpu, call, kernel, forward, backward, "torch=1")


TABLE = [rate("sdpa_cudnn", 600, 500), rate("flash2", 300, 300), rate("flash4", 650, 400)]


def test_a_class_measured_again_is_replaced_as_a_whole():
    other = rate("math", 1, 1, CallClass(64, "mha", "full", "dense", "long"))
    table = renewed([*TABLE, other], [rate("flash2", 1, 1)])
    assert sorted(table, key=repr) == sorted([other, rate("flash2", 1, 1)], key=repr)
    assert rate("flash4", 1, 1, gpu="another") in renewed([rate("flash4", 1, 1, gpu="another")], TABLE)
