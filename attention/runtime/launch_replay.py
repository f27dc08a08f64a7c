"""Launch replay: a call's launches are recorded once, then repeated on other inputs without the Python that decided
what to launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention import profiling
from attention.errors import warn
from attention.runtime import private
from attention.runtime.launch_recorder import LaunchRecorder, shared
from attention.runtime.launch_trace import LaunchTrace
from attention.runtime.strategy import Key, Run
from attention.runtime.streams import capturing

MOST = 16  # traces of a plan: of its forward and backward for so many strides, streams and places of symmetric memory
MOST_KNOWN = 1024  # forms of a function
TRIES = 3  # recordings of one form; the first may fail because a kernel is compiled in it
ALIGNED = 16  # bytes: how kernels are compiled and chosen depends on addresses modulo this

Traces = OrderedDict[Hashable, LaunchTrace | list[str]]  # by form; a list: why each recording gave no trace


class LaunchReplay:
    """A strategy: a call is eager the first time, recorded the second time, and replayed from then on. It stays eager
    where it can't be recorded, where phases or launches are profiled, and where a CUDA graph is captured.

    known: the forms that have traces. A plan for other lengths of a packed batch records them the first time."""

    def __init__(self) -> None:
        self.known: set[Hashable] = set()
        self.traces: WeakKeyDictionary[Any, Traces] = WeakKeyDictionary()  # by plan

    def __call__(self, key: Key, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`run(*inputs)`, whose launches depend on the key and the inputs' forms alone."""
        device = inputs[0].device
        if (
            key.state is None
            or profiling.active()
            or private.profiled()
            or capturing(device)
            or private.current_device() != device.index
        ):
            return run(*inputs)
        different = len({x.data_ptr() for x in inputs})
        stream = private.stream_id(device.index)
        form = (key.stage, key.state, stream, different, shared(inputs), *map(_form, inputs))
        traces = self.traces.setdefault(key.owner, OrderedDict())
        if form not in traces:
            while len(traces) >= MOST:
                traces.popitem(last=False)
            traces[form] = []
            if form not in self.known:
                return run(*inputs)  # the next time, everything for it is compiled and allocated
        traces.move_to_end(form)
        trace = traces[form]
        if isinstance(trace, LaunchTrace):
            return trace.replay(inputs)
        if len(trace) == TRIES:
            return run(*inputs)
        return self._record(traces, form, trace, key, run, inputs)

    def _record(
        self, traces: Traces, form: Hashable, failed: list[str], key: Key, run: Run, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Runs the call. failed: why earlier recordings of it gave no trace."""
        index = inputs[0].device.index
        recorder = LaunchRecorder(inputs, lambda: private.stream_id(index))
        with torch.no_grad():
            results = recorder.record(run)
        found = recorder.trace(results)
        if isinstance(found, LaunchTrace):
            traces[form] = found
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known.add(form)
        else:
            traces[form] = [*failed, found]
            if len(failed) + 1 == TRIES:
                warn(f"replay=launches: this {key.stage} stays eager: {found}")
        return results


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED
