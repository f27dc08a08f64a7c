"""Work that remote ranks wait for runs on a high-priority stream. A rank's work on local keys, which nobody waits for,
runs on the caller's stream in the background. It fills the multiprocessors that the other leaves free: while remote
keys travel, at the ends of kernels, and while gradients travel back.

Both classes are context managers around a forward or backward. `apart` says whether there is a background stream, so
that its results should be added last. Memory belongs to the stream on which it was allocated: background work writes
only to tensors of the priority stream, or of before, and may allocate temporaries of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from attention.gpu.streams import Follow, On, current


class Inline:
    """Runs everything in order, on one stream."""

    def __init__(self, apart: bool = False):
        self.apart = apart

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def background(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None: ...


class CudaPriorityStream:
    """For one forward or backward, and one thread, at a time. At its end, even by an exception, the caller's stream
    waits for it."""

    apart = True

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)
        self.on, self.follow = On(self.stream), Follow()

    def __enter__(self) -> CudaPriorityStream:
        self.caller = current(self.device)
        self.back = On(self.caller)
        self.follow(self.stream, self.caller)
        self.on.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.on.__exit__(*exc)
        self.follow(self.caller, self.stream)

    def background(self) -> AbstractContextManager[object]:
        """A context for background work. It follows the priority stream's work so far, which does not wait for it."""
        self.follow(self.caller, self.stream)
        return self.back

    def join(self) -> None:
        """Makes the next work of the priority stream follow all background work."""
        self.follow(self.stream, self.caller)


PriorityStream = Inline | CudaPriorityStream
