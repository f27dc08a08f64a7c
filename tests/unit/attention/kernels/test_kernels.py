"""The kernels of a CPU against plain fp64 attention, and the choice among all kernels."""

import random
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
MASKS = [FULL, CAUSAL, Band(7, 0), Band(0, 0), Band(5, 9), Band(-1, 4), Band(6, -1), Band(40, 45)]
HEADS = [(4, 4, 64), (16, 2, 80), (5, 1, 96), (8, 1, 128)]  # (heads, KV heads, head dim)
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
@every_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
@every_mask
def test_a_kernel_matches_plain_attention(name, dtype, heads, mask):
    for sizes in SIZES:
        assert_matches(KERNELS[name], *inputs(call_of(mask, heads[2] ** -0.5), sizes, *heads, dtype))


@every_kernel
@every_dtype
@every_mask
def test_a_kernel_keeps_the_sequences_of_a_packed_batch_apart(name, dtype, mask):
    assert_matches(KERNELS[name], *inputs(call_of(mask, 0.2), PACK, 6, 2, 64, dtype))


@every_kernel
def test_the_scale_is_the_calls_own(name):
    for scale in (0.01, 1.0, 3.0):
        assert_matches(KERNELS[name], *inputs(call_of(CAUSAL, scale), (20, 30), 4, 2, 64, torch.float32))


@every_kernel
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (CAUSAL, [(1100, 1100), (700, 1300), (1300, 600)]),
        (Band(600, 0), [(700, 1300)]),
        (Band(30, 700), [(1300, 600)]),
        (Band(-1, 3), [(1100, 1100)]),
        (Band(20, 20), [(700, 1300)]),
    ],
    ids=lambda x: x.describe() if isinstance(x, Band) else "",
)
def test_a_kernel_matches_plain_attention_on_longer_sequences(name, mask, lengths):
    for sizes in lengths:
        assert_matches(KERNELS[name], *inputs(call_of(mask, 0.125), sizes, 2, 1, 32, torch.float32))


@every_mask
def test_math_in_small_chunks_of_queries_matches_plain_attention(mask, monkeypatch):
    monkeypatch.setattr(math_kernel, "SCORES", 2 * 4 * 33 * 5)
    for sizes in SIZES:
        assert_matches(KERNELS["math"], *inputs(call_of(mask, 0.1), sizes, 4, 2, 16, torch.float64))


@every_kernel
@every_dtype
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(7, 0), Band(3, 11)], ids=Band.describe)
def test_a_kernel_over_no_keys_gives_zero_and_minus_infinity(name, dtype, mask):
    for sizes in ((5, 0), (0, 5), ((3, 0, 2), (0, 4, 0))):
        q, k, v, dout, call = inputs(call_of(mask, 0.125), sizes, 4, 2, 64, dtype)
        out, lse = KERNELS[name].forward(q, k, v, call)
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == ((4, len(q)) if call.packed else (2, 4, q.shape[1])) and (lse == -torch.inf).all()
        for x, grad in zip((q, k, v), KERNELS[name].backward(dout, q, k, v, out, lse, call), strict=True):
            assert grad.shape == x.shape and (grad == 0).all()


@every_kernel
@every_dtype
@pytest.mark.parametrize("mask", [CAUSAL, Band(4, 0), Band(2, 3)], ids=Band.describe)
def test_rows_without_keys_have_no_output_and_no_gradient(name, dtype, mask):
    q, k, v, dout, call = inputs(call_of(mask, 0.125), (40, 12), 4, 2, 64, dtype)
    out, lse = KERNELS[name].forward(q, k, v, call)
    dq, dk, dv = KERNELS[name].backward(dout, q, k, v, out, lse, call)
    empty = 40 - 12 - mask.right
    assert (out[:, :empty] == 0).all() and (out[:, empty:] != 0).any((-1, -2)).all()
    assert (dq[:, :empty] == 0).all() and (dq[:, empty:] != 0).any()
    assert (lse[..., :empty] == -torch.inf).all() and lse[..., empty:].isfinite().all()
    assert dk.isfinite().all() and dv.isfinite().all()


@every_kernel
@every_dtype
@every_mask
def test_parts_over_split_keys_sum_to_the_whole_with_the_final_out_and_lse(name, dtype, mask):
    for seed, (sq, sk) in enumerate(((40, 40), (20, 60), (60, 20))):
        cuts = [0, *sorted(random.Random(seed).sample(range(1, sk), 3)), sk]
        q, k, v, dout, call = inputs(call_of(mask, 0.125), (sq, sk), 4, 2, 64, dtype)
        assert_split_matches(KERNELS[name], q, k, v, dout, call, cuts)


def strided(x: torch.Tensor) -> torch.Tensor:
    """NaNs in x's shape, in every other row of a larger tensor; the last dim contiguous unless it is an LSE's."""
    if x.dtype == torch.float32 and x.dim() == 2:
        return torch.full((*x.shape, 2), torch.nan, dtype=x.dtype)[..., 0]
    return torch.full((*x.shape[:-1], 2, x.shape[-1]), torch.nan, dtype=x.dtype)[..., 0, :]


