"""Each kernel against plain fp64 attention with gradients: on a GPU where there is one, else those of a CPU."""

import threading
from dataclasses import replace
from itertools import product

import pytest
import torch

from attention.kernels import KERNELS, Call, Kernel, Shape, aten, made_for, refusal
from attention.kernels import math as math_kernel
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import TOLERANCES, assert_matches, inputs, reference, relative
from tests.support.patterns import PATTERNS
from tests.support.strides import STRIDES, WRITABLE

torch.set_num_threads(1)
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_tf32")] if GPU else []
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
on_cpu = pytest.mark.skipif(GPU, reason="of a CPU's kernels")

NAMES = (
    [*KERNELS] if GPU else ["math", "sdpa_flash"]
)  # our Triton kernels have tests of their own under the interpreter
MASKS = [FULL, CAUSAL, Band(128, 0), Band(100, 50), Band(-1, 64), Band(64, -1)]
FLEX = {FULL, CAUSAL, Band(100, 50)}  # it compiles for seconds a shape, so a few speak for all
PACK = ((1, 300, 129, 512, 0, 40), (1, 512, 129, 700, 5, 0))
every_kernel = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def without_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def case(mask, sizes, dtype=DTYPE, head_dim=64, kv_heads=2, v_head_dim=None, softcap=None, scale=None, pattern=None):
    """(q, k, v, dout, call) of 4 heads."""
    call = Call(scale or head_dim**-0.5, mask, softcap=softcap, pattern=pattern)
    return inputs(call, sizes, 4, kv_heads, head_dim, dtype, DEVICE, v_head_dim)


def able(name: str, q, k, v, dout, call: Call) -> Kernel:
    """The kernel, or a skip where it does not do such a call here."""
    if name == "flex" and (q.dtype != torch.bfloat16 or q.shape[-1] not in (64, 128) or call.mask not in FLEX):
        pytest.skip("flex: compiled for a few shapes only")
    if reason := refusal(KERNELS[name], Shape.of(q, k, v, backward=True), call.mask):
        pytest.skip(f"{name}: {reason}")
    return KERNELS[name]


@every_kernel
@pytest.mark.parametrize("mask", MASKS, ids=Band.describe)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((515, 1021), marks=pytest.mark.gpu_smoke), (1000, 600), PACK, *[(5, 0), (0, 5)] * (not GPU)],
    ids=str,
)
def test_a_kernel_matches_plain_attention_and_leaves_its_inputs(name, mask, sizes):
    """Also for rows, sequences and queries without keys."""
    given = case(mask, sizes)
    before = [x.clone() for x in given[:4]]
    assert_matches(able(name, *given), *given)
    assert all(map(torch.equal, given, before))


DTYPES = [torch.bfloat16, torch.float16, torch.float32 if GPU else torch.float64]


@every_kernel
@pytest.mark.parametrize("head_dim, dtype", [*product((80, 128), DTYPES), (256, DTYPE)], ids=str)
def test_a_kernel_matches_plain_attention_in_every_dtype_and_head_dim(name, head_dim, dtype):
    given = case(CAUSAL, (515, 1021) if GPU else (50, 140), dtype, head_dim)
    assert_matches(able(name, *given), *given)


@every_kernel
def test_backwards_over_split_keys_sum_to_the_whole_with_the_final_out_and_lse(name):
    """The parts are views of the whole, as the ring's are. What they merge to is tested with the merges."""
    q, k, v, dout, call = given = case(FULL, (512, 1000))
    kernel = able(name, *given)
    out, lse, dq, dk, dv = reference(*given)
    out, lse = out.to(q.dtype), lse.to(torch.float32)
    parts = [(k[:, a:b], v[:, a:b]) for a, b in ((0, 1), (1, 488), (488, 1000))]
    dqs, dks, dvs = zip(*(kernel.backward(dout, q, *part, out, lse, call) for part in parts), strict=True)
    for found, expected in ((sum(x.double() for x in dqs), dq), (torch.cat(dks, 1), dk), (torch.cat(dvs, 1), dv)):
        assert relative(found, expected) < TOLERANCES[DTYPE][1]


