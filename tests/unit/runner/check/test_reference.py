"""The gate's reference: its own arithmetic against plain masked softmax with autograd, and what it may import."""

import itertools
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from runner.check import reference
from runner.check.reference import Reference, Seen


class Call(NamedTuple):
    """A call's lengths, scale, mask, softcap, sinks `[4]` and head dim of the values."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    value_dim: int = 16

    @property
    def sink(self) -> torch.Tensor | None:
        return None if self.sinks is None else torch.tensor(self.sinks, dtype=torch.float64)


def attend(q, k, v, dout, call: Call, **more) -> Reference:
    seen = Seen.band(call.q_lengths, call.k_lengths, call.causal, call.window)
    return reference.attend(q, k, v, dout, seen, call.scale, softcap=call.softcap, sinks=call.sink, **more)


CASES = {
    "causal": Call((300,), (300,), 0.3, True),
    "full": Call((300,), (300,), 0.3),
    "window": Call((400,), (400,), 0.3, True, (70, 0)),
    "causal cuts what is ahead": Call((200,), (200,), 0.3, True, (70, 20)),
    "both sides": Call((400,), (400,), 0.3, False, (30, 50)),
    "one side": Call((200,), (200,), 0.3, False, (-1, 5)),
    "packed": Call((100, 1, 300, 0, 30), (100, 1, 300, 0, 30), 0.3, True),
    "packed window": Call((100, 1, 150), (100, 1, 150), 0.3, True, (40, 0)),
    "decode": Call((3,), (500,), 0.3),
    "rows without keys": Call((40,), (30,), 0.3, True),
    "softcap": Call((300,), (300,), 0.3, True, softcap=0.7),
    "values of another size": Call((300,), (300,), 0.3, True, value_dim=6),
    "sinks": Call((100, 1, 300), (100, 1, 300), 0.3, True, (70, 0), sinks=(-2.0, 0.5, 3.0, 5.0)),
    "all of them, rows without keys": Call((40,), (30,), 0.3, True, (-1, -1), 0.7, (-2.0, 0.5, 3.0, 5.0), 24),
}


def kept(call: Call) -> torch.Tensor:
    """Pair by pair, from what the arguments mean."""
    keep = torch.zeros(sum(call.q_lengths), sum(call.k_lengths), dtype=torch.bool)
    left, right = call.window
    at_q = at_k = 0
    for n_q, n_k in zip(call.q_lengths, call.k_lengths, strict=True):
        for i in range(n_q):
            for j in range(n_k):
                ahead = j - (i + n_k - n_q)
                inside = (left < 0 or ahead >= -left) and (right < 0 or ahead <= right)
                keep[at_q + i, at_k + j] = inside and not (call.causal and ahead > 0)
        at_q, at_k = at_q + n_q, at_k + n_k
    return keep


def plainly(q, k, v, dout, call):
    """Sinks are one more key of each head, whose value is 0."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, keys).mul(call.scale)
    if call.softcap is not None:
        s = call.softcap * (s / call.softcap).tanh()
    s = s.masked_fill(~kept(call), -torch.inf)
    wanted = [q, k, v]
    if (sink := call.sink) is not None:
        wanted.append(sink.requires_grad_())
        s = torch.cat([s, sink.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    some = kept(call).any(-1) | (sink is not None)
    p = torch.where(some[:, None], s.softmax(-1).nan_to_num(0), 0)[..., : len(k)]
    out = torch.einsum("hqk,khd->qhd", p, values)
    gradients = torch.autograd.grad(out, wanted, dout) if some.all() else ()
    found = {
        "out": out,
        "lse": s.logsumexp(-1).T.unsqueeze(-1),
        **dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False)),
    }
    found |= {"dsinks": found["dsinks"].view(1, -1, 1)} if "dsinks" in found else {}
    return {name: x.detach() for name, x in found.items()}


