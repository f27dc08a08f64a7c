"""Starting a Triton kernel. At each start Triton looks at every argument, which takes the host longer than a small kernel
takes the GPU; here a start is made ready once for its shapes, and goes straight to the compiled kernel from then on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from attention.runtime import launch_trace
from attention.runtime.streams import on_device

ALIGNED = 16  # Triton compiles other code for addresses and numbers that are multiples of it
MOST = 4096  # starts that a kind of call keeps ready


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
        # what Triton tells apart
        aligned = tuple([at % ALIGNED == 0 for at in flat])
        key = (
            first.get_device(),
            tuple(dtypes),
            aligned,
            tuple([(n == 1, n % ALIGNED == 0, n >= 2**31) for n in changing]),
        )
        compiled = self.compiled.get(key)
        with on_device_of(first):
            if compiled is None:
                compiled = self.kernel[self.grid](*tensors, *changing, *self.numbers, **self.constants)
                if compiled is not None:  # the interpreter compiles nothing
                    names = self.kernel.arg_names[len(tensors) + len(changing) + len(self.numbers) :]
                    self.rest = (*self.numbers, *(self.constants[name] for name in names))
                    self.compiled[key] = compiled
                    launch_trace.cannot("a kernel was compiled")
            else:
                rest = *changing, *self.rest
                if watched():
                    compiled[self.grid](*addresses, *rest)
                    launch_trace.cannot("a profiler wants to know of each launch")
                    return
                known = *self.grid, _stream(first), compiled.function, compiled.packed_metadata, None, None, None
                compiled.run(*known, *addresses, *rest)
                span = len(known), len(known) + len(addresses)
                launch_trace.did(compiled.run, *known, *addresses, *rest, addresses=span, anywhere=True, keep=tensors)


def watched() -> bool:
    """Whether a profiler wants to know of each of Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; this makes it x's."""
    return on_device(x.device.index) if x.is_cuda else nullcontext()