@every_kernel
@pytest.mark.parametrize("sizes", [(30, 30), (40, 12), (5, 0), PACK], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(6, 2)], ids=Band.describe)
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


@every_kernel
def test_a_kernel_leaves_its_inputs_as_they_are(name):
    q, k, v, dout, call = inputs(call_of(Band(9, 3), 0.125), (20, 40), 4, 2, 64, torch.float32)
    out, lse = KERNELS[name].forward(q, k, v, call)
    given = (dout, q, k, v, out, lse)
    before = [x.clone() for x in given]
    KERNELS[name].forward(q, k, v, call)
    KERNELS[name].backward(*given, call)
    assert all(torch.equal(x, was) for x, was in zip(given, before, strict=True))


def shape(device="cpu", dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=64, packed=False) -> Shape:
    return Shape(device, dtype, heads, kv_heads, head_dim, packed)


def test_auto_on_a_cpu_is_its_flash_attention():
    for dtype in TOLERANCES:
        for packed in (False, True):
            assert select("auto", shape(dtype=dtype, packed=packed), (FULL, CAUSAL, Band(5, 3))).name == "sdpa_flash"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=kernels.name_of)
def test_auto_takes_a_kernel_that_does_every_mask(device, dtype):
    for head_dim in (20, 64, 80, 256, 512):
        for masks in ((FULL,), (FULL, CAUSAL), (CAUSAL, Band(64, 0))):
            call = shape(device, dtype, head_dim=head_dim)
            assert not any(refusal(select("auto", call, masks), call, mask) for mask in masks)


def test_a_kernel_asked_for_by_name_is_that_kernel():
    for name in ON_CPU:
        assert select(name, shape(), (FULL, CAUSAL, Band(5, 3))) is KERNELS[name]
    assert kernels.names() == ["auto", *KERNELS]


def test_an_unknown_kernel_is_refused_with_the_nearest_or_all():
    with pytest.raises(ValueError, match=r"kernel='sdpa_flsh' is not a kernel; did you mean .*sdpa_flash"):
        select("sdpa_flsh", shape(), (FULL,))
    with pytest.raises(ValueError) as error:
        select("?", shape(), (FULL,))
    assert all(name in str(error.value) for name in kernels.names())
    with pytest.raises(ValueError, match="it is gone; use cudnn_flex or flash4"):
        select("cudnn_block_sparse", shape(), (FULL,))


REFUSED = [
    ("flash2", shape(), FULL, "needs a CUDA GPU"),
    ("sdpa_cudnn", shape(), Band(5, 0), "needs a CUDA GPU"),
    ("sdpa_efficient", shape("cuda"), Band(5, 0), r"window=\(5, 0\): no sliding window"),
    ("flash2", shape("cuda", torch.float32), CAUSAL, "dtype=fp32: bf16 and fp16 only"),
    ("flash3", shape(), FULL, "needs a CUDA GPU"),
    ("flash4", shape(), FULL, "needs a CUDA GPU"),
    ("xformers", shape(), Band(5, 0), "needs a CUDA GPU"),
    ("flex", shape(), CAUSAL, "needs a CUDA GPU: PyTorch has no backward of it on a CPU"),
    ("flex", shape("cuda", torch.float32), FULL, "dtype=fp32: bf16 and fp16 only"),
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


def test_one_mask_that_a_kernel_lacks_is_enough_to_refuse():
    with pytest.raises(UnsupportedCall, match=r"window=\(64, 0\)"):
        select("sdpa_efficient", shape("cuda"), (FULL, CAUSAL, Band(64, 0)))


def test_cudnn_has_no_window_and_no_wide_dtypes():
    cudnn = KERNELS["sdpa_cudnn"]
    assert cudnn.refuses(shape("cuda"), Band(5, 0)) == "window=(5, 0): no sliding window"
    assert cudnn.refuses(shape("cuda", torch.float32), CAUSAL) == "dtype=fp32: bf16 and fp16 only"
    assert cudnn.refuses(shape("cuda"), CAUSAL) is None


def test_a_shape_is_read_off_the_tensors():
    q, k = normal(2, 5, 8, 64, dtype=torch.bfloat16, seed=0), normal(2, 7, 2, 64, dtype=torch.bfloat16, seed=1)
    assert Shape.of(q, k, k) == Shape("cpu", torch.bfloat16, 8, 2, 64, packed=False, backward=False, tokens=5)
    assert Shape.of(q[0].requires_grad_(), k[0], k[0]) == Shape(
        "cpu", torch.bfloat16, 8, 2, 64, packed=True, backward=True, tokens=5
    )


def test_a_packed_call_carries_its_cumulated_lengths():
    call = Call(1.0).of_packed(CAUSAL, (3, 0, 4), (1, 5, 2), torch.device("cpu"))
    assert call.packed and (call.max_q, call.max_k) == (4, 5)
    assert call.cu_q.tolist() == [0, 3, 3, 7] and call.cu_k.tolist() == [0, 1, 6, 8]
    assert call.cu_q.dtype == call.cu_k.dtype == torch.int32
    assert not Call(1.0).packed


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
