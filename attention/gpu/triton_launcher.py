"""Cheap launches of Triton kernels. Triton looks at every argument of each launch, which can take longer than the
kernel itself. A `TritonLauncher` does that once for its shapes, and then calls the compiled kernel directly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attention.gpu import private
from attention.gpu.streams import on_device

ALIGNED = 16  # Triton specialises on addresses and integers that are multiples of it
MOST = 4096  # launchers cached for one kernel


class TritonLauncher:
    """A launch without its tensors. The kernel takes tensors (or tuples of them), then integers that change from call
    to call, then `numbers` (or tuples of them), then constants. constants: those and Triton's options, by name."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], **constants: Any):
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: dict[tuple[object, ...], Any] = {}
        self.rest: tuple[Any, ...] = ()  # what a compiled kernel takes after the tensors and changing integers

    def __call__(self, *tensors: Tensor | tuple[Tensor, ...], changing: tuple[int, ...] = ()) -> None:
        """Launches on the current stream of the tensors' device. The first of `tensors` must not be a tuple."""
        first = tensors[0]
        assert isinstance(first, Tensor)
        key, addresses = _key(first, tensors, changing)
        compiled = self.compiled.get(key)
        with on_device_of(first):
            if compiled is None:  # Triton compiles it if needed, and launches it
                compiled = self.kernel[self.grid](*tensors, *changing, *self.numbers, **self.constants)
                if compiled is not None:  # the interpreter compiles nothing
                    names = self.kernel.arg_names[len(tensors) + len(changing) + len(self.numbers) :]
                    self.rest = (*self.numbers, *(self.constants[name] for name in names))
                    self.compiled[key] = compiled
                return
            stream = private.raw_stream(first.get_device()) if first.is_cuda else 0
            private.launch_compiled(compiled, self.grid, stream, *addresses, *changing, *self.rest)


def _key(
    first: Tensor, tensors: tuple[Tensor | tuple[Tensor, ...], ...], changing: tuple[int, ...]
) -> tuple[tuple[object, ...], list[int | tuple[int, ...]]]:
    """(everything on which Triton specialises, the tensors' addresses)."""
    dtypes: list[torch.dtype] = []
    flat: list[int] = []
    addresses: list[int | tuple[int, ...]] = []
    for x in tensors:
        if isinstance(x, tuple):
            every = tuple([each.data_ptr() for each in x])
            dtypes += [each.dtype for each in x]
            flat += every
            addresses.append(every)
        else:
            at = x.data_ptr()
            dtypes.append(x.dtype)
            flat.append(at)
            addresses.append(at)
    aligned = tuple([at % ALIGNED == 0 for at in flat])
    integers = tuple([(n == 1, n % ALIGNED == 0, n >= 2**31) for n in changing])
    return (first.get_device(), tuple(dtypes), aligned, integers), addresses


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; this makes it x's."""
    return on_device(x.device.index) if x.is_cuda else nullcontext()
