"""dilated-attention-pytorch: in which settings its result is dilated attention, with and without its division by sums."""

from importlib.util import find_spec

import pytest
import torch

import attention
from attention.errors import UnsupportedCall
from attention.geometry.counts import head_pairs
from attention.kernels import KERNELS
from attention.variants.registry import MIXTURES
from runner.measure import metrics
from runner.peers import PEERS, dilated, function
from runner.peers.flash_functions import stand_ins
from tests.jobs import dilated as jobs
from tests.support.composing import resolved

LACKS = PEERS["external_dilated"].missing("cpu")
installed = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
SERVED = dilated.Served(KERNELS["math"])


def exact(q, k, v, segments, rates, causal):
    """Head groups, from the definition: a boolean matrix for each pair, softmax over it, the rest 0, divided by n."""
    n, heads, at = len(segments), q.shape[2], torch.arange(q.shape[1])
    group = [i for i in range(n) for _ in range(heads // n + (i < heads % n))]  # of every head
    outs = []
    for head, i in enumerate(group):
        chosen = at % segments[i] % rates[i] == i % rates[i]
        sees = chosen[:, None] & chosen & (at[:, None] // segments[i] == at // segments[i])
        if causal:
            sees &= at[:, None] >= at
        scores = (q[:, :, head] @ k[:, :, head].mT * q.shape[-1] ** -0.5).exp() * sees
        outs.append(scores @ v[:, :, head] / scores.sum(-1, keepdim=True).clamp(min=1e-300) / n)
    return torch.stack(outs, 2)


def published():
    """The package's class as published."""
    with stand_ins(dilated.XFORMERS):
        from dilated_attention_pytorch.dilated_attention import DilatedAttention
    return DilatedAttention


def inputs(heads, tokens=48, kv_heads=None):
    generator = torch.Generator().manual_seed(0)
    shape = [heads, *[kv_heads or heads] * 2]
    return [torch.randn(2, tokens, h, 8, dtype=torch.float64, generator=generator).requires_grad_() for h in shape]


def errors(segments, rates, heads, causal, module=dilated.module):
    """Relative L2 errors of out, dq, dk, dv."""
    q, k, v = inputs(heads)
    theirs, right = module(segments, rates, SERVED)(q, k, v, is_causal=causal), exact(q, k, v, segments, rates, causal)
    dout = torch.randn_like(right)
    pairs = [
        (theirs, right),
        *zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (theirs, right)), strict=True),
    ]
    return [float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]


@installed
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("segments", "rates", "heads"),
    [
        ((12, 24), (1, 2), 4),
        ((8, 16, 48), (1, 2, 4), 6),
        ((12, 24, 24, 48), (1, 1, 3, 5), 4),  # rates that do not divide a segment
        ((48,), (3,), 2),
        ((2, 4, 8), (1, 2, 16), 3),  # a rate larger than its segment
    ],
)
def test_without_the_division_it_is_dilated_attention(segments, rates, heads, causal):
    assert max(errors(segments, rates, heads, causal)) < 1e-14


@installed
@pytest.mark.parametrize("causal", (False, True))
def test_as_published_no_result_is_attention(causal):
    def module(segments, rates, served):
        return published()(segments, rates, op=served)

    assert min(errors((12, 24), (1, 2), 4, causal, module)) > 0.5
    out = module((12, 24), (1, 2), SERVED)(*inputs(4), is_causal=causal)
    assert torch.allclose(out.sum(1), torch.full_like(out[:, 0], 1 / 2))  # of every head and channel


@installed
def test_as_published_a_causal_result_depends_on_later_tokens():
    q, k, v = inputs(4)
    out = published()((12, 24), (1, 2), op=SERVED)(q, k, v, is_causal=True)
    (dv,) = torch.autograd.grad(out[:, 0].sum(), v)
    assert dv[:, 1:].abs().max() > 0.1
    without = dilated.module((12, 24), (1, 2), SERVED)(q, k, v, is_causal=True)
    (dv,) = torch.autograd.grad(without[:, 0].sum(), v)
    assert not dv[:, 1:].any()


@installed
def test_unequal_groups_share_heads_and_leave_the_last_out():
    out = dilated.module((12, 24), (1, 2), SERVED)(*inputs(5))
    assert not out[:, :, 4].any()
    assert errors((12, 24), (1, 2), 5, False)[0] > 0.1


@installed
def test_a_single_pair_of_rate_one_has_no_backward():
    q, k, v = inputs(2)
    with torch.no_grad():
        dilated.module((12,), (1,), SERVED)(q, k, v)
    with pytest.raises(RuntimeError, match="in-place"):
        dilated.module((12,), (1,), SERVED)(q, k, v)


@installed
def test_its_scale_is_not_used():
    q, k, v = inputs(4)
    scaled = dilated.package().DilatedAttention((12, 24), (1, 2), softmax_scale=3.0, op=SERVED)
    assert torch.equal(scaled(q, k, v), dilated.module((12, 24), (1, 2), SERVED)(q, k, v))


@installed
def test_a_length_that_segments_do_not_divide_fails():
    with pytest.raises(Exception, match="divi"):
        dilated.module((12, 36), (1, 2), SERVED)(*inputs(4))


