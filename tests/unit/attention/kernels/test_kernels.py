"""The kernels of a CPU against plain fp64 attention, and the choice among all kernels."""

import threading

import pytest
import torch

from attention import kernels
from attention.kernels import KERNELS, Call, Shape, UnsupportedCall, aten, refusal, select
from attention.kernels import math as math_kernel
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import TOLERANCES, assert_matches, assert_split_matches, inputs, normal

torch.set_num_threads(1)

ON_CPU = ["math", "sdpa_flash"]  # our Triton kernels, under the interpreter, have tests of their own
MASKS = [FULL, CAUSAL, Band(7, 0), Band(0, 0), Band(5, 9), Band(-1, 4), Band(6, -1)]
SIZES = [(33, 33), (17, 50), (50, 17), (1, 21), (21, 1)]
PACK = ((1, 19, 8, 4, 0, 1), (1, 7, 23, 0, 5, 12))

every_kernel = pytest.mark.parametrize("name", ON_CPU)
every_mask = pytest.mark.parametrize("mask", MASKS, ids=Band.describe)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=kernels.name_of)


def call_of(mask: Band, scale: float):
    def make(q_lengths=None, k_lengths=None) -> Call:
        if q_lengths is None:
            return Call(scale, mask)
        return Call(scale).of_packed(mask, q_lengths, k_lengths, torch.device("cpu"))

    return make


@every_kernel
@every_mask
def test_a_kernel_matches_plain_attention_and_leaves_its_inputs(name, mask):
    for sizes in (*SIZES, PACK):
        case = inputs(call_of(mask, 0.2), sizes, 6, 2, 80, torch.float32)
        before = [x.clone() for x in case[:4]]
        assert_matches(KERNELS[name], *case)
        assert all(map(torch.equal, case, before))


@every_kernel
@every_dtype
@pytest.mark.parametrize("heads", [(4, 4, 64), (5, 1, 96)], ids=str)  # heads, KV heads, head dim
def test_a_kernel_matches_plain_attention_in_every_dtype(name, dtype, heads):
    for sizes in ((33, 33), (50, 17)):
        assert_matches(KERNELS[name], *inputs(call_of(CAUSAL, heads[2] ** -0.5), sizes, *heads, dtype))


@every_kernel
@pytest.mark.parametrize(
    ("mask", "sizes"), [(CAUSAL, (700, 1300)), (Band(600, 0), (700, 1300)), (Band(30, 700), (1300, 600))], ids=str
)
def test_a_kernel_matches_plain_attention_on_longer_sequences(name, mask, sizes):
    assert_matches(KERNELS[name], *inputs(call_of(mask, 0.125), sizes, 2, 1, 32, torch.float32))


def test_math_in_small_chunks_of_queries_matches_plain_attention(monkeypatch):
    monkeypatch.setattr(math_kernel, "SCORES", 2 * 4 * 33 * 5)
    for mask in MASKS:
        assert_matches(KERNELS["math"], *inputs(call_of(mask, 0.1), (33, 50), 4, 2, 16, torch.float64))


@every_kernel
@pytest.mark.parametrize("mask", [FULL, Band(3, 11)], ids=Band.describe)
def test_a_kernel_over_no_keys_gives_zero_and_minus_infinity(name, mask):
    for sizes in ((5, 0), (0, 5), ((3, 0, 2), (0, 4, 0))):
        q, k, v, dout, call = inputs(call_of(mask, 0.125), sizes, 4, 2, 64, torch.bfloat16)
        out, lse = KERNELS[name].forward(q, k, v, call)
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == ((4, len(q)) if call.packed else (2, 4, q.shape[1])) and (lse == -torch.inf).all()
        for x, grad in zip((q, k, v), KERNELS[name].backward(dout, q, k, v, out, lse, call), strict=True):
            assert grad.shape == x.shape and (grad == 0).all()


@every_kernel
@every_mask
def test_parts_over_split_keys_sum_to_the_whole_with_the_final_out_and_lse(name, mask):
    for sizes, cuts in (((20, 60), [0, 13, 40, 60]), ((60, 20), [0, 3, 11, 20])):
        case = inputs(call_of(mask, 0.125), sizes, 4, 2, 64, torch.float32)
        assert_split_matches(KERNELS[name], *case, cuts)


def strided(x: torch.Tensor) -> torch.Tensor:
    """NaNs in x's shape, in every other row of a larger tensor; the last dim contiguous unless it is an LSE's."""
    if x.dtype == torch.float32 and x.dim() == 2:
        return torch.full((*x.shape, 2), torch.nan, dtype=x.dtype)[..., 0]
    return torch.full((*x.shape[:-1], 2, x.shape[-1]), torch.nan, dtype=x.dtype)[..., 0, :]


