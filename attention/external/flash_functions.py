"""The functions of flash-attn 2.8 that external packages call, implemented by our local kernels. So a package runs
without flash-attn, and over any kernel.

As in flash-attn, gradients are written into the caller's dq, dk and dv. A kernel that cannot write there copies, which
takes a GPU some 30 µs for 64 MB."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attention.kernels import Call, Kernel
from attention.masks.band import Band

VERSION = "2.8.3"
_serving: list[Kernel] = []
_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def serve(kernel: Kernel) -> None:
    """From now on `kernel` does the calls."""
    _serving[:] = [kernel]


def serve_backward(out: Tensor, kernel: Kernel) -> Tensor:
    """`out`, whose backward selects `kernel` again: another call may have selected another one meanwhile."""
    if out.requires_grad:
        out.register_hook(lambda _: serve(kernel))
    return out


def lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The sequence lengths of cumulative ones; read from the device once per tensor."""
    if cu_seqlens not in _lengths:
        cu = cu_seqlens.tolist()
        _lengths[cu_seqlens] = tuple(b - a for a, b in pairwise(cu))
    return _lengths[cu_seqlens]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    _plain(dropout_p, softcap, alibi_slopes)
    call = Call(softmax_scale, Band.of(causal, (window_size_left, window_size_right)))
    return *_serving[0].forward(q, k, v, call), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    _plain(dropout_p, softcap, alibi_slopes)
    mask = Band.of(causal, (window_size_left, window_size_right))
    call = Call(softmax_scale, mask, deterministic=bool(deterministic))
    _serving[0].backward(dout, q, k, v, out, softmax_lse, call, into=(dq, dk, dv))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _plain(dropout_p, softcap, alibi_slopes)
    call = _packed(cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, (window_size_left, window_size_right), False)
    return *_serving[0].forward(q, k, v, call), None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    _plain(dropout_p, softcap, alibi_slopes)
    window = (window_size_left, window_size_right)
    call = _packed(cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window, bool(deterministic))
    _serving[0].backward(dout, q, k, v, out, softmax_lse, call, into=(dq, dk, dv))


def _packed(
    cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool, window: tuple[int, int], deterministic: bool
) -> Call:
    return Call(scale, Band.of(causal, window), lengths(cu_q), lengths(cu_k), cu_q, cu_k, deterministic)


def _plain(dropout_p: float, softcap: float, alibi_slopes: Tensor | None) -> None:
    assert not dropout_p and not softcap and alibi_slopes is None, "no adapter asks for these"


@contextmanager
def instead_of_flash_attn(**others: dict[str, Any]) -> Iterator[None]:
    """Within the context, importing `flash_attn` gives the functions above. Each module in `others` ("__" for ".") is
    replaced by one with the given names. Afterwards sys.modules is as before: flash-attn-4 has the same package
    name."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    for function in functions:
        setattr(interface, function.__name__, function)
    package.__version__ = VERSION  # type: ignore[attr-defined]
    package.flash_attn_func = _refuse  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.__path__ = []
    stubs = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    for name, contents in others.items():
        stubs[name.replace("__", ".")] = module = ModuleType(name.replace("__", "."))
        module.__dict__.update(contents)
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def let_gloo_send_to_itself(ring_comm: type) -> None:
    """Patches `RingComm` of ring-flash-attn or yunchang. A rank alone in its ring sends gradients to itself, which NCCL
    supports and gloo does not; over gloo they are copied."""
    commit = ring_comm.commit  # type: ignore[attr-defined]

    def commit_or_copy(self: Any) -> None:
        if self.world_size > 1 or dist.get_backend(self._process_group) != "gloo":
            commit(self)
            return
        for send, receive in zip(self._ops[::2], self._ops[1::2], strict=True):
            receive.tensor.copy_(send.tensor)
        self._reqs = []

    ring_comm.commit = commit_or_copy  # type: ignore[attr-defined]


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("external packages call the low-level functions")
