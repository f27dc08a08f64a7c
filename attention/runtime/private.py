"""All private interfaces of PyTorch, Triton, FlashAttention-4 and xformers that this library uses. Each is checked
once, at its first use. If it has changed, a warning names it and its replacement: a slower public way if there is one;
else the feature is refused."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import metadata
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from attention.errors import UnsupportedCall
from attention.runtime.submit import check_submitted

P = ParamSpec("P")
R = TypeVar("R")
StreamId = tuple[
    int, int, int
]  # a stream's number, its device's index, and the kind of device, as `torch.cuda.Stream` takes them


class Private(Generic[P, R]):
    """A private function, by name. find: returns it, or raises if it is missing or has changed. public: its
    replacement."""

    def __init__(self, name: str, find: Callable[[], Callable[P, R]], public: Callable[P, R], instead: str):
        self.name, self.find, self.public, self.instead = name, find, public, instead

    @cached_property
    def function(self) -> Callable[P, R]:
        try:
            return self.find()
        except Exception as error:
            warnings.warn(f"{self.name} is not as expected ({error}): {self.instead}", stacklevel=3)
            return self.public

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def _torch_c(name: str, *example: Any, gives: Callable[[Any], bool] = lambda _: True) -> Callable[[], Any]:
    """Finds `torch._C.<name>` and, with an example, calls it to check the result."""

    def find() -> Any:
        found = getattr(torch._C, name)
        if example:
            arguments = [x() if callable(x) else x for x in example]
            result = found(*arguments)
            if not gives(result):
                raise TypeError(f"it gives {result!r}")
        return found

    return find


def _is_stream_id(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3 and all(isinstance(each, int) for each in x)


def _public_stream_id(index: int) -> StreamId:
    stream = torch.cuda.current_stream(index)
    return stream.stream_id, stream.device_index, stream.device_type


def _public_set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


_SLOWER = "the slower {} is used instead"

current_device: Private[[], int] = Private(
    "torch._C._cuda_getDevice",
    lambda: cast(Callable[[], int], _torch_c("_cuda_getDevice")()),
    torch.cuda.current_device,
    _SLOWER.format("torch.cuda.current_device"),
)
set_device: Private[[int], None] = Private(
    "torch._C._cuda_setDevice",
    _torch_c("_cuda_setDevice"),
    torch.cuda.set_device,
    _SLOWER.format("torch.cuda.set_device"),
)
stream_id: Private[[int], StreamId] = Private(
    "torch._C._cuda_getCurrentStream",
    _torch_c("_cuda_getCurrentStream", lambda: current_device(), gives=_is_stream_id),
    _public_stream_id,
    _SLOWER.format("torch.cuda.current_stream"),
)
raw_stream: Private[[int], int] = Private(
    "torch._C._cuda_getCurrentRawStream",
    _torch_c("_cuda_getCurrentRawStream", lambda: current_device(), gives=lambda x: isinstance(x, int)),
    lambda index: torch.cuda.current_stream(index).cuda_stream,
    _SLOWER.format("torch.cuda.current_stream"),
)


def _find_set_stream() -> Callable[[int, int, int], None]:
    found = torch._C._cuda_setStream
    found(**dict(zip(("stream_id", "device_index", "device_type"), stream_id(current_device()), strict=True)))

    def set_stream(number: int, index: int, kind: int) -> None:
        found(stream_id=number, device_index=index, device_type=kind)

    return set_stream


set_stream: Private[[int, int, int], None] = Private(
    "torch._C._cuda_setStream", _find_set_stream, _public_set_stream, _SLOWER.format("torch.cuda.set_stream")
)
is_capturing: Private[[], bool] = Private(
    "torch._C._cuda_isCurrentStreamCapturing",
    _torch_c("_cuda_isCurrentStreamCapturing"),
    torch.cuda.is_current_stream_capturing,
    _SLOWER.format("torch.cuda.is_current_stream_capturing"),
)


def _find_end_pool() -> Callable[[int, Any], None]:
    end, release = torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool

    def end_pool(index: int, pool: Any) -> None:
        end(index, pool)
        release(index, pool)

    return end_pool


end_pool: Private[[int, Any], None] = Private(
    "torch._C._cuda_endAllocateToPool",
    _find_end_pool,
    lambda index, pool: None,
    "the memory of a CUDA graph whose capture broke is not given back",
)


def _find_transformed() -> Callable[[], bool]:
    active = torch._C._are_functorch_transforms_active
    if not isinstance(forward_ad._current_level, int):
        raise TypeError(f"torch.autograd.forward_ad._current_level is {forward_ad._current_level!r}")
    return lambda: forward_ad._current_level >= 0 or active()


# within forward-mode differentiation or a function transform
transformed: Private[[], bool] = Private(
    "torch._C._are_functorch_transforms_active",
    _find_transformed,
    lambda: True,
    "a call without gradients goes through autograd, too",
)
# `torch.compiler.disable` imports the compiler: that takes seconds, and after `init_process_group` holds on to the
# process group
disable_dynamo: Private[[Callable[..., Any]], Callable[..., Any]] = Private(
    "torch._disable_dynamo",
    lambda: cast(Callable[[Callable[..., Any]], Callable[..., Any]], torch._disable_dynamo),
    torch.compiler.disable,
    _SLOWER.format("torch.compiler.disable"),
)


def default_group() -> dist.ProcessGroup:
    """The default process group. Raises ValueError if there is none, as the public functions do."""
    return _default_group()


_default_group: Private[[], dist.ProcessGroup] = Private(
    "torch.distributed.distributed_c10d._get_default_group",
    lambda: dist.distributed_c10d._get_default_group,
    lambda: cast(dist.ProcessGroup, dist.group.WORLD),
    "torch.distributed.group.WORLD is used instead",
)


def _named_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend from a configuration such as "cpu:gloo,cuda:nccl"."""
    found = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    if device.type not in found:
        raise RuntimeError(f"the group has no backend for {device.type}")
    return found[device.type]


