"""The functions of flash-attn 2.8 that external packages call, implemented by our local kernels. So a package runs
without flash-attn, and over any kernel.

As in flash-attn, gradients are written into the caller's dq, dk and dv. A kernel that cannot write there copies, which
takes a GPU some 30 µs for 64 MB."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from attention.gpu.private import replaced
from attention.kernels import Call, Kernel
from attention.masks.band import Band

VERSION = "2.8.3"
_serving: list[Kernel] = []


def served(kernel: Kernel, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """The out of a package's function, whose forward and backward call `kernel`: another call may select another one meanwhile."""

    def select() -> None:
        _serving[:] = [kernel]

    select()
    out = function(*arguments, **options)
    if out.requires_grad:
        out.register_hook(lambda _: select())
    return out


def serving() -> Kernel:
    """The kernel of the call that runs."""
    return _serving[0]


@lru_cache(maxsize=128)
def lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The sequence lengths of cumulative ones; read from the device once per tensor."""
    return tuple(b - a for a, b in pairwise(cu_seqlens.tolist()))


def _call(
    scale: float, causal: bool, window: tuple[int, int], cu_q: Tensor | None, cu_k: Tensor | None, deterministic: bool
) -> Call:
    q_lengths, k_lengths = (None if cu is None else lengths(cu) for cu in (cu_q, cu_k))
    return Call(scale, Band.of(causal, window), q_lengths, k_lengths, cu_q, cu_k, deterministic)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """`_flash_attn_forward` and, with cu_seqlens, `_flash_attn_varlen_forward`."""
    window = window_size_left, window_size_right
    call = _call(softmax_scale, causal, window, cu_seqlens_q, cu_seqlens_k, False)
    return *_serving[0].forward(q, k, v, call), None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **others: Any,
) -> None:  # fmt: skip
    """`_flash_attn_backward`, whose order of arguments yunchang relies on, and `_flash_attn_varlen_backward`."""
    window = window_size_left, window_size_right
    call = _call(softmax_scale, causal, window, cu_seqlens_q, cu_seqlens_k, bool(deterministic))
    _serving[0].backward(dout, q, k, v, out, softmax_lse, call, into=(dq, dk, dv))


FUNCTIONS = {
    f"_flash_attn_{prefix}{name}": function
    for prefix in ("", "varlen_")
    for name, function in (("forward", _forward), ("backward", _backward))
}


def instead_of_flash_attn(others: Mapping[str, Mapping[str, Any]] | None = None) -> AbstractContextManager[None]:
    """Within the context, importing `flash_attn` gives the functions above, and a module of `others` by its dotted name has the given
    contents. Afterwards sys.modules is as before: flash-attn-4 has the same package name."""
    # they import its public function, and call the others
    package: dict[str, Any] = {"__version__": VERSION, "__path__": [], "flash_attn_func": None}
    return stand_ins({"flash_attn": package, "flash_attn.flash_attn_interface": FUNCTIONS, **(others or {})})


def stand_ins(contents: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[None]:
    """Within the context, importing one of the dotted names gives a module with these contents."""
    modules = {name: ModuleType(name) for name in contents}
    for name, names in contents.items():
        modules[name].__dict__.update(names)
    return replaced(sys.modules, modules)


def let_gloo_send_to_itself(ring_comm: Any) -> None:
    """Patches `RingComm` of ring-flash-attn or yunchang. A rank alone in its ring sends gradients to itself, which NCCL
    supports and gloo does not; over gloo they are copied."""
    commit = ring_comm.commit

    def commit_or_copy(self: Any) -> None:
        if self.world_size > 1 or dist.get_backend(self._process_group) != "gloo":
            commit(self)
            return
        for send, receive in zip(self._ops[::2], self._ops[1::2], strict=True):
            receive.tensor.copy_(send.tensor)
        self._reqs = []

    ring_comm.commit = commit_or_copy
