"""Passes replayed from CUDA graphs. With few tokens a GPU the host takes longer to launch a pass than the GPU to do it; a graph
is launched at once. It reads and writes where it did when it was captured, so its inputs are copied there and its results
from there, which takes the GPU some µs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from attention import phases
from attention.kernels.interface import UnsupportedCall
from attention.streams import capturing

Run = Callable[..., tuple[Tensor, ...]]
MOST = 64  # graphs of a function: of so many shapes at most, two each where there is a backward

_every: WeakSet[Replays] = WeakSet()


class Replays:
    """A function's passes: a pass is run as it is the first time, which compiles and allocates what is kept, captured the second
    time, and replayed from then on. Where phases are recorded, or the caller is capturing a graph of its own, it is run as it is.

    All ranks of a group must make the same calls, so they capture and replay the same ones."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self.pool: Any = None  # one for all, since nothing in it is wanted when a replay is over
        _every.add(self)

    def __call__(self, name: Hashable, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`run(*inputs)`, whose launches depend on `name` and the inputs' shapes alone. Raises UnsupportedCall where it can't be
        captured."""
        device = inputs[0].device
        if phases.active() or capturing(device):
            return run(*inputs)
        key = (name, device, *(x.shape for x in inputs))
        if key not in self.graphs:
            self._make_room()
            self.graphs[key] = None
            return run(*inputs)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        if graph is None:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = self.graphs[key] = _Graph(run, inputs, self.pool)
        return graph.replay(inputs)

    def _make_room(self) -> None:
        while len(self.graphs) >= MOST:
            _, oldest = self.graphs.popitem(last=False)
            if oldest is not None:
                torch.cuda.synchronize()

    def forget(self) -> None:
        self.graphs.clear()
        self.pool = None


class _Graph:
    """One captured pass. `given` are its inputs' places, `made` its results."""

    def __init__(self, run: Run, inputs: Sequence[Tensor], pool: Any):
        with torch.inference_mode(False), torch.no_grad():
            self.given = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
            stream = torch.cuda.Stream(inputs[0].device)
            self.graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    results = run(*self.given)
            except RuntimeError as error:
                raise UnsupportedCall(
                    f"graphs=True: this call can't be captured ({str(error).splitlines()[0]})"
                ) from error
        known = {id(x): i for i, x in enumerate(self.given)}
        self.passed_on = [known.get(id(x)) for x in results]  # which input a result is
        self.made = list({id(x): x for x in results if id(x) not in known}.values())
        numbers = {id(x): i for i, x in enumerate(self.made)}
        self.places = [numbers.get(id(x)) for x in results]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _copy(self.given, inputs)
        self.graph.replay()
        fresh = [torch.empty_like(x) for x in self.made]
        _copy(fresh, self.made)
        return tuple(
            [inputs[i] if i is not None else fresh[at] for i, at in zip(self.passed_on, self.places, strict=True)]  # type: ignore[index]
        )


def _copy(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """One launch for all tensors of a dtype."""
    for dtype in dict.fromkeys(x.dtype for x in into):
        alike = [i for i, x in enumerate(into) if x.dtype == dtype]
        torch._foreach_copy_([into[i] for i in alike], [of[i] for i in alike])


def held_bytes(device: torch.device) -> int:
    """What graphs on a device hold for what lives within a pass only, which the allocator does not count as allocated."""
    pools = {replays.pool for replays in _every if replays.pool is not None}
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment.get("segment_pool_id", ())) in pools
    )


def forget() -> None:
    """Let go of all graphs, as the memory that they exchange through is about to be given back; they are captured anew."""
    for replays in _every:
        replays.forget()