DENSE, SHORT = (300, 515), ((1, 300, 129, 64), (1, 512, 129, 70))
WINDOW = Band(100, 0)
FORMS = [  # kernel, KV heads, D, Dv, softcap, mask, lengths, whether values are padded; a few, as some compile for seconds
    ("flash4", 2, 64, 64, 1.5, WINDOW, SHORT, False),
    ("flash4", 2, 256, 256, 1.5, FULL, DENSE, False),
    ("flash4", 4, 192, 128, None, WINDOW, SHORT, False),
    ("flash4", 4, 192, 128, 1.5, CAUSAL, DENSE, False),
    ("flex", 2, 64, 64, 1.5, CAUSAL, DENSE, False),
    ("flex", 2, 192, 128, None, CAUSAL, DENSE, False),
    ("math", 2, 64, 128, 1.5, CAUSAL, SHORT, False),
    ("math", 2, 192, 128, None, WINDOW, DENSE, False),
    ("sdpa_cudnn", 2, 128, 64, None, CAUSAL, SHORT, False),
    ("sdpa_cudnn", 2, 64, 128, None, FULL, DENSE, False),
    ("sdpa_efficient", 2, 64, 128, None, CAUSAL, SHORT, False),
    ("cudnn_flex", 4, 128, 64, None, WINDOW, SHORT, False),
    ("flash4", 2, 128, 96, None, CAUSAL, SHORT, True),
    ("flash2", 2, 192, 128, None, WINDOW, SHORT, True),
    ("sdpa_flash", 2, 192, 128, None, CAUSAL, DENSE, True),
    ("sdpa_flash", 2, 64, 128, None, CAUSAL, DENSE, True),
    ("xformers", 2, 64, 32, None, CAUSAL, DENSE, True),
    ("triton", 2, 128, 64, None, CAUSAL, DENSE, True),
]


@pytest.mark.parametrize("name, kv_heads, head_dim, v_head_dim, softcap, mask, sizes, pads", FORMS, ids=str)
def test_softcap_and_value_heads_of_another_size(name, kv_heads, head_dim, v_head_dim, softcap, mask, sizes, pads):
    """What a kernel declares must not be refused, where it works at all."""
    if name not in NAMES or (reason := KERNELS[name].missing(DEVICE)):
        pytest.skip(f"{name}: {reason if name in NAMES else DEVICE}")
    given = case(mask, sizes, DTYPE, head_dim, kv_heads, v_head_dim, softcap, 2 * head_dim**-0.5)
    shape = Shape.of(*given[:3], backward=True, softcap=softcap is not None)
    kernel = made_for(name, shape)
    assert refusal(kernel, shape, mask) is None and isinstance(kernel, PaddedValues) == pads
    assert_matches(kernel, *given)
    result = kernel.forward(*given[:3], given[4])
    into = tuple(torch.full_like(x, torch.nan) for x in result)
    assert kernel.forward(*given[:3], given[4], into=into)[0] is into[0]
    torch.testing.assert_close(into, result)


@pytest.mark.parametrize("name, softcap", [("flash4", 1.5), ("math", 0.7), *[("sdpa_flash", None)] * (not GPU)])
def test_patterns_have_both_by_packed_calls(name, softcap):
    if reason := KERNELS[name].missing(DEVICE):
        pytest.skip(reason)
    pattern = PATTERNS["prefix_documents"]
    given = case(FULL, (pattern.n_q, pattern.n_k), DTYPE, 192, 4, 128, softcap, 0.15, pattern)
    shape = Shape.of(*given[:3], backward=True, softcap=softcap is not None)
    assert_matches(ForPatterns(made_for(name, shape), shape), *given)


