"""Starting a Triton kernel. At each start Triton looks at every argument, which takes the host longer than a small kernel
takes the GPU; here a start is made ready once for its shapes, and goes straight to the compiled kernel from then on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # Triton compiles other code for addresses and numbers that are multiples of it
MOST = 4096  # starts that a kind of call keeps ready

_NOTHING: AbstractContextManager[object] = nullcontext()


class Start:
    """All of a start but its tensors: the kernel, whose parameters are tensors (or tuples of them), then whole numbers that
    change from call to call, then `numbers` (or tuples of them), then constants; the grid; the constants and Triton's options
    by name."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], **constants: Any):
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: dict[tuple[object, ...], Any] = {}
        self.rest: tuple[Any, ...] = ()  # what a compiled kernel takes behind the tensors

    def __call__(self, *tensors: Tensor | tuple[Tensor, ...], changing: tuple[int, ...] = ()) -> None:
        """On the device of the first tensor, which is not a tuple and where all of them are, and on its current stream."""
        first = tensors[0]
        assert isinstance(first, Tensor)
        kind: list[object] = [first.device.index]
        addresses: list[int | tuple[int, ...]] = []
        for x in tensors:
            if isinstance(x, tuple):
                every = tuple(each.data_ptr() for each in x)
                kind.extend([(each.dtype, at % ALIGNED == 0) for each, at in zip(x, every, strict=True)])
                addresses.append(every)
            else:
                at = x.data_ptr()
                kind.append((x.dtype, at % ALIGNED == 0))
                addresses.append(at)
        kind.extend([(n == 1, n % ALIGNED == 0, n >= 2**31) for n in changing])  # what Triton tells apart
        key = tuple(kind)
        with on_device_of(first):
            compiled = self.compiled.get(key)
            if compiled is not None:
                compiled[self.grid](*addresses, *changing, *self.rest)
                return
            compiled = self.kernel[self.grid](*tensors, *changing, *self.numbers, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(tensors) + len(changing) + len(self.numbers) :]
            self.rest = (*self.numbers, *(self.constants[name] for name in names))
            self.compiled[key] = compiled


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; this makes it x's."""
    if not x.is_cuda or torch._C._cuda_getDevice() == x.device.index:
        return _NOTHING
    return torch.cuda.device(x.device)
