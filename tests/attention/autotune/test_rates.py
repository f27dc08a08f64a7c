"""The table of measured rates, and the order of kernels that follows."""

import random

import pytest
import torch

from attention import kernels
from attention.kernels import FASTEST, KERNELS, Shape, refusal, select
from attention.masks.band import CAUSAL, FULL, Band
from attention.measured import rates
from attention.measured.rates import CallClass, Rate, class_of, order, parse, render, renewed

GPU = "NVIDIA Test 1"
CAUSAL_128 = CallClass(128, "gqa", "causal", "dense", "long")


def rate(kernel: str, forward: float, backward: float, call: CallClass = CAUSAL_128, gpu: str = GPU) -> Rate:
    return Rate(gpu, call, kernel, forward, backward, "torch=1")


TABLE = [rate("sdpa_cudnn", 600, 500), rate("flash2", 300, 300), rate("flash4", 650, 400)]


def shape(head_dim=128, heads=8, kv_heads=2, packed=False, backward=True, tokens=None, device="cuda") -> Shape:
    return Shape(device, torch.bfloat16, heads, kv_heads, head_dim, packed, backward, tokens)


@pytest.fixture
def on_gpu(monkeypatch):
    """The choice on a GPU of that name with the table given, where every kernel works."""

    def set_up(table: list[Rate]) -> None:
        monkeypatch.setattr(kernels, "gpu_name", lambda: GPU)
        monkeypatch.setattr(rates, "table", lambda: tuple(table))
        for kernel in KERNELS.values():
            monkeypatch.setattr(kernel, "missing", lambda device: None)

    return set_up


def test_a_table_is_read_as_it_was_written():
    calls = [
        CallClass(d, h, m, "packed", "short") for d in (64, 128) for h in ("gqa", "mha") for m in ("full", "window")
    ]
    table = [rate(name, f, 2 * f, call) for call in calls for name, f in (("flash2", 12.5), ("math", 0.125))]
    random.Random(0).shuffle(table)
    assert sorted(parse(render(table)), key=repr) == sorted(table, key=repr)
    assert render(parse(render(table))) == render(table)
    assert parse("") == [] == parse(render([]))


def test_a_table_of_other_columns_or_impossible_rates_is_refused():
    with pytest.raises(ValueError, match=r"columns gpu, kernel: must be gpu, head_dim, .*; write it anew"):
        parse("gpu,kernel\n")
    with pytest.raises(ValueError, match=r"flash2, dense causal gqa D128 long: 0\.0 and 1\.0 TFLOP/s: must be above 0"):
        parse(render([rate("flash2", 0.5, 1)]).replace("0.5", "0"))


def test_the_packages_own_table_is_one_with_known_kernels_only():
    assert {r.kernel for r in rates.table()} <= set(KERNELS)


def test_kernels_are_ordered_by_forward_alone_or_with_backward():
    assert order(TABLE, GPU, CAUSAL_128, backward=False) == ["flash4", "sdpa_cudnn", "flash2"]
    assert order(TABLE, GPU, CAUSAL_128, backward=True) == ["sdpa_cudnn", "flash4", "flash2"]


def test_another_gpu_or_class_has_no_order():
    assert order(TABLE, "another", CAUSAL_128, True) == []
    for other in (
        CallClass(128, "mha", "causal", "dense", "long"),
        CallClass(128, "gqa", "full", "dense", "long"),
        CallClass(128, "gqa", "causal", "packed", "long"),
        CallClass(128, "gqa", "causal", "dense", "short"),
        CallClass(256, "gqa", "causal", "dense", "long"),
    ):
        assert order(TABLE, GPU, other, True) == []


def test_a_head_dim_between_takes_the_next_larger_class():
    table = [*TABLE, rate("flash2", 1, 1, CallClass(64, "gqa", "causal", "dense", "long"))]
    call = CallClass(80, "gqa", "causal", "dense", "long")
    assert order(table, GPU, call, True) == order(table, GPU, CAUSAL_128, True) == ["sdpa_cudnn", "flash4", "flash2"]


