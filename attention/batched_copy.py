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
MOST = 16  # pairs per kernel
MOST_BYTES = 1 << 32  # per tensor: the kernel takes twice the number of words as an int32
MOST_PROGRAMS = 65535  # the limit of a grid's last dimension


def copy_all(pairs: Pairs) -> None:
    """Copies each pair (target, source) of one shape and device, in any dtypes and strides. No target may overlap a
    source."""
    alike: dict[Form, list[tuple[Tensor, Tensor]]] = {}
    plain: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        if not target.is_cuda or target.dtype != source.dtype or target.shape != source.shape:
            target.copy_(source)
        elif not source.numel():
            continue
        elif by_words(target, source):
            plain.append((target, source))
        else:
            form = source.dtype, source.shape, target.stride(), source.stride()
            alike.setdefault(form, []).append((target, source))
    for (_, shape, *strides), found in alike.items():
        if not by_kernel(shape, *strides):
            for target, source in found:
                target.copy_(source)
            continue
        from attention.ops.rows import copy_triton

        for i in range(0, len(found), MOST):
            copy_triton(found[i : i + MOST])
    if len(plain) == 1:
        target, source = plain[0]
        target.copy_(source)
    elif plain:
        from attention.ops.rows import copy_words

        for i in range(0, len(plain), MOST):
            copy_words(plain[i : i + MOST])


def by_words(target: Tensor, source: Tensor) -> bool:
    """Whether our kernel for contiguous tensors can copy the pair: whole words, aligned to 4 bytes."""
    whole = source.nbytes % 4 == 0 and source.data_ptr() % 4 == 0 and target.data_ptr() % 4 == 0
    return whole and source.nbytes < MOST_BYTES and target.is_contiguous() and source.is_contiguous()


@lru_cache(maxsize=4096)
def by_kernel(shape: tuple[int, ...], *strides: tuple[int, ...]) -> bool:
    """Whether our kernel copies `[B, S, H, D]` or `[T, H, D]` in these strides; contiguous copies are left to the
    driver."""
    batch = shape[0] if len(shape) == 4 else 1
    plain = all(_contiguous(shape, each) for each in strides)
    return not plain and tokens_contiguous(shape, *strides) and MOST * batch <= MOST_PROGRAMS


def moves(into: Tensor, x: Tensor, places: Sequence[tuple[Interval, Interval]]) -> Pairs:
    """The pairs that copy tokens of `x` to tokens of `into`. places: (in x, in into), one to one. Many places are
    copied at once, by index, and then there are no pairs."""
    if len(places) > FEW:
        put_(into, tuple(there for _, there in places), take(x, tuple(here for here, _ in places)))
        return []
    return [(take(into, (there,)), take(x, (here,))) for here, there in places]


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