@installed
def test_shared_kv_heads_are_taken_by_the_number_of_the_query_head():
    q, k, v = inputs(4, kv_heads=2)
    shared = dilated.module((12, 24), (1, 2), SERVED)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        shared(q, k, v)  # the second group finds no KV head


@installed
def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(dilated, "DIVISION", "x = x / 2")
    with pytest.raises(UnsupportedCall, match=r"pip install --no-deps dilated-attention-pytorch==0\.2\.0"):
        dilated.package.__wrapped__()


@installed
def test_the_import_leaves_no_xformers_behind():
    before = find_spec("xformers")
    dilated.package.__wrapped__()
    assert find_spec("xformers") == before


def call(heads=4, tokens=48, kv_heads=None, segments=(12, 24), rates=(1, 2), **how):
    fn = function.make("external_dilated", kernel="math", segments=list(segments), rates=list(rates))
    return fn(*inputs(heads, tokens, kv_heads), **how)


@installed
@pytest.mark.parametrize("causal", (False, True))
def test_the_variant_gives_the_numbers_of_dilated_on_the_same_pairs(causal):
    q, k, v = inputs(6)
    how = {"segments": [12, 24, 96], "rates": [1, 2, 4]}  # the last segment is the whole sequence
    theirs, ours = (
        function.make("external_dilated", kernel="math", **how),
        attention.make("dilated", kernel="math", **how),
    )
    found, expected = (fn(q, k, v, causal=causal) for fn in (theirs, ours))
    dout = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (found, expected)), strict=True)
    for a, b in [(found, expected), *pairs]:
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    of_both = [head_pairs(fn.plan(q, k, v, causal=causal).problem, 6, 6) for fn in (theirs, ours)]
    assert of_both[0] == of_both[1]


@installed
@pytest.mark.parametrize(
    "given, message",
    [
        ({"heads": 5}, "heads=5: external_dilated gives 2 segment lengths groups of heads that overlap and leave the last heads out; use 6 heads, or dilated"),
        ({"kv_heads": 2}, "heads=4, kv_heads=2: external_dilated picks KV heads by the number of the query head; use kv_heads=4, or dilated"),
        ({"tokens": 40, "segments": (16, 24)}, "seq_len=40: external_dilated needs a multiple of its segments [16, 24]; 48 would work, or dilated"),
        ({"tokens": 40, "segments": (16, 44)}, "seq_len=40: external_dilated needs a multiple of its segments [16, 40]; 32 would work, or dilated"),
        ({"segments": (12,), "rates": (1,)}, "segments: with one pair of rate 1, external_dilated has no backward; use several pairs, or dilated"),
        ({"scale": 0.5}, "scale: external_dilated ignores it; leave the scale out, or use dilated"),
        ({"padding": 3}, "padding=3: external_dilated has none here; our own variants take padding"),
        ({"window": (3, 0)}, "window=(3, 0): external_dilated takes full and causal attention only; leave masks and windows out"),
        ({"softcap": 2.0}, "softcap: external_dilated has none here; our own variants take softcap"),
        ({"sinks": torch.zeros(4)}, "sinks: external_dilated has none here; our own variants take sinks"),
        ({"return_lse": True}, "return_lse=True: external_dilated gives no LSE here; use return_lse=False"),
    ],
)  # fmt: skip
def test_where_its_result_would_not_be_right_the_variant_refuses(given, message):
    with pytest.raises(ValueError) as error:
        call(**given)
    assert str(error.value) == message


@installed
def test_a_packed_batch_is_refused():
    x = torch.zeros(48, 4, 8)
    with pytest.raises(
        ValueError, match="a packed batch of 2 sequences: external_dilated takes batches of single sequences"
    ):
        function.make("external_dilated", segments=[12, 24], rates=[1, 2])(x, x, x, cu_seqlens=[0, 24, 48])


@pytest.mark.parametrize("tokens", (4096, 65536))
def test_its_default_pairs_are_those_of_dilated(tokens):
    of = [
        v.problem((0, tokens), 1, attention.masks.causal(), {})
        for v in (PEERS["external_dilated"], MIXTURES["dilated"])
    ]
    assert of[0].schedule.pairs == of[1].schedule.pairs and of[0].form == of[1].form


@installed
def test_a_run_is_checked_and_counted_as_one_of_dilated(in_world):
    size = [
        "config=tiny",
        "batch=1",
        "heads=4",
        "kv_heads=4",
        "head_dim=8",
        "seq_len=256",
        "dtype=fp32",
        "world_size=1",
    ]
    pairs = ["attention.segments=[64,128]", "attention.rates=[1,4]"]
    spec, ours = (resolved(f"attention={name}", *size, *pairs) for name in ("external_dilated", "dilated"))
    assert metrics.flops(spec) == metrics.flops(ours)
    (passed, ratio), *others = in_world(
        jobs.checked, 1, experiment=spec.plain(), wrong=[{"rates": [1, 2]}, {"segments": [32, 128]}]
    )
    assert passed and ratio < 1.5
    assert not any(passed for passed, _ in others)
