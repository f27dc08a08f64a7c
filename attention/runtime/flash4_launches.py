"""FlashAttention-4's compiled kernels without the package's Python around them, which takes a host longer than a short call takes
the GPU: it looks at every argument anew, and makes a key of seventy things, for shapes that it has seen before. The first
call of given shapes goes through the package; what it launches is remembered, and launched with other tensors from then on.

That is for the calls that launch nothing but kernels on the call's own tensors and on scratch: dense ones and packs of up to some
hundred sequences, not `deterministic`. What a kernel takes, by position, is of one version of the package; of others, and of what
does not look like it, every call goes through the package. A tape is told of its launches there, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention.runtime import launch_trace
from attention.runtime.cuda_driver import zeros

VERSION = "4.0.0b36"
MOST = 4096  # shapes that are remembered
ALIGNED = 16
# that a usual call launches by
FUNCTIONS = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")

Arguments = tuple[Any, ...]
Lengths = tuple[Tensor, ...]  # a pack's, cumulative: of queries and of keys; none of a dense call
Launched = tuple[Callable[..., object], Arguments]  # a kernel, and what it was given


@dataclass(frozen=True)
class Launch:
    """A kernel, and what it takes behind the call's tensors and scratch: of a pack the lengths' number at the places `lengths`."""

    kernel: Callable[..., object]
    rest: Arguments = ()
    lengths: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(kernel: Callable[..., object], rest: Arguments, lengths: Lengths) -> Launch | None:
        """None where it takes further tensors."""
        found, numbers = list(rest), []
        for i, x in enumerate(rest):
            if isinstance(x, Tensor):
                number = next((n for n, each in enumerate(lengths) if _are((x,), (each,))), None)
                if number is None:
                    return None
                numbers.append((i, number))
                found[i] = None
        return Launch(kernel, tuple(found), tuple(numbers))

    def __call__(self, lengths: Lengths, *tensors: Tensor) -> None:
        rest = self.rest
        if self.lengths:
            given = list(rest)
            for i, number in self.lengths:
                given[i] = lengths[number]
            rest = tuple(given)
        self.kernel(*tensors, *rest)
        launch_trace.did(self.kernel, *tensors, *rest)


@dataclass(frozen=True)
class Forward:
    """The kernel of a `Call`, of tensors as `Call` has them."""

    launch: Launch

    def __call__(self, lengths: Lengths, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        self.launch(lengths, _plain(q), _plain(k), _plain(v), out, lse)


@dataclass(frozen=True)
class Backward:
    """The kernels of a `Call`'s backward, in order: `before` gives each row's sum of out * dout and its LSE, base 2, and zeros
    for dq; `main` the gradients, dq in fp32, and dk and dv too where several heads add to them; `after` rounds those."""

    before: Launch
    main: Launch
    after: tuple[Launch, ...]  # of dq, or of dq, dk and dv
    of_rows: tuple[int, ...]  # shapes of scratch, fp32
    of_queries: tuple[int, ...]
    of_keys: tuple[int, ...] | None  # where several heads add to a key's gradients

    def __call__(
        self,
        lengths: Lengths,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        sums, logs, wide_q = (
            torch.empty(shape, dtype=torch.float32, device=q.device)
            for shape in (self.of_rows, self.of_rows, self.of_queries)
        )
        wide = [wide_q]
        to_k, to_v = dk, dv
        if self.of_keys is not None:
            to_k, to_v = zeros((2, *self.of_keys), torch.float32, q.device).unbind(0)
            wide += [to_k, to_v]
        self.before(lengths, out, dout, sums, lse, logs, wide_q)
        self.main(lengths, _plain(q), _plain(k), _plain(v), dout, logs, sums, wide_q, to_k, to_v)
        for launch, given, grad in zip(self.after, wide, (dq, dk, dv), strict=False):
            launch(lengths, given, grad)


Known = Forward | Backward | None
R = TypeVar("R")


class _Watched:
    """In place of a function's compiled kernels while a thread's call is remembered."""

    def __init__(self, kernels: Any, launches: list[Launched], thread: int):
        self.kernels, self.launches, self.thread = kernels, launches, thread

    def __contains__(self, key: object) -> bool:
        return key in self.kernels

    def __setitem__(self, key: object, kernel: object) -> None:
        self.kernels[key] = kernel

    def __getitem__(self, key: object) -> Callable[..., object]:
        kernel: Callable[..., object] = self.kernels[key]
        if threading.get_ident() != self.thread:
            return kernel

        def launch(*arguments: Any) -> object:
            self.launches.append((kernel, arguments))
            result = kernel(*arguments)
            if any(_hides_tensor(x) for x in arguments):
                launch_trace.cannot("a kernel of FlashAttention-4 is given tensors within others")
            launch_trace.did(kernel, *arguments)
            return result

        return launch


class Remembered:
    """By shapes, strides and all else that the package's choice of a kernel depends on: its launches, or None where they are not
    of the known form."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.found: dict[object, Known] = {}
        self.lock = threading.Lock()
        self.usable = _version() == VERSION and all(
            hasattr(getattr(module, name, None), "compile_cache") for name in FUNCTIONS
        )
        self.functions = list({id(x): x for x in vars(module).values() if hasattr(x, "compile_cache")}.values())

    def call(self, key: object, run: Callable[[], R], of: Callable[[list[Launched]], Known]) -> R:
        """What `run` gives; what it launches is kept as `of` makes it where the key is new. None is no key."""
        new = key is not None and key not in self.found
        if not self.usable:
            launch_trace.cannot(f"a call went through FlashAttention-4's package, which is not {VERSION}")
            return run()
        if not (new or launch_trace.recording()):
            return run()
        result, launches = self.watched(run)
        if new:
            if len(self.found) >= MOST:
                self.found.clear()
            self.found[key] = of(launches)
        return result

    def watched(self, run: Callable[[], R]) -> tuple[R, list[Launched]]:
        """What `run` gives, and what it launches."""
        launches: list[Launched] = []
        with self.lock:
            before = [function.compile_cache for function in self.functions]
            try:
                for function, kernels in zip(self.functions, before, strict=True):
                    function.compile_cache = _Watched(kernels, launches, threading.get_ident())
                result = run()
            finally:
                for function, kernels in zip(self.functions, before, strict=True):
                    function.compile_cache = kernels
        return result, launches


