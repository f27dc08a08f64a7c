"""Plain softmax attention in fp64 with autograd, and the comparison of a kernel with it."""

import torch
from torch import Tensor

from attention.kernels import Call, Kernel
from attention.masks.band import Band
from tests.support.mask_definitions import band
from tests.support.patterns import kept as pairs_of

# relative L2 of (out and lse, gradients)
TOLERANCES = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (1e-6, 1e-5),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (1e-3, 5e-3),
}


def kept(mask: Band, sq: int, sk: int, device: torch.device | str = "cpu") -> Tensor:
    """The pairs that a bottom-right aligned mask keeps, bool `[sq, sk]`."""
    distance = torch.arange(sk, device=device)[None] - torch.arange(sk - sq, sk, device=device)[:, None]
    return torch.ones_like(distance, dtype=torch.bool) & band(distance, mask.left, mask.right)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    keep: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q `[B, Sq, H, D]`, k `[B, Sk, Hk, D]`, v `[B, Sk, Hk, Dv]`, keep `[Sq, Sk]` or one for each element and head, sinks
    `[H]` to out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`. A row that keeps no key and has no sink gives 0 and -inf."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    s = (s if softcap is None else softcap * (s / softcap).tanh()).masked_fill(~keep, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = (s - lse.detach().masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    total = p.sum(-1, keepdim=True)  # 1, as the lse is detached its gradient counts; or 0
    return torch.einsum("bhqk,bkhd->bqhd", (p / total.masked_fill(total == 0, 1))[..., : k.shape[1]], v), lse


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of a kernel call, fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))

    def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if call.pattern is None:
            return attention(q, k, v, call.scale, kept(call.mask, q.shape[1], k.shape[1], q.device), call.softcap)
        return attention(q, k, v, call.scale, torch.from_numpy(pairs_of(call.pattern)).to(q.device), call.softcap)

    if call.pattern is not None and q.dim() == 3:
        out, lse = (x[0] for x in one(q[None], k[None], v[None]))
    elif call.packed:
        lengths = [list(n or ()) for n in (call.q_lengths, call.k_lengths, call.k_lengths)]
        split = [x.unsqueeze(0).split(n, 1) for x, n in zip((q, k, v), lengths, strict=True)]
        outs, lses = zip(*(one(*sequence) for sequence in zip(*split, strict=True)), strict=True)
        out, lse = torch.cat(outs, 1)[0], torch.cat(lses, -1)[0]
    else:
        out, lse = one(q, k, v)
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout.double())


def relative(x: Tensor, expected: Tensor) -> float:
    """Relative L2 error; where everything expected is 0, as the dq of rows with a single key, the root mean square,
    since inputs are of the order of 1."""
    error, norm, one = (x.double() - expected).norm().item(), expected.norm().item(), max(1, expected.numel()) ** 0.5
    return error / (norm if norm > 1e-14 * one else one)


def normal(*shape: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.clamp_(-1, 1).to(device, dtype)


def inputs(
    call: Call,
    sizes,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    v_head_dim: int | None = None,
):
    """(q, k, v, dout, call). sizes are (Sq, Sk) of a batch of two, or two lists of the lengths of a packed batch, for which the
    call is made anew."""
    leading, dv = (2,), v_head_dim or head_dim
    if not isinstance(sizes[0], int):
        leading, call = (), call.of_packed(call.mask, *sizes, torch.device(device))
        sizes = map(sum, sizes)
    n_q, n_k = sizes
    last = (n_q, heads, head_dim), (n_k, kv_heads, head_dim), (n_k, kv_heads, dv), (n_q, heads, dv)
    return *(normal(*leading, *x, dtype=dtype, seed=i, device=device) for i, x in enumerate(last)), call


def assert_lse(lse: Tensor, expected: Tensor, tolerance: float) -> None:
    finite = expected.isfinite()
    assert torch.equal(lse[~finite].double(), expected[~finite]), "rows without keys"
    assert relative(lse[finite], expected[finite]) < tolerance


def assert_matches(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call) -> None:
    """Forward and backward of a kernel within the tolerances of its dtype."""
    forward, backward = TOLERANCES[q.dtype]
    out, lse = kernel.forward(q, k, v, call)
    grads = kernel.backward(dout, q, k, v, out, lse, call)
    expected_out, expected_lse, *expected_grads = reference(q, k, v, dout, call)
    assert out.dtype == q.dtype and out.shape == dout.shape
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert lse.shape == expected_lse.shape
    assert relative(out, expected_out) < forward
    assert_lse(lse, expected_lse, forward)
    for name, x, grad, expected in zip(("dq", "dk", "dv"), (q, k, v), grads, expected_grads, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape, name
        assert relative(grad, expected) < backward, name
