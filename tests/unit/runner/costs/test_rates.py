"""The table of measured rates."""

from runner.costs.rates import CallClass, Rate, renewed

CAUSAL_128 = CallClass(128, "gqa", "causal", "dense", "long")


def rate(kernel, forward, backward, call=CAUSAL_128, gpu="NVIDIA Test 1"):
    return Rate(gpu, call, kernel, forward, backward, "torch=1")


def test_a_class_measured_again_is_replaced_as_a_whole():
    other, apart = (
        rate("math", 1, 1, CallClass(64, "mha", "full", "dense", "long")),
        rate("flash4", 1, 1, gpu="another"),
    )
    again = rate("flash2", 1, 1)
    table = renewed([rate("sdpa_cudnn", 600, 500), rate("flash2", 300, 300), other, apart], [again])
    assert sorted(table, key=repr) == sorted([other, again, apart], key=repr)