def lying(x, how):
    """x, which may be the LSE of a packed batch, as it lies in the form `how`."""
    return STRIDES[how](x[None])[0] if x.dim() == 2 else STRIDES[how](x)


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize(
    "sizes", [DENSE, PACK] if GPU else [(20, 28), ((1, 9, 8), (3, 7, 11))], ids=["dense", "packed"]
)
@pytest.mark.parametrize("name", [*NAMES, *["triton"] * (not GPU)])
def test_a_kernel_takes_and_writes_tensors_of_any_strides(name, sizes, how):
    *tensors, call = case(CAUSAL, sizes)
    kernel = able(name, *tensors, call)
    for which in ("0123",) if name == "triton" else ("0", "1", "2", "3", "0123"):  # the interpreter takes long
        assert_matches(kernel, *(STRIDES[how](x) if str(i) in which else x for i, x in enumerate(tensors)), call)
    if how in WRITABLE:
        q, k, v, dout = tensors
        result = kernel.forward(q, k, v, call)
        grads = kernel.backward(dout, q, k, v, *result, call)
        into = [torch.full_like(x, torch.nan) for x in (*result, *grads)]
        into = [x if GPU and i == 1 else lying(x, how) for i, x in enumerate(into)]  # the LSE is dense on a GPU
        written = kernel.forward(q, k, v, call, into=tuple(into[:2]))
        written_grads = kernel.backward(dout, q, k, v, *into[:2], call, into=tuple(into[2:]))
        assert all(x is y for x, y in zip((*written, *written_grads), into, strict=True))
        assert_near(into, (*result, *grads))


def assert_near(found, wanted) -> None:
    for x, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, expected, rtol=2e-2 if GPU else 0, atol=2e-3 if GPU else 0)


@on_cpu
@pytest.mark.parametrize("name", [*NAMES, "triton"])
def test_autocast_does_not_change_what_a_kernel_computes_in(name):
    q, k, v, dout, call = case(CAUSAL, (8, 12))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            result = KERNELS[name].forward(q, k, v, call)
            results.append([*result, *KERNELS[name].backward(dout, q, k, v, *result, call)])
    assert all(map(torch.equal, *results))


@on_cpu
def test_math_in_small_chunks_of_queries_matches_plain_attention(monkeypatch):
    monkeypatch.setattr(math_kernel, "SCORES", 2 * 4 * 33 * 5)
    for mask in (FULL, CAUSAL, Band(5, 9), Band(-1, 4), Band(6, -1)):
        given = case(mask, (33, 50), torch.float64, 16)
        assert_matches(KERNELS["math"], *given)


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4", "sdpa_flash"])
@pytest.mark.parametrize("sizes", [(1100, 1100) if GPU else (130, 130), PACK], ids=["dense", "packed"])
@pytest.mark.parametrize("mask", [CAUSAL, Band(100, 50)], ids=Band.describe)
def test_a_deterministic_backward_repeats_itself(name, sizes, mask):
    q, k, v, dout, call = case(mask, sizes)
    kernel, call = able(name, q, k, v, dout, call), replace(call, deterministic=True)
    result = kernel.forward(q, k, v, call)
    first = kernel.backward(dout, q, k, v, *result, call)
    for _ in range(3):
        assert all(map(torch.equal, kernel.backward(dout, q, k, v, *result, call), first))
    assert_matches(kernel, q, k, v, dout, call)


@on_gpu
def test_flash4_takes_lengths_given_once_and_many_short_sequences():
    for lengths in [((300, 100, 112),) * 2, ((3,) * 300,) * 2]:  # another kernel looks up many
        q, k, v, dout, call = case(CAUSAL, lengths)
        assert_matches(able("flash4", q, k, v, dout, call), q, k, v, dout, replace(call, cu_k=call.cu_q))


@on_gpu
@pytest.mark.parametrize("lies", ("strided", "between", "cut"))
def test_a_backward_of_flash4_is_right_however_the_lse_lies(lies):
    q, k, v, dout, call = case(CAUSAL, (512, 511 if lies == "cut" else 512))
    flash4 = able("flash4", q, k, v, dout, call)
    out, lse = flash4.forward(q, k, v, call)
    wanted = flash4.backward(dout, q, k, v, out, lse, call)
    if lies == "strided":
        lse = torch.empty((*lse.shape, 2), device="cuda")[..., 0].copy_(lse)
    elif lies == "between":
        lse = torch.empty(lse.numel() + 1, device="cuda")[1:].view(lse.shape).copy_(lse)
    assert_near(flash4.backward(dout, q, k, v, out, lse, call), wanted)


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