def _find_backend() -> Callable[[dist.ProcessGroup, torch.device], str]:
    if not callable(getattr(dist.ProcessGroup, "_get_backend", None)):
        raise AttributeError("ProcessGroup has no such method")
    return lambda group, device: str(group._get_backend(device).name())


# the backend for the group's tensors on that device: "gloo", "nccl" or another; raises RuntimeError if there is none
backend: Private[[dist.ProcessGroup, torch.device], str] = Private(
    "ProcessGroup._get_backend", _find_backend, _named_backend, "the group's configuration is read instead"
)


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's current timeout for operations on that device."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # gloo before some version has no options: no reason for a warning
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def symmetric_memory() -> Any:
    """The module `torch.distributed._symmetric_memory`. Raises RuntimeError if it has changed; there is no public
    one."""
    try:
        import torch.distributed._symmetric_memory as found
    except ImportError as error:
        raise RuntimeError(
            f"torch.distributed._symmetric_memory does not import ({error}); use transport=nccl"
        ) from error
    missing = [name for name in ("empty", "rendezvous") if not callable(getattr(found, name, None))]
    if missing:
        raise RuntimeError(f"torch.distributed._symmetric_memory has no {missing[0]}; use transport=nccl")
    return found


@lru_cache
def aten(name: str) -> Callable[..., Any]:
    """The operator `torch.ops.aten.<name>`, whose name is private. Raises UnsupportedCall if this PyTorch lacks it."""
    try:
        return cast(Callable[..., Any], getattr(torch.ops.aten, name))
    except AttributeError:
        raise UnsupportedCall(f"PyTorch {torch.__version__} has no operator aten::{name}; use another kernel") from None


@lru_cache(maxsize=1)
def inductor_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the compiler when it finds no kernel; empty if they have another name."""
    try:
        from torch._inductor.exc import InductorError
    except ImportError as error:
        _warn_once(
            "torch._inductor.exc.InductorError",
            f"{error}",
            "a call that can't be compiled fails with the compiler's error",
        )
        return ()
    return (InductorError,)


def _public_sleep(cycles: int) -> None:
    side = 2048
    x = torch.zeros(side, side, device="cuda")
    for _ in range(max(1, cycles // 1_000_000)):  # some 0.5 ms each
        x = x @ x


# keeps the current stream busy for so many GPU cycles
sleep_cycles: Private[[int], None] = Private(
    "torch.cuda._sleep", lambda: torch.cuda._sleep, _public_sleep, "matrix products keep the GPU busy instead"
)


@lru_cache(maxsize=1)
def profile_all_threads() -> dict[str, Any]:
    """Arguments that make `torch.profiler.profile` record all threads; empty if it has no such option."""
    try:
        return {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
    except (AttributeError, TypeError) as error:
        _warn_once("torch._C._profiler._ExperimentalConfig", f"{error}", "the profile lacks the threads of transports")
        return {}


# Triton


@lru_cache(maxsize=1)
def _triton_knobs() -> Any | str | None:
    """`triton.knobs.runtime`, whose launch hooks are chains of functions; a string if it has changed; None without
    Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    try:
        for name in ("launch_enter_hook", "launch_exit_hook"):
            chain = getattr(knobs.runtime, name)
            if not (isinstance(chain.calls, list) and callable(chain.add) and callable(chain.remove)):
                raise TypeError(f"{name} is no chain of hooks")
    except (AttributeError, TypeError) as error:
        return str(error)
    return knobs.runtime


