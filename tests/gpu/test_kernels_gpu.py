"""The kernels of a GPU against plain fp64 attention, and the merge kernel against the eager one."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from attention.kernels import KERNELS, Call, Kernel, Shape, UnsupportedCall, name_of, refusal, select
from attention.masks.band import CAUSAL, FULL, Band
from attention.reduction.parts import merge, merge_eager
from tests.support.naive import assert_matches, assert_split_matches, inputs, merge_case
from tests.support.strides import STRIDES, WRITABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("without_tf32"),
]

MASKS = [FULL, CAUSAL, Band(128, 0), Band(0, 0), Band(100, 50), Band(-1, 64), Band(64, -1)]
PACK = ((1, 300, 129, 512), (1, 512, 129, 700))
FLEX = {FULL, CAUSAL, Band(100, 50)}  # it compiles for seconds a shape, so a few speak for all

every_kernel = pytest.mark.parametrize("name", KERNELS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name_of)
every_mask = pytest.mark.parametrize("mask", MASKS, ids=Band.describe)


@pytest.fixture
def without_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def case(mask: Band, sizes, dtype: torch.dtype, head_dim: int = 64, scale: float = 0.125):
    """(q, k, v, dout, call) on the GPU, 8 heads over 2 KV heads."""

    def call_of(q_lengths=None, k_lengths=None) -> Call:
        if q_lengths is None:
            return Call(scale, mask)
        return Call(scale).of_packed(mask, q_lengths, k_lengths, torch.device("cuda"))

    return inputs(call_of, sizes, 8, 2, head_dim, dtype, "cuda")


def able(name: str, q, k, *masks: Band) -> Kernel:
    """The kernel, or a skip when it does not do such a call here."""
    if name == "flex" and (q.dtype != torch.bfloat16 or q.shape[-1] not in (64, 128) or not FLEX.issuperset(masks)):
        pytest.skip("flex: compiled for a few shapes only")
    for mask in masks:
        reason = refusal(KERNELS[name], Shape.of(q, k, k, backward=True), mask)
        if reason:
            pytest.skip(f"{name}: {reason}")
    return KERNELS[name]


@every_kernel
@every_dtype
@every_mask
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_kernel_matches_plain_attention(name, dtype, mask, head_dim):
    for sizes in ((512, 512), (515, 1021)):
        q, k, v, dout, call = case(mask, sizes, dtype, head_dim, head_dim**-0.5)
        assert_matches(able(name, q, k, mask), q, k, v, dout, call)


@every_kernel
@every_dtype
@every_mask
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_kernel_keeps_the_sequences_of_a_packed_batch_apart(name, dtype, mask, head_dim):
    q, k, v, dout, call = case(mask, PACK, dtype, head_dim)
    assert_matches(able(name, q, k, mask), q, k, v, dout, call)


@every_kernel
@every_dtype
@pytest.mark.parametrize("mask", [FULL, Band(700, 600), Band(-1, 520), Band(10, 1000)], ids=Band.describe)
def test_more_queries_than_keys_match_plain_attention(name, dtype, mask):
    q, k, v, dout, call = case(mask, (1024, 512), dtype)
    assert_matches(able(name, q, k, mask), q, k, v, dout, call)


@every_kernel
@every_dtype
@pytest.mark.parametrize("mask", [CAUSAL, Band(128, 0), Band(100, 50)], ids=Band.describe)
def test_rows_without_keys_have_no_output_and_no_gradient(name, dtype, mask):
    q, k, v, dout, call = case(mask, (1000, 600), dtype)
    kernel = able(name, q, k, mask)
    out, lse = kernel.forward(q, k, v, call)
    dq, *_ = kernel.backward(dout, q, k, v, out, lse, call)
    empty = 1000 - 600 - mask.right
    assert (out[:, :empty] == 0).all() and (dq[:, :empty] == 0).all()
    assert (lse[..., :empty] == -torch.inf).all() and lse[..., empty:].isfinite().all()
    assert_matches(kernel, q, k, v, dout, call)


@every_kernel
@every_dtype
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(50, 0)], ids=Band.describe)
def test_sequences_of_a_packed_batch_without_queries_or_keys_match_plain_attention(name, dtype, mask):
    q, k, v, dout, call = case(mask, ((0, 40, 200, 3), (5, 0, 128, 7)), dtype)
    assert_matches(able(name, q, k, mask), q, k, v, dout, call)


@every_kernel
@every_dtype
@every_mask
def test_parts_over_split_keys_sum_to_the_whole_with_the_final_out_and_lse(name, dtype, mask):
    """The parts are views of the whole, as the ring's are."""
    for sizes, cuts in (((768, 768), [0, 256, 300, 768]), ((512, 1000), [0, 1, 488, 744, 1000])):
        q, k, v, dout, call = case(mask, sizes, dtype)
        try:
            assert_split_matches(able(name, q, k, mask), q, k, v, dout, call, cuts)
        except UnsupportedCall as error:  # a part of a causal mask can be a window
            pytest.skip(str(error))


