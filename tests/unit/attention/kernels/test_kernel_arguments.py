"""How masks and lengths become the arguments of other people's kernels: pure functions, and what can be shown on a CPU."""

import pytest
import torch

from attention.kernels import KERNELS, Call, flash4, flex
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import assert_lse, inputs, kept, normal, reference, relative
from tests.support.patterns import kept as pairs_of

MASKS = [FULL, CAUSAL, Band(7, 0), Band(5, 9), Band(-1, 4), Band(6, -1)]
SIZES = [(140, 513), (513, 140), (1, 21)]
PACK = ((1, 19, 8, 4, 0, 150), (1, 7, 23, 0, 5, 12))

every_mask = pytest.mark.parametrize("mask", MASKS, ids=Band.describe)


def packed(mask: Band, q_lengths, k_lengths) -> Call:
    return Call(0.125).of_packed(mask, q_lengths, k_lengths, torch.device("cpu"))


@pytest.mark.parametrize(
    "name, package", [("flash3", "FlashAttention-3"), ("flash4", "flash-attn-4"), ("xformers", "")]
)
def test_a_package_that_is_not_installed_is_named_with_its_command(name, package):
    reason = KERNELS[name].missing("cuda")
    if reason is None:
        pytest.skip(f"{name} works here")
    assert package in reason
    assert "install" in reason or "sm" in reason


@pytest.mark.parametrize(
    "mask, expected",
    [
        (FULL, (False, None, None)),
        (CAUSAL, (True, None, None)),
        (Band(5, 0), (False, 5, 0)),
        (Band(-1, 3), (False, None, 3)),
    ],
)
def test_a_band_is_flash4s_window_with_none_for_unbounded(mask, expected):
    assert tuple(flash4.window(mask).values()) == expected


@every_mask
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_rows_that_kernels_are_spared_are_those_without_keys(mask, sizes):
    q, k, _, _, call = inputs(lambda: Call(1.0, mask), sizes, 1, 1, 8, torch.float32)
    parts = KERNELS["flash4"].parts(q, k, call)
    first = parts[0].q[0][0] if parts else 0
    seen = kept(mask, *sizes).any(1)
    assert not seen[:first].any() and seen[first:].all()


def test_flash4_writes_to_rows_on_multiples_of_16_bytes_only():
    x = torch.empty(2, 10, 4, 64, dtype=torch.bfloat16)
    assert flash4.writable(x) and flash4.writable(x[:, 3:7]) and flash4.writable(x[:, :, 1:3])
    assert not flash4.writable(x.transpose(-1, -2))
    assert not flash4.writable(x[..., 1:9])
    assert not flash4.writable(x[:, :1].expand(2, 10, 4, 64))
    lse = torch.empty(2, 4, 11)
    assert flash4.writable(lse[..., 1:4], align=4) and not flash4.writable(lse[..., ::2], align=4)


@every_mask
@pytest.mark.parametrize("lengths", [*(((sq,), (sk,)) for sq, sk in SIZES), PACK], ids=str)
def test_a_call_as_a_pattern_keeps_the_pairs_of_each_sequence(mask, lengths):
    expected = torch.block_diag(*(kept(mask, sq, sk).int() for sq, sk in zip(*lengths, strict=True))).bool()
    pattern = packed(mask, *lengths).as_pattern(0, 0)
    assert torch.equal(torch.from_numpy(pairs_of(pattern)), expected)


@every_mask
@pytest.mark.parametrize("sizes", [(140, 513), (200, 140), ((100, 40), (256, 257))], ids=str)
def test_flex_attention_under_its_block_mask_matches_plain_attention(mask, sizes, monkeypatch):
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def call_of(*lengths) -> Call:
        return packed(mask, *lengths) if lengths else Call(0.125, mask)

    q, k, v, dout, call = inputs(call_of, sizes, 4, 2, 32, torch.float64)
    out, lse = KERNELS["flex"].forward(q, k, v, call)
    expected, expected_lse, *_ = reference(q, k, v, dout, call)
    assert relative(out, expected) < 1e-6
    assert_lse(lse, expected_lse, 1e-6)


@pytest.mark.parametrize("mask", [FULL, Band(5, 9)], ids=Band.describe)
def test_what_flex_attentions_backward_is_fed_gives_the_share_of_the_final_gradients(mask):
    """By plain attention with autograd on out and lse, over slices of the keys."""
    q, k, v = (normal(2, n, h, 16, dtype=torch.float64, seed=i) for i, (n, h) in enumerate(((40, 4), (60, 2), (60, 2))))
    dout = normal(2, 40, 4, 16, dtype=torch.float64, seed=9)
    keep = kept(mask, 40, 60)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = with_lse(*whole, keep)
    expected = torch.autograd.grad(out, whole, dout)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for cut in (slice(0, 7), slice(7, 31), slice(31, 60)):
        part = [x.clone().requires_grad_() for x in (q, k[:, cut], v[:, cut])]
        own, own_lse = with_lse(*part, keep[:, cut])
        heads_first = [x.detach().transpose(1, 2) for x in (dout, out, own)]
        fed, dlse = flex.share(heads_first[0], (heads_first[1], lse.detach()), (heads_first[2], own_lse.detach()))
        seen = own_lse.isfinite()
        grads = torch.autograd.grad((own, own_lse[seen]), part, (fed.transpose(1, 2), dlse[seen]))
        for total, where, grad in zip(sums, (slice(None), cut, cut), grads, strict=True):
            total[:, where] += grad
    for total, grad in zip(sums, expected, strict=True):
        assert relative(total, grad) < 1e-12


def with_lse(q, k, v, keep):
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25).masked_fill(~keep, -torch.inf)
    lse = torch.where(keep.any(1), s.masked_fill(~keep.any(1)[:, None], 0).logsumexp(-1), -torch.inf)
    p = torch.where(keep, (s.masked_fill(~keep, 0) - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp(), 0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse
