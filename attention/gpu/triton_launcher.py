"""Cheap launches of Triton kernels. Triton looks at every argument of each launch, which can take longer than the
kernel itself. A `TritonLauncher` does that once for its shapes, and then calls the compiled kernel directly."""

from __future__ import annotations

from typing import Any

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
        """Launches on the current stream of the tensors' device."""
        flat: list[Tensor] = []
        addresses: list[int | tuple[int, ...]] = []
        for entry in tensors:
            if isinstance(entry, tuple):
                flat += entry
                addresses.append(tuple([x.data_ptr() for x in entry]))
            else:
                flat.append(entry)
                addresses.append(entry.data_ptr())
        index = flat[0].device.index
        # everything on which Triton specialises
        key = (
            index,
            tuple([x.dtype for x in flat]),
            tuple([x.data_ptr() % ALIGNED == 0 for x in flat]),
            tuple([(n == 1, n % ALIGNED == 0, n >= 2**31) for n in changing]),
        )
        compiled = self.compiled.get(key)
        with on_device(index):  # Triton launches on the current one
            if compiled is None:  # Triton compiles it if needed, and launches it
                compiled = self.kernel[self.grid](*tensors, *changing, *self.numbers, **self.constants)
                if compiled is not None:  # the interpreter compiles nothing
                    names = self.kernel.arg_names[len(tensors) + len(changing) + len(self.numbers) :]
                    self.rest = (*self.numbers, *(self.constants[name] for name in names))
                    self.compiled[key] = compiled
                return
            stream = 0 if index is None else private.raw_stream(index)
            private.launch_compiled(compiled, self.grid, stream, *addresses, *changing, *self.rest)
