"""Several copies within a CUDA device in one launch: one Triton kernel does all copies of the same form, another all
contiguous ones. PyTorch copies strided rows, such as some heads of every token, at a third of the memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from attention.masks.band import Interval
from attention.tensors import FEW, put_, take, tokens_contiguous

Pairs = Iterable[tuple[Tensor, Tensor]]
Form = tuple[torch.dtype, torch.Size, tuple[int, ...], tuple[int, ...]]
WORDS: Form = (torch.int32, torch.Size(), (), ())  # of contiguous tensors
MOST = 16  # pairs per kernel
MOST_BYTES = 1 << 32  # per tensor: the kernel takes twice the number of words as an int32
MOST_PROGRAMS = 65535  # the limit of a grid's last dimension


def copy_all(pairs: Pairs) -> None:
    """Copies each pair (target, source) of one shape and device, in any dtypes and strides. No target may overlap a
    source."""
    launches: dict[Form, list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        alike = target.is_cuda and target.dtype == source.dtype and target.shape == source.shape and source.numel()
        if alike and by_words(target, source):
            launches.setdefault(WORDS, []).append((target, source))
        elif alike and by_kernel(source.shape, target.stride(), source.stride()):
            form = source.dtype, source.shape, target.stride(), source.stride()
            launches.setdefault(form, []).append((target, source))
        else:
            target.copy_(source)
    for form, copies in launches.items():
        if form is WORDS and len(copies) == 1:
            copies[0][0].copy_(copies[0][1])
            continue
        from attention.ops.rows import copy_triton, copy_words

        for i in range(0, len(copies), MOST):
            (copy_words if form is WORDS else copy_triton)(copies[i : i + MOST])


def by_words(target: Tensor, source: Tensor) -> bool:
    """Whether our kernel for contiguous tensors can copy the pair: whole words, aligned to 4 bytes."""
    whole = source.nbytes % 4 == 0 and source.data_ptr() % 4 == 0 and target.data_ptr() % 4 == 0
    return whole and source.nbytes < MOST_BYTES and target.is_contiguous() and source.is_contiguous()


@lru_cache(maxsize=4096)
def by_kernel(shape: torch.Size, *strides: tuple[int, ...]) -> bool:
    """Whether our kernel copies `[B, S, H, D]` or `[T, H, D]` in these strides; contiguous copies are left to the
    driver."""
    batch, *_ = shape if len(shape) == 4 else (1,)
    contiguous = torch.empty(shape, device="meta").stride()
    return (
        tokens_contiguous(shape, *strides) and any(x != contiguous for x in strides) and MOST * batch <= MOST_PROGRAMS
    )


def moves(into: Tensor, x: Tensor, places: Sequence[tuple[Interval, Interval]]) -> Pairs:
    """The pairs that copy tokens of `x` to tokens of `into`. places: (in x, in into), one to one. Many places are
    copied at once, by index, and then there are no pairs."""
    if len(places) > FEW:
        put_(into, tuple(there for _, there in places), take(x, tuple(here for here, _ in places)))
        return []
    return [(take(into, (there,)), take(x, (here,))) for here, there in places]