def forward_of(launches: list[Launched], tensors: Sequence[Tensor], lengths: Lengths) -> Forward | None:
    """tensors: q, k, v, out and lse."""
    if len(launches) != 1:
        return None
    kernel, arguments = launches[0]
    launch = Launch.of(kernel, arguments[5:], lengths)
    return Forward(launch) if launch and _are(arguments[:5], tensors) else None


def backward_of(launches: list[Launched], tensors: Sequence[Tensor], lengths: Lengths) -> Backward | None:
    """tensors: q, k, v, out, dout, lse, dq, dk and dv."""
    if len(launches) not in (3, 5):
        return None
    q, k, v, out, dout, lse, dq, dk, dv = tensors
    (pre, a), (main, b), *after = launches
    shared = len(after) == 3
    if len(a) < 6 or len(b) < 9 or any(len(c) < 2 for _, c in after):
        return None
    sums, logs, wide_q = a[2], a[4], a[5]
    if not _all_tensors((sums, logs, wide_q, b[7], b[8])):
        return None
    given = [wide_q, b[7], b[8]] if shared else [wide_q]
    known = (
        _are((a[0], a[1], a[3]), (out, dout, lse))
        and _are(b[:7], (q, k, v, dout, logs, sums, wide_q))
        and (shared or _are(b[7:9], (dk, dv)))
        and all(_are(c[:2], pair) for (_, c), pair in zip(after, zip(given, (dq, dk, dv), strict=False), strict=True))
        and sums.shape == logs.shape
        and (not shared or b[7].shape == b[8].shape)
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in (sums, logs, *given))
    )
    first, second = Launch.of(pre, a[6:], lengths), Launch.of(main, b[9:], lengths)
    last = [found for kernel, c in after if (found := Launch.of(kernel, c[2:], lengths)) is not None]
    if not known or first is None or second is None or len(last) < len(after):
        return None
    return Backward(
        first, second, tuple(last), tuple(sums.shape), tuple(wide_q.shape), tuple(b[7].shape) if shared else None
    )


def forms(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Shapes, strides, dtypes, and whether they lie as the kernels want it; where they don't, the package copies them."""
    return tuple([(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED == 0) for x in tensors])


def _plain(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _are(arguments: Sequence[object], tensors: Sequence[Tensor]) -> bool:
    return len(arguments) == len(tensors) and all(
        isinstance(a, Tensor) and a.data_ptr() == x.data_ptr() and a.shape == x.shape and a.stride() == x.stride()
        for a, x in zip(arguments, tensors, strict=True)
    )


def _all_tensors(arguments: Sequence[object]) -> bool:
    return all(isinstance(a, Tensor) for a in arguments)


def _hides_tensor(x: object) -> bool:
    """Whether a tensor lies within."""
    within = x if isinstance(x, (tuple, list)) else vars(x).values() if is_dataclass(x) else ()
    return any(isinstance(each, Tensor) or _hides_tensor(each) for each in within)


def _version() -> str | None:
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None
