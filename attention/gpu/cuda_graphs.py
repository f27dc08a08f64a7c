"""CUDA graph replay: forward and backward are captured, then launched as one graph each. That removes the CPU launch
overhead, which bounds calls with few tokens a GPU. A graph uses the memory that it was captured with: copying inputs
there and results from there takes the GPU some tens of µs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from weakref import WeakSet

import torch
from torch import Tensor

from attention import profiling
from attention.errors import UnsupportedCall, warn
from attention.gpu import private
from attention.gpu.streams import capturing, current
from attention.gpu.uploads import holding

MOST = 64  # graphs of a function: of so many shapes at most, two each where there is a backward

Run = Callable[..., tuple[Tensor, ...]]
Copies = Callable[[Iterable[tuple[Tensor, Tensor]]], None]

_every: WeakSet[GraphReplay] = WeakSet()


class GraphReplay:
    """A function's calls: each is eager twice, then captured, since all that is compiled, allocated or kept for it exists
    by then, and replayed from then on. It stays eager while phases are recorded or the caller captures a graph.

    copy_all: copies pairs (target, source) of tensors.
    or_eager: calls that can't be captured stay eager, with a warning; otherwise they raise.
    All ranks of a group must make the same calls and record phases alike: they run, capture and replay the same ones."""

    def __init__(self, copy_all: Copies, or_eager: bool = False) -> None:
        self.copy_all, self.or_eager = copy_all, or_eager
        # the last used is the last; None: run once; a text: why there is no graph
        self.graphs: dict[Hashable, _Graph | str | None] = {}
        self.places: dict[torch.device, _Place] = {}
        _every.add(self)

    def __call__(
        self, key: Hashable, begin: Callable[[], object], run: Run, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """`run(*inputs)`, whose launches depend on the key and the inputs' shapes alone. begin: done before each replay.
        Raises UnsupportedCall where it can't be captured, without `or_eager`."""
        device = inputs[0].device
        if profiling.active or capturing(device):
            return run(*inputs)
        form = (key, device, *(x.shape for x in inputs))
        known = form in self.graphs
        if known:
            graph = self.graphs[form] = self.graphs.pop(form)
            if isinstance(graph, str):
                return run(*inputs)
            if graph is not None:
                begin()
                return graph.replay(inputs, self.copy_all)
        inputs = [x.contiguous() for x in inputs]  # as a graph's own are, so that nothing is compiled in its capture
        results = run(*inputs)
        if known:
            self._capture(form, run, inputs)
        else:
            while len(self.graphs) >= MOST:
                oldest = self.graphs.pop(next(iter(self.graphs)))
                if isinstance(oldest, _Graph):  # its replays must be over before its memory is free
                    torch.cuda.synchronize(oldest.place.device)
            self.graphs[form] = None
        return results

    def _capture(self, form: Hashable, run: Run, inputs: Sequence[Tensor]) -> None:
        device = inputs[0].device
        if device not in self.places:
            self.places[device] = _Place(device)
        try:
            self.graphs[form] = _Graph(run, inputs, self.places[device])
        except Exception as error:
            del self.places[device]  # what a broken capture leaves of it is not used again
            if not (self.or_eager and isinstance(error, UnsupportedCall)):
                raise
            warn(f"{error}; it stays eager")
            self.graphs[form] = str(error)

    def forget(self) -> None:
        self.graphs.clear()
        self.places.clear()


class _Place:
    """What a function's graphs share: the memory of tensors that live within a call. So they run one after another, on
    whatever streams they are called. They are captured on one stream, within which alone the allocator's pool reuses
    memory."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()


class _Graph:
    """A captured call. inputs: in the graph's memory; made: its results that are not inputs; positions: of each result
    among the inputs and what is made; kept: all else that it reads."""

    def __init__(self, run: Run, inputs: Sequence[Tensor], place: _Place):
        self.place = place
        self.kept: dict[int, object] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
            results = self._captured(run)
        known = {id(x): x for x in (*self.inputs, *results)}
        self.made = [*known.values()][len(inputs) :]
        self.positions = [list(known).index(id(x)) for x in results]

    def _captured(self, run: Run) -> tuple[Tensor, ...]:
        place = self.place
        self.graph = torch.cuda.CUDAGraph()
        before = current(place.device)
        first: Exception | None = None  # ending a broken capture raises, too
        try:
            with (
                holding(self.kept),
                torch.cuda.graph(self.graph, pool=place.pool, stream=place.stream, capture_error_mode="thread_local"),
            ):
                try:
                    return run(*self.inputs)
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            torch.cuda.set_stream(before)  # which a broken capture leaves as it was within
            self._close()
            first = first or error
            if isinstance(first, RuntimeError) and not isinstance(first, torch.OutOfMemoryError):
                raise UnsupportedCall(f"replay=graphs: this call can't be captured: {first}") from first
            raise first from None

    def _close(self) -> None:
        """A capture that could not be ended leaves the allocator recording for it."""
        try:
            self.graph.pool()  # raises unless it was ended
        except RuntimeError:
            index, pool = self.place.device.index, self.place.pool
            with suppress(RuntimeError):
                private.end_allocation(index, pool)
                private.release_pool(index, pool)

    def replay(self, inputs: Sequence[Tensor], copy_all: Copies) -> tuple[Tensor, ...]:
        now = current(self.place.device)
        with torch.no_grad():
            now.wait_event(self.place.done)
            copy_all(zip(self.inputs, inputs, strict=True))
            self.graph.replay()
            fresh = [torch.empty_like(x) for x in self.made]
            copy_all(zip(fresh, self.made, strict=True))
            self.place.done.record(now)
        every = *inputs, *fresh
        return tuple([every[i] for i in self.positions])


def held_bytes(device: torch.device) -> int:
    """The memory of graphs on a device for tensors that live within a call, which the allocator counts as free."""
    pools = {tuple(place.pool) for replay in _every for place in replay.places.values()}
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment.get("segment_pool_id", ())) in pools
    )


def forget() -> None:
    """Drops all graphs, before the memory that they exchange through is released. They are captured anew."""
    for replay in list(_every):
        replay.forget()