def inputs(call, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    n_q, n_k = sum(call.q_lengths), sum(call.k_lengths)
    sizes = ((n_q, 4, 16), (n_k, 2, 16), (n_k, 2, call.value_dim), (n_q, 4, call.value_dim))
    return [torch.randn(size, generator=draw).to(dtype) for size in sizes]


@pytest.mark.parametrize("call", CASES.values(), ids=CASES.keys())
def test_it_is_masked_softmax_forward_and_backward_at_once_and_in_chunks(call):
    given = inputs(call)
    plain = plainly(*given, call)
    for scores in (1 << 26, 20_000):
        found = attend(*given, call, scores=scores)
        for name, expected in plain.items():
            torch.testing.assert_close(found.values[name], expected, rtol=1e-11, atol=1e-11)
            assert found.scales(name).shape == expected.shape[:2]


def random_rectangles(n: int, seed: int) -> torch.Tensor:
    """Cells of a grid, each with a band or none; some cells are left out."""
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most, (1,), generator=draw))

    borders = [0, n // 5, n // 2, n // 2 + 1, n]
    found = []
    for q0, q1 in itertools.pairwise(borders):
        for k0, k1 in itertools.pairwise(borders):
            low, high = (k0 - q0 - number(60), k0 - q0 + number(60)) if number(2) else (-n, n)
            if number(3):
                found.append((q0, q1, k0, k1, low, high))
    return torch.tensor(found)


@pytest.mark.parametrize("scores", [1 << 26, 4_000], ids=["at once", "in chunks"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["full", "packed window"])
def test_it_takes_any_rectangles_within_a_band_of_every_sequence(name, seed, scores):
    call = CASES[name]
    n = sum(call.q_lengths)
    rectangles, keep = random_rectangles(n, seed), torch.zeros(n, n, dtype=torch.bool)
    for q0, q1, k0, k1, low, high in rectangles.tolist():
        distance = torch.arange(k0, k1) - torch.arange(q0, q1).unsqueeze(1)
        keep[q0:q1, k0:k1] |= (distance >= low) & (distance <= high)
    keep &= kept(call)
    q, k, v, dout = inputs(call)
    seen = Seen.band(call.q_lengths, call.k_lengths, call.causal, call.window, rectangles)
    found = reference.attend(q, k, v, dout, seen, call.scale, scores=scores)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    weights = torch.einsum("qhd,khd->hqk", q, keys).mul(call.scale).exp() * keep
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("hqk,khd->qhd", weights / total.masked_fill(total == 0, 1), values)
    for name, x in zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True):
        torch.testing.assert_close(found.values[name], x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.values["out"], out.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.values["lse"], total.log().transpose(0, 1).detach(), rtol=1e-10, atol=1e-10)


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
    call = CASES["window"]._replace(sinks=(-2.0, 0.5, 3.0, 5.0))
    q, k, v, dout = inputs(call)
    whole = attend(q, k, v, dout, call)
    rows = slice(0, 150), slice(150, 400)
    parts = [attend(q, k, v, dout, call, rows=mine) for mine in rows]
    for name in ("out", "dq", "lse"):
        for mine, part in zip(rows, parts, strict=True):
            torch.testing.assert_close(part.values[name], whole.values[name][mine])
    for name in ("dk", "dv", "dsinks", "dk2", "dv2", "dsinks2"):
        torch.testing.assert_close(sum(part.values[name] for part in parts), whole.values[name])


def test_without_a_backward_it_gives_out_and_lse():
    call = CASES["decode"]
    q, k, v, _ = inputs(call)
    assert set(attend(q, k, v, None, call).values) == {"out", "lse", "out2"}


@pytest.mark.slow
def test_a_rows_scale_is_what_random_errors_of_its_terms_make():
    """Terms of dv with errors of their own of size u: the row's error over its scale is about u, at every length and row."""
    draw = torch.Generator().manual_seed(0)
    for n in (64, 1024):
        call = Call((n,), (n,), 0.25, True)
        q, k, v, dout = (torch.randn(n, 1, 16, generator=draw, dtype=torch.float64) for _ in range(4))
        found = attend(q, k, v, dout, call)
        s = (q[:, 0] @ k[:, 0].T * 0.25).masked_fill(~kept(call), -torch.inf)
        noisy = s.softmax(-1) * (1 + 1e-3 * torch.randn(n, n, generator=draw, dtype=torch.float64))
        for name, x in (("out", noisy @ v[:, 0]), ("dv", noisy.T @ dout[:, 0])):
            rows = (x - found.values[name][:, 0]).norm(dim=-1) / found.scales(name)[:, 0]
            assert 2e-4 < rows.median() < 2e-3
            assert rows.max() < 5e-3


@pytest.mark.slow
def test_a_sinks_scale_is_what_errors_of_out_make_at_every_length():
    draw = torch.Generator().manual_seed(0)
    for n in (64, 1024):
        call = Call((n,), (n,), 0.25, True, sinks=tuple([3.0] * 64))
        q, k, v, dout = (torch.randn(n, h, 16, generator=draw, dtype=torch.float64) for h in (64, 1, 1, 64))
        found = attend(q, k, v, dout, call)
        noisy = found.values["out"] * (1 + 1e-3 * torch.randn(n, 64, 16, generator=draw, dtype=torch.float64))
        x = -((3.0 - found.values["lse"].squeeze(-1)).exp() * (noisy * dout).sum(-1)).sum(0)
        rows = (x - found.values["dsinks"].flatten()).abs() / found.scales("dsinks").flatten()
        assert 1e-4 < rows.median() < 2e-3
        assert rows.max() < 5e-3


def test_it_shares_nothing_with_the_library():
    code = (
        "import sys, runner.check.reference, runner.check.errors\n"
        "assert not [x for x in sys.modules if x.startswith('attention.')], 'it imports the library'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