def test_a_class_measured_again_is_replaced_as_a_whole():
    other = rate("math", 1, 1, CallClass(64, "mha", "full", "dense", "long"))
    table = renewed([*TABLE, other], [rate("flash2", 1, 1)])
    assert sorted(table, key=repr) == sorted([other, rate("flash2", 1, 1)], key=repr)
    assert rate("flash4", 1, 1, gpu="another") in renewed([rate("flash4", 1, 1, gpu="another")], TABLE)


def test_a_class_is_read_off_the_shape_and_the_hardest_mask():
    assert class_of(shape(), (FULL, CAUSAL)) == CAUSAL_128
    assert class_of(shape(), (FULL,)).mask == "full"
    assert class_of(shape(), (FULL, CAUSAL, Band(3, 0))).mask == "window"
    assert class_of(shape(kv_heads=8), (FULL,)).heads == "mha"
    assert class_of(shape(packed=True), (FULL,)).layout == "packed"
    assert [class_of(shape(tokens=n), (FULL,)).length for n in (4095, 4096, None)] == ["short", "long", "long"]
    assert class_of(Shape("cuda", torch.float32, 8, 2, 128), (FULL,)) is None


def test_auto_takes_the_fastest_measured_kernel_that_does_the_call(on_gpu):
    on_gpu(TABLE)
    assert select("auto", shape(), (CAUSAL,)).name == "sdpa_cudnn"
    assert select("auto", shape(backward=False), (CAUSAL,)).name == "flash4"
    windows = CallClass(128, "gqa", "window", "dense", "long")
    on_gpu([rate("sdpa_cudnn", 9, 9, windows), rate("flash2", 8, 8, windows), rate("flash4", 7, 7, windows)])
    assert select("auto", shape(), (Band(64, 0),)).name == "flash2"


def test_auto_falls_back_to_the_fixed_order_where_nothing_was_measured(on_gpu):
    on_gpu(TABLE)
    call = shape(kv_heads=8)
    assert kernels.preference(call, (CAUSAL,)) == FASTEST["cuda"]
    assert select("auto", call, (CAUSAL,)).name == "flash4"
    on_gpu([])
    assert kernels.preference(shape(), (CAUSAL,)) == FASTEST["cuda"]


def test_auto_never_takes_a_kernel_outside_its_choice_nor_cudnn_for_packed_batches(on_gpu):
    packs = CallClass(128, "gqa", "causal", "packed", "long")
    on_gpu([rate("flex", 9, 9), rate("flash2", 1, 1), rate("sdpa_cudnn", 9, 9, packs), rate("flash2", 1, 1, packs)])
    assert select("auto", shape(), (CAUSAL,)).name == "flash2"
    assert select("auto", shape(packed=True), (CAUSAL,)).name == "flash2"


def test_auto_says_why_it_passed_over_faster_kernels(on_gpu, monkeypatch):
    on_gpu(TABLE)
    assert kernels.passed_over("sdpa_cudnn", shape(), (CAUSAL,)) == {}  # the fastest measured
    monkeypatch.setattr(KERNELS["sdpa_cudnn"], "missing", lambda device: "no cuDNN here")
    monkeypatch.setattr(KERNELS["flash4"], "refuses", lambda shape, mask: "not today" if mask == CAUSAL else None)
    taken = select("auto", shape(), (FULL, CAUSAL)).name
    found = kernels.passed_over(taken, shape(), (FULL, CAUSAL))
    assert list(found.items())[:2] == [("sdpa_cudnn", "no cuDNN here"), ("flash4", "not today")]
    assert taken not in found
    assert kernels.passed_over("flex", shape(), (CAUSAL,)) == {}  # which auto never takes


def test_cudnn_is_passed_over_for_packed_batches(on_gpu):
    on_gpu([])
    reasons = kernels.passed_over("flash2", shape(packed=True), (FULL,))
    assert "slower than a kernel that takes packed batches" in reasons["sdpa_cudnn"]


def test_a_decode_tries_its_own_kernel_first(on_gpu):
    on_gpu(TABLE)
    assert kernels.preference(shape(backward=False), (FULL,), decode=True)[0] == "decode"


def test_the_choice_of_a_cpu_is_fixed():
    assert kernels.preference(shape(device="cpu"), (CAUSAL,)) == FASTEST["cpu"]
    assert refusal(select("auto", shape(device="cpu"), (CAUSAL,)), shape(device="cpu"), CAUSAL) is None
