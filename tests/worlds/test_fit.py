"""Tensors of any strides: what a kernel cannot take as it lies is copied, in one place."""

import pytest
import torch

from attention import kernels
from attention.kernels import KERNELS, Call, Shape
from attention.masks.band import CAUSAL, FULL, Band
from attention.tensors import fit, fits
from attention.variants.registry import VARIANTS
from tests.jobs import numerics
from tests.support.naive import assert_matches, inputs, reference, relative
from tests.support.strides import STRIDES, WRITABLE

torch.set_num_threads(1)

ON_CPU = ["math", "sdpa_flash"]
PACK = ((1, 9, 8), (3, 7, 11))


def case(mask, sizes):
    def call(q_lengths=None, k_lengths=None):
        if q_lengths is None:
            return Call(0.125, mask)
        return Call(0.125).of_packed(mask, q_lengths, k_lengths, torch.device("cpu"))

    return inputs(call, sizes, 2, 1, 64, torch.float32)


def lying(x, how):
    """x, which may be the LSE of a packed batch, as it lies in the form `how`."""
    return STRIDES[how](x[None])[0] if x.dim() == 2 else STRIDES[how](x)


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("which", ("q", "k", "v", "dout"))
@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_takes_tensors_of_any_strides(name, which, how):
    for mask, sizes in ((CAUSAL, (20, 28)), (Band(5, 2), (20, 28)), (FULL, PACK)):
        *tensors, call = case(mask, sizes)
        given = dict(zip(("q", "k", "v", "dout"), tensors, strict=True))
        given[which] = STRIDES[how](given[which])
        assert_matches(KERNELS[name], *given.values(), call)


@pytest.mark.parametrize("how", STRIDES)
def test_our_triton_kernel_takes_and_writes_tensors_of_any_strides(how):
    """All at once, as the interpreter takes long."""
    *tensors, call = case(CAUSAL, (8, 12))
    q, k, v, dout = map(STRIDES[how], tensors)
    assert_matches(KERNELS["triton"], q, k, v, dout, call)
    if how in WRITABLE:
        result = KERNELS["triton"].forward(q, k, v, call)
        into = tuple(STRIDES[how](torch.full_like(x, torch.nan)) for x in result)
        assert KERNELS["triton"].forward(q, k, v, call, into=into)[0] is into[0]
        assert all(map(torch.equal, result, into))


@pytest.mark.parametrize("how", WRITABLE)
@pytest.mark.parametrize("name", ON_CPU)
def test_a_backward_takes_an_out_and_an_lse_of_any_strides(name, how):
    q, k, v, dout, call = case(CAUSAL, (20, 28))
    out, lse = KERNELS[name].forward(q, k, v, call)
    expected = KERNELS[name].backward(dout, q, k, v, out, lse, call)
    found = KERNELS[name].backward(dout, q, k, v, STRIDES[how](out), STRIDES[how](lse), call)
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) < 1e-6


@pytest.mark.parametrize("how", STRIDES)
def test_the_decode_kernel_takes_tensors_of_any_strides(how):
    q, k, v, dout, call = case(FULL, (2, 20))
    for given in ((STRIDES[how](q), k, v), (q, STRIDES[how](k), v), (q, k, STRIDES[how](v))):
        exact, exact_lse, *_ = reference(*given, dout, call)
        out, lse = KERNELS["decode"].forward(*given, call)
        assert relative(out, exact) < 1e-5 and relative(lse, exact_lse) < 1e-5


@pytest.mark.parametrize("how", WRITABLE)
@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_writes_into_tensors_of_any_strides(name, how):
    for sizes in ((20, 28), PACK):
        q, k, v, dout, call = case(CAUSAL, sizes)
        result = KERNELS[name].forward(q, k, v, call)
        grads = KERNELS[name].backward(dout, q, k, v, *result, call)
        into, into_grads = (tuple(lying(torch.full_like(x, torch.nan), how) for x in some) for some in (result, grads))
        given = KERNELS[name].forward(q, k, v, call, into=into)
        given_grads = KERNELS[name].backward(dout, q, k, v, *result, call, into=into_grads)
        for x, target, exact in zip((*given, *given_grads), (*into, *into_grads), (*result, *grads), strict=True):
            assert x is target
            assert torch.equal(x, exact)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_declares_what_it_needs_of_memory(name):
    assert KERNELS[name].align in (1, 16)
    assert KERNELS[name].align == 16 or name in ("math", "decode")


def test_what_fits_is_not_copied():
    x = torch.randn(2, 8, 6, 16)
    rows = (x, x[:, 2:5], x[:, :, 1:3], x.transpose(1, 2), x[:1], x[..., :8], x[:, :, :, None, :].flatten(3))
    for each in rows:
        assert fits(each, 16)
        assert fit((each,), 16)[0] is each
    assert fits(STRIDES["misaligned"](x), 1) and not fits(STRIDES["misaligned"](x), 16)
    assert fits(STRIDES["odd_rows"](x), 1) and not fits(STRIDES["odd_rows"](x), 16)
    for how in ("strided_last_dim", "every_other_element", "one_head", "one_token", "one_number", "overlapping"):
        assert not fits(STRIDES[how](x), 1), how


def test_a_copy_that_fits_passes_gradients_on():
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    (found,) = fit((STRIDES["strided_last_dim"](x),), 16)
    assert fits(found, 16)
    (grad,) = torch.autograd.grad(found, x, torch.ones_like(x))
    assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("name", [*ON_CPU, "triton"])
def test_autocast_does_not_change_what_a_kernel_computes_in(name):
    q, k, v, dout, call = case(CAUSAL, (8, 12))
    result = KERNELS[name].forward(q, k, v, call)
    grads = KERNELS[name].backward(dout, q, k, v, *result, call)
    with torch.autocast("cpu", torch.bfloat16):
        cast = KERNELS[name].forward(q, k, v, call)
        cast_grads = KERNELS[name].backward(dout, q, k, v, *result, call)
    assert all(torch.equal(a, b) for a, b in zip((*result, *grads), (*cast, *cast_grads), strict=True))


IN_WORLDS = [name for name in VARIANTS if name not in ("grouped", "ring_varlen", "zigzag_varlen")]
FORMS = ("strided_last_dim", "heads_first", "misaligned", "one_token")


@pytest.mark.parametrize("transport", ("gloo", "symm"))
def test_every_variant_takes_shards_of_any_strides(in_world, transport):
    for name, how, error in in_world(numerics.in_strides, 2, names=IN_WORLDS, forms=FORMS, transport=transport):
        assert error < 1e-5, (name, how)


def test_autocast_does_not_change_what_a_variant_computes_in(in_world):
    for name, same in in_world(numerics.under_autocast, 2, names=IN_WORLDS):
        assert same, name


def test_a_shape_of_any_head_dim_that_a_kernel_takes_gives_aligned_rows():
    """What is dense of such a shape lies as the kernel needs it."""
    for kernel in KERNELS.values():
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            for head_dim in range(1, 300):
                shape = Shape("cuda", dtype, 8, 2, head_dim)
                if kernel.refuses(shape, FULL) is None and kernel.align > 1:
                    assert head_dim * dtype.itemsize % kernel.align == 0, (
                        kernel.name,
                        kernels.name_of(dtype),
                        head_dim,
                    )