@every_kernel
@pytest.mark.parametrize("sizes", [(40, 12), (5, 0), PACK], ids=str)
@pytest.mark.parametrize("mask", [FULL, Band(6, 2)], ids=Band.describe)
def test_results_are_written_into_the_tensors_given(name, sizes, mask):
    q, k, v, dout, call = inputs(call_of(mask, 0.125), sizes, 4, 2, 32, torch.float32)
    result = KERNELS[name].forward(q, k, v, call)
    grads = KERNELS[name].backward(dout, q, k, v, *result, call)
    into, into_grads = tuple(map(strided, result)), tuple(map(strided, grads))
    given = KERNELS[name].forward(q, k, v, call, into=into)
    given_grads = KERNELS[name].backward(dout, q, k, v, *result, call, into=into_grads)
    for x, target, expected in zip((*given, *given_grads), (*into, *into_grads), (*result, *grads), strict=True):
        assert x is target
        assert torch.equal(x, expected)


def shape(device="cpu", dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=64, packed=False) -> Shape:
    return Shape(device, dtype, heads, kv_heads, head_dim, packed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=kernels.name_of)
def test_auto_takes_a_kernel_that_does_every_mask(device, dtype):
    for head_dim in (20, 80, 512):
        for masks in ((FULL,), (FULL, CAUSAL), (CAUSAL, Band(64, 0))):
            call = shape(device, dtype, head_dim=head_dim)
            assert not any(refusal(select("auto", call, masks), call, mask) for mask in masks)


@pytest.mark.parametrize(
    "name, message",
    [
        ("sdpa_flsh", "kernel='sdpa_flsh' is not a kernel; did you mean .*sdpa_flash"),
        ("?", "sdpa_flash.*triton"),
        ("cudnn_block_sparse", "it is gone; use cudnn_flex or flash4"),
    ],
)
def test_an_unknown_kernel_is_refused_with_the_nearest_or_all(name, message):
    with pytest.raises(ValueError, match=message):
        select(name, shape(), (FULL,))


REFUSED = [
    ("flash2", shape(), FULL, "needs a CUDA GPU"),
    ("sdpa_efficient", shape("cuda"), Band(5, 0), r"window=\(5, 0\): no sliding window"),
    ("flash2", shape("cuda", torch.float32), CAUSAL, "dtype=fp32: bf16 and fp16 only"),
    ("flash3", shape(), FULL, "needs a CUDA GPU"),
    ("flex", shape(), CAUSAL, "needs a CUDA GPU: PyTorch has no backward of it on a CPU"),
    ("flex", shape("cuda", head_dim=72), FULL, "head_dim=72: multiples of 16 up to 256 only"),
    ("flash2", shape("cuda", head_dim=264), CAUSAL, "head_dim=264: multiples of 8 up to 256 only"),
    ("sdpa_flash", shape("cuda", head_dim=20), CAUSAL, "head_dim=20: multiples of 8 up to 256 only"),
    ("sdpa_flash", shape(dtype=torch.int32), FULL, "dtype=torch.int32: bf16, fp16, fp32 and fp64 only"),
]


@pytest.mark.parametrize("name, call, mask, rule", REFUSED)
def test_an_unsupported_call_is_refused_with_exactly_the_kernels_that_can(name, call, mask, rule):
    with pytest.raises(UnsupportedCall, match=f"^kernel={name}: {rule}; kernels that can: ") as error:
        select(name, call, (FULL, mask))
    offers = set(str(error.value).split("kernels that can: ")[1].split(", "))
    assert offers == {k for k, kernel in KERNELS.items() if not refusal(kernel, call, mask)} - {name} != set()
    for offer in offers:
        assert select(offer, call, (FULL, mask)).name == offer


def test_a_shape_is_read_off_the_tensors():
    q, k = normal(2, 5, 8, 64, dtype=torch.bfloat16, seed=0), normal(2, 7, 2, 64, dtype=torch.bfloat16, seed=1)
    assert Shape.of(q, k, k) == Shape("cpu", torch.bfloat16, 8, 2, 64, packed=False, backward=False, tokens=5)
    assert Shape.of(q[0].requires_grad_(), k[0], k[0]) == Shape(
        "cpu", torch.bfloat16, 8, 2, 64, packed=True, backward=True, tokens=5
    )


def test_the_deterministic_switch_is_one_threads_at_a_time():
    on = []

    def other():
        with aten._deterministic(True):
            on.append(torch.are_deterministic_algorithms_enabled())

    with aten._deterministic(True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and torch.are_deterministic_algorithms_enabled()
    thread.join(10)
    assert on == [True] and not torch.are_deterministic_algorithms_enabled()
