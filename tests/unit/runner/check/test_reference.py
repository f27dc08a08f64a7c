"""The gate's reference: its own arithmetic against plain masked softmax with autograd, and what it may import."""

from typing import NamedTuple

import pytest
import torch

from attention.masks.band import Band
from attention.masks.pattern import Pattern
from runner.check import reference
from runner.check.reference import Seen
from tests.support import naive, patterns
from tests.support.composing import python


class Call(NamedTuple):
    """A call's lengths, mask, softcap, sinks `[4]`, head dim of the values, and rectangles."""

    q_lengths: tuple
    k_lengths: tuple
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float | None = None
    sinks: tuple | None = None
    value_dim: int = 16
    rectangles: torch.Tensor | None = None

    @property
    def sink(self):
        return None if self.sinks is None else torch.tensor(self.sinks, dtype=torch.float64)


SCALE = 0.3
SINKS = (-2.0, 0.5, 3.0, 5.0)
PACK = (100, 1, 150, 0, 30)


def attend(*tensors, **more):
    *tensors, call = tensors
    seen = Seen.band(call.q_lengths, call.k_lengths, call.causal, call.window, call.rectangles)
    return reference.attend(*tensors, seen, SCALE, softcap=call.softcap, sinks=call.sink, **more)


# cells of a grid, some with a band, and some left out
RECTANGLES = torch.tensor([
    (0, 60, 0, 60, -9, 9), (0, 60, 150, 281, -300, 300), (60, 150, 0, 60, -90, -20), (60, 150, 60, 151, -300, 0),
    (150, 151, 0, 281, -300, 300), (151, 281, 60, 150, -120, -80), (151, 281, 150, 281, -30, 10),
])  # fmt: skip
CASES = {
    "causal": Call((300,), (300,), True),
    "both sides": Call((400,), (400,), False, (30, 50)),
    "causal cuts what is ahead, one side": Call((200,), (200,), True, (-1, 20)),
    "packed window": Call(PACK, PACK, True, (40, 0)),
    "decode": Call((3,), (500,)),
    "all of them, rows without keys": Call((40,), (30,), True, (-1, -1), 0.7, SINKS, 24),
    "rectangles": Call((281,), (281,), rectangles=RECTANGLES),
    "rectangles in a pack": Call(PACK, PACK, True, (40, 0), rectangles=RECTANGLES),
}


def kept(call):
    band, lengths = Band.of(call.causal, call.window), zip(call.q_lengths, call.k_lengths, strict=True)
    keep = torch.block_diag(*(naive.kept(band, *n).int() for n in lengths)).bool()
    if call.rectangles is None:
        return keep
    return keep & torch.from_numpy(patterns.kept(Pattern(*keep.shape, call.rectangles.numpy())))


def plainly(q, k, v, dout, call):
    wanted = [x.detach().requires_grad_() for x in (q, k, v, call.sink) if x is not None]
    out, lse = naive.attention(*(x[None] for x in wanted[:3]), SCALE, kept(call), call.softcap, *wanted[3:])
    gradients = torch.autograd.grad(out, wanted, dout[None])
    results = {"out": out[0].detach(), "lse": lse[0].T[..., None]}
    results |= zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False)
    return {name: x.view(1, -1, 1) if name == "dsinks" else x for name, x in results.items()}


def inputs(call):
    draw = torch.Generator().manual_seed(0)
    n_q, n_k = sum(call.q_lengths), sum(call.k_lengths)
    sizes = ((n_q, 4, 16), (n_k, 2, 16), (n_k, 2, call.value_dim), (n_q, 4, call.value_dim))
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("call", CASES.values(), ids=CASES.keys())
def test_it_is_masked_softmax_forward_and_backward_at_once_and_in_chunks(call):
    tensors = inputs(call)
    plain = plainly(*tensors, call)
    for scores in (1 << 26, 4_000):
        found = attend(*tensors, call, scores=scores)
        for name, expected in plain.items():
            torch.testing.assert_close(found.values[name], expected, rtol=1e-10, atol=1e-10)
            assert found.scales(name).shape == expected.shape[:2]


def test_a_mask_of_few_keys_far_apart_is_never_a_matrix_of_all_keys():
    """Queries that see a short interval and the first 8 keys: columns between them are not computed."""
    n = 1 << 16
    rectangles = torch.tensor([(256, n, 0, 8, -n, n), (0, n, 0, n, -16, 0)])
    seen = Seen.band((n,), (n,), rectangles=rectangles)
    chunks = list(seen.chunks(slice(40_000, 41_000), 1 << 20))
    assert [*range(40_000, 41_000)] == [i for chunk in chunks for i in range(chunk.rows.start, chunk.rows.stop)]
    for chunk in chunks:
        rows = chunk.rows.stop - chunk.rows.start
        assert chunk.keys[1] == 8 + 16 + rows
        assert int((~chunk.hidden(torch.device("cpu"))).sum()) == rows * (8 + 17)


def test_some_queries_have_their_rows_and_their_share_of_the_rest():
    call = Call((400,), (400,), True, (70, 0), sinks=SINKS)
    q, k, v, dout = inputs(call)
    first, last, whole = (
        attend(q, k, v, dout, call, rows=slice(*ends)).values for ends in ((0, 150), (150, 400), (0, 400))
    )
    for name, x in whole.items():
        join = torch.cat if name.rstrip("2") in ("out", "dq", "lse") else sum
        torch.testing.assert_close(join([first[name], last[name]]), x)
    assert set(attend(q, k, v, None, call).values) == {"out", "lse", "out2"}


@pytest.mark.parametrize("n", [64, 512])
def test_a_rows_scale_is_what_random_errors_of_its_terms_make(n):
    """Terms with errors of their own of size u: the row's error over its scale is about u, at every length and row."""
    draw, call = torch.Generator().manual_seed(0), Call((n,), (n,), True, sinks=(3.0,) * 16)

    def random(*size):
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    def noisy(x):
        return x * (1 + 1e-3 * random(*x.shape))

    q, k, v, dout = (random(n, h, 16) for h in (16, 1, 1, 16))
    found = attend(q, k, v, dout, call)
    out, lse = found.values["out"], found.values["lse"]
    p = torch.einsum("qhd,kd->qhk", q, k[:, 0] * SCALE).sub(lse).exp() * kept(call).unsqueeze(1)
    results = {
        "out": torch.einsum("qhk,kd->qhd", noisy(p), v[:, 0]),
        "dv": torch.einsum("qhk,qhd->kd", noisy(p), dout)[:, None],
        "dsinks": -((3.0 - lse).exp() * (noisy(out) * dout).sum(-1, keepdim=True)).sum(0, keepdim=True),
    }
    for name, x in results.items():
        rows = (x - found.values[name]).norm(dim=-1) / found.scales(name)
        assert 1e-4 < rows.median() < 2e-3 and rows.max() < 6e-3, name


def test_it_shares_nothing_with_the_library(tmp_path):
    code = "import sys, runner.check.reference; print([x for x in sys.modules if x.startswith('attention.')])"
    assert python("-c", code, cwd=tmp_path).stdout == "[]\n"