def profiled() -> bool:
    """Whether a profiler, or anything else outside this module, hooks Triton's launches; True if that is unknown."""
    knobs = _triton_knobs()
    if isinstance(knobs, str):
        _warn_once("triton.knobs.runtime", knobs, "kernels are launched through Triton's Python, slower")
        return True
    if knobs is None:
        return False
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        calls = getattr(hook, "calls", (hook,))
        if calls and any(call is not _triton_launched for call in calls):
            return True
    return False


def _triton_launched(launch: Any) -> None:
    try:
        name = launch.get()["name"]
    except (AttributeError, KeyError, TypeError):
        name = "of unknown name"
    check_submitted(f"the Triton kernel {name}")


_watchers = 0
_watching = threading.Lock()


@contextmanager
def triton_launches_watched(refuse: Callable[[str], None]) -> Iterator[None]:
    """Within the context, a launch by Triton that bypasses `submit` ends this thread's recording. refuse: called if
    launches cannot be watched."""
    global _watchers
    knobs = _triton_knobs()
    if knobs is None:
        yield
        return
    if isinstance(knobs, str):
        refuse(f"Triton's launches can't be watched: triton.knobs.runtime: {knobs}")
        yield
        return
    hook = knobs.launch_enter_hook
    with _watching:
        _watchers += 1
        hook.add(_triton_launched)
    try:
        yield
    finally:
        with _watching:
            _watchers -= 1
            if not _watchers:
                hook.remove(_triton_launched)


@lru_cache(maxsize=1)
def _run_is_known() -> bool:
    """Whether a compiled kernel's `run` takes the arguments of `triton_run`, judged by Triton's own call of it."""
    try:
        from triton.compiler import CompiledKernel

        source = "".join(inspect.getsource(CompiledKernel.__getitem__).split())
    except Exception as error:
        _warn_once("triton.compiler.CompiledKernel", f"{error}", "kernels are launched through Triton's Python, slower")
        return False
    wanted = (
        "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata,"
        "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)"
    )
    if wanted not in source:
        _warn_once(
            "triton.compiler.CompiledKernel.run",
            "its arguments have another order",
            "kernels are launched through Triton's Python, slower",
        )
    return wanted in source


def triton_run(compiled: Any, grid: Sequence[int], stream: int) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """(a function that launches a compiled kernel without Triton's Python, its arguments before those of the kernel).
    None while launches are profiled, or if `run` has changed."""
    if not _run_is_known() or profiled():
        return None
    return compiled.run, (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None)


# FlashAttention-4 and xformers

FLASH4_VERSION = "4.0.0b36"
FLASH4_FUNCTIONS = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")


def flash4_caches(module: ModuleType) -> list[Any] | str:
    """The functions of `flash_attn.cute.interface` that keep their compiled kernels in `compile_cache`, or why their
    launches can't be recorded."""
    installed = _version("flash-attn-4")
    if installed != FLASH4_VERSION:
        return f"a call went through flash-attn-4 {installed}; launches of {FLASH4_VERSION} alone are recorded"
    for name in FLASH4_FUNCTIONS:
        if not hasattr(getattr(module, name, None), "compile_cache"):
            return f"flash-attn-4 {installed}: {name} has no compile_cache"
    return list({id(x): x for x in vars(module).values() if hasattr(x, "compile_cache")}.values())


def xformers_without_cuda(library: Any) -> str | None:
    """Why the operators of `xformers._cpp_lib` refuse every call, or None; also where nobody can tell."""
    try:
        if library._built_with_cuda:
            return None
        return " ".join(str(library._cpp_library_load_exception).split("\n  ")[:2])
    except AttributeError as error:
        _warn_once("xformers._cpp_lib", f"{error}", "whether it was built for CUDA shows at the first call")
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@lru_cache
def _warn_once(name: str, what: str, instead: str) -> None:
    warnings.warn(f"{name} is not as expected ({what}): {instead}", stacklevel=3)