@every_kernel
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=Band.describe)
def test_head_dim_256_matches_plain_attention(name, mask):
    q, k, v, dout, call = case(mask, (300, 515), torch.bfloat16, 256, 256**-0.5)
    if name == "flex":
        pytest.skip("flex: compiled for a few shapes only")
    assert_matches(able(name, q, k, mask), q, k, v, dout, call)


@every_kernel
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(100, 50)], ids=Band.describe)
@pytest.mark.parametrize("sizes", [(512, 512), (600, 300), PACK], ids=str)
def test_results_are_written_into_the_tensors_given(name, mask, sizes):
    """Into views of larger tensors: heads of a group, and tokens in the middle."""
    q, k, v, dout, call = case(mask, sizes, torch.bfloat16)
    kernel = able(name, q, k, mask)
    expected = kernel.forward(q, k, v, call)
    into = (
        within(expected[0]),
        torch.full((*expected[1].shape[:-1], expected[1].shape[-1] + 3), torch.nan, device="cuda"),
    )
    into = into[0], into[1][..., 2:-1]
    result = kernel.forward(q, k, v, call, into=into)
    into_grads = within(q), within(k), within(v)
    grads = kernel.backward(dout, q, k, v, *result, call)
    given = kernel.backward(dout, q, k, v, *result, call, into=into_grads)
    for x, target, value in zip((*result, *given), (*into, *into_grads), (*expected, *grads), strict=True):
        assert x is target
        torch.testing.assert_close(x, value, rtol=2e-2, atol=2e-3)


