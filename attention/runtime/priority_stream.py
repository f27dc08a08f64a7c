"""What peers wait for goes before what nobody waits for. A pass runs at the front, on a stream of high priority; a rank's work on
its own keys, which needs nothing and is needed by nobody, is given to the caller's stream behind it, where it fills what
multiprocessors are free: while the others' keys are on their way here, at the ends of kernels, and while the gradients of
the others' keys are on their way home."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from attention.runtime.streams import Follow, On, current


class Front(Protocol):
    """A context manager around a pass. `apart`: whether there is a behind, so that what is done there should be added last.

    Memory is the stream's that it was allocated on: what is done behind writes to tensors of the front (or of before the pass),
    and what it needs for itself it may allocate."""

    apart: bool

    def __enter__(self) -> Front: ...

    def __exit__(self, *exc: object) -> None: ...

    def behind(self) -> AbstractContextManager[object]:
        """What is started within follows what the front was given so far, which does not wait for it."""

    def settle(self) -> None:
        """What the front is given next follows all that was started behind."""


class Inline:
    """Everything one after another."""

    def __init__(self, apart: bool = False):
        self.apart = apart

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def behind(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self) -> None: ...


class CudaFront:
    """One pass at a time, from one thread at a time. The caller's stream waits for all of it at its end, be that an exception."""

    apart = True

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)
        self.on, self.follow = On(self.stream), Follow()

    def __enter__(self) -> Front:
        self.caller = current(self.device)
        self.back = On(self.caller)
        self.follow(self.stream, self.caller)
        self.on.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.on.__exit__(*exc)
        self.follow(self.caller, self.stream)

    def behind(self) -> AbstractContextManager[object]:
        self.follow(self.caller, self.stream)
        return self.back

    def settle(self) -> None:
        self.follow(self.stream, self.caller)