def within(x: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = x.shape[-3:]
    larger = torch.full((*x.shape[:-3], tokens + 5, heads + 2, head_dim), torch.nan, dtype=x.dtype, device=x.device)
    return larger[..., 3:-2, 1:-1, :]


@every_kernel
@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("sizes", [(300, 515), PACK], ids=str)
def test_a_kernel_takes_and_writes_tensors_of_any_strides(name, how, sizes):
    *tensors, call = case(CAUSAL, sizes, torch.bfloat16)
    kernel = able(name, tensors[0], tensors[1], CAUSAL)
    every = [[STRIDES[how](x) if i == j else x for j, x in enumerate(tensors)] for i in range(4)]
    for given in (*every, [STRIDES[how](x) for x in tensors]):
        assert_matches(kernel, *given, call)
    if how in WRITABLE:
        q, k, v, dout = tensors
        out, lse = kernel.forward(q, k, v, call)
        into = STRIDES[how](torch.full_like(out, torch.nan)), torch.full_like(lse, torch.nan)
        assert torch.equal(kernel.forward(q, k, v, call, into=into)[0], out)
        grads = kernel.backward(dout, q, k, v, out, lse, call)
        into_grads = tuple(STRIDES[how](torch.full_like(x, torch.nan)) for x in grads)
        found = kernel.backward(dout, q, k, v, STRIDES[how](out), lse, call, into=into_grads)
        for x, target, exact in zip(found, into_grads, grads, strict=True):
            assert x is target
            torch.testing.assert_close(x, exact, rtol=2e-2, atol=2e-3)


def test_xformers_works_wherever_it_is_installed():
    if importlib.util.find_spec("xformers") is None:
        pytest.skip("xformers is not installed")
    assert KERNELS["xformers"].missing("cuda") is None


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4", "sdpa_flash"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(100, 50)], ids=Band.describe)
def test_a_deterministic_backward_repeats_itself(name, packed, mask):
    q, k, v, dout, call = case(mask, PACK if packed else (1100, 1100), torch.bfloat16)
    kernel, call = able(name, q, k, mask), replace(call, deterministic=True)
    result = kernel.forward(q, k, v, call)
    first = kernel.backward(dout, q, k, v, *result, call)
    for _ in range(3):
        assert all(map(torch.equal, kernel.backward(dout, q, k, v, *result, call), first))
    assert_matches(kernel, q, k, v, dout, call)


@every_dtype
@pytest.mark.parametrize("packed", [False, True])
@every_mask
def test_auto_takes_a_kernel_that_matches_plain_attention(dtype, packed, mask):
    q, k, v, dout, call = case(mask, PACK if packed else (512, 700), dtype)
    kernel = select("auto", Shape.of(q, k, k), (mask,))
    assert refusal(kernel, Shape.of(q, k, k), mask) is None
    assert_matches(kernel, q, k, v, dout, call)


def test_cudnn_refuses_a_window_naming_those_that_can():
    shape = Shape("cuda", torch.bfloat16, 8, 2, 64)
    if KERNELS["sdpa_cudnn"].missing("cuda"):
        pytest.skip("this PyTorch has no cuDNN")
    with pytest.raises(UnsupportedCall, match=r"kernel=sdpa_cudnn: window=\(5, 0\): .* kernels that can: .*flash2"):
        select("sdpa_cudnn", shape, (CAUSAL, Band(5, 0)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rows", [(0, 50), (7, 45), (12, 13), (9, 9)], ids=str)
def test_the_merge_kernel_merges_as_eager_does(packed, heads_first, dtype, head_dim, rows):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    start, n = rows[0], rows[1] - rows[0]

    def narrowed(x, x_lse):
        return x.narrow(x.dim() - 3, start, n), x_lse.narrow(-1, start, n)

    results = []
    for how in (merge, merge_eager):
        out, lse, part, part_lse = merge_case(packed, heads_first, dtype, head_dim, "cuda", wide)
        other, other_lse = part.clone(), lse.clone()
        how(*narrowed(other, other_lse), *narrowed(out, lse), *narrowed(other, part_lse))
        how(*narrowed(out, lse), *narrowed(out, lse), *narrowed(part, part_lse))
        results.append((out, lse, other_lse))
        (merged, _), (rounded, _) = narrowed(out, lse), narrowed(other, lse)
        torch.testing.assert_close(rounded.to(wide), merged, rtol=torch.finfo(dtype).eps, atol=1e-6)
    tolerance = 1e-12 if wide == torch.float64 else 1e-6
    for x, expected in zip(*results, strict=True):
        assert not x.isnan().any()
        torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


PACKS = [
    ((512, 1, 300, 129), (700, 1, 512, 129)),
    ((1, 129, 512, 300), (700, 512, 129, 1)),
    ((512, 429, 1, 0), (700, 0, 640, 2)),
]


def test_flash4_takes_lengths_given_once_for_queries_and_keys_for_no_others():
    flash4 = KERNELS["flash4"]
    if flash4.missing("cuda"):
        pytest.skip(flash4.missing("cuda"))
    for q_lengths, k_lengths in [((300, 100, 112),) * 2, ((112, 300, 100), (100, 112, 300))]:
        q, k, v, dout, call = case(CAUSAL, (q_lengths, k_lengths), torch.bfloat16)
        once = replace(call, cu_k=call.cu_q) if q_lengths == k_lengths else call
        assert_matches(flash4, q, k, v, dout, once)


@pytest.mark.parametrize("lies", ("strided", "between", "cut"))
def test_a_backward_of_flash4_is_right_however_the_lse_lies(lies):
    flash4 = KERNELS["flash4"]
    if flash4.missing("cuda"):
        pytest.skip(flash4.missing("cuda"))
    q, k, v, dout, call = case(CAUSAL, (512, 511 if lies == "cut" else 512), torch.bfloat16)
    out, lse = flash4.forward(q, k, v, call)
    wanted = flash4.backward(dout, q, k, v, out, lse, call)
    if lies == "strided":
        lse = torch.empty((*lse.shape, 2), device="cuda")[..., 0].copy_(lse)
    elif lies == "between":
        lse = torch.empty(lse.numel() + 1, device="cuda")[1:].view(lse.shape).copy_(lse)
    found = flash4.backward(dout, q, k, v, out, lse, call)
    for x, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-3)


def test_flash4_copies_what_lies_between_and_does_many_short_sequences():
    flash4 = KERNELS["flash4"]
    if flash4.missing("cuda"):
        pytest.skip(flash4.missing("cuda"))
    q, k, v, dout, call = case(CAUSAL, (512, 512), torch.bfloat16)
    out, lse = flash4.forward(q, k, v, call)
    between = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    torch.testing.assert_close(flash4.forward(between, k, v, call)[0], out)
    wanted = flash4.backward(dout, q, k, v, out, lse, call)
    for x, expected in zip(
        flash4.backward(dout, q, k, v, out, lse, replace(call, deterministic=True)), wanted, strict=True
    ):
        torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-3)
    q, k, v, dout, call = case(CAUSAL, ((3,) * 300,) * 2, torch.bfloat16)  # another kernel looks its sequences up
    assert_matches(flash4, q, k, v, dout, call)
