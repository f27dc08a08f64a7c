"""All private interfaces of PyTorch, Triton, flash-attn and xformers that this library uses. Each is checked once, at
its first use. If it has changed, a warning names it and what is done instead, or the feature is refused."""

from __future__ import annotations

import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from attention.errors import UnsupportedCall

P = ParamSpec("P")
R = TypeVar("R")
StreamId = tuple[int, int, int]  # stream_id, device_index and device_type, as `torch.cuda.Stream` takes them


class Private(Generic[P, R]):
    """A private interface as a function.

    name: where it is. public: the slower function that replaces it; None: it is refused with a RuntimeError. instead:
    what the warning or the error says. check: makes the function from the interface, and raises if that has changed."""

    def __init__(
        self,
        name: str,
        public: Callable[P, R] | None,
        instead: str = "",
        check: Callable[[Any], Callable[P, R]] = lambda found: found,
    ):
        self.name, self.public, self.check = name, public, check
        self.instead = instead or f"the slower {public.__module__}.{public.__name__} is used instead"  # type: ignore[union-attr]

    @cached_property
    def function(self) -> Callable[P, R]:
        try:
            return self.check(pkgutil.resolve_name(self.name))
        except Exception as error:
            message = f"{self.name} is not as expected ({error}): {self.instead}"
            if self.public is None:
                raise RuntimeError(message) from error
            warnings.warn(message, stacklevel=3)
            return self.public

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def lacks(module: Any, *names: str) -> str | None:
    """Which of the names the module does not have, as a message, or None."""
    missing = [name for name in names if not hasattr(module, name)]
    return f"{getattr(module, '__name__', module)} has no {missing[0]}" if missing else None


def _returns(right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Checks a function by its result for the current device."""

    def check(found: Any) -> Any:
        result = found(current_device())
        if not right(result):
            raise TypeError(f"it gives {result!r}")
        return found

    return check


def module_with(*names: str) -> Callable[[Any], Callable[[], Any]]:
    """Checks that a module has these names."""

    def check(module: Any) -> Callable[[], Any]:
        missing = lacks(module, *names)
        if missing:
            raise AttributeError(missing)
        return lambda: module

    return check


# devices and streams


def _public_stream_id(index: int) -> StreamId:
    stream = torch.cuda.current_stream(index)
    return stream.stream_id, stream.device_index, stream.device_type


_SLOWER = "the slower torch.cuda.{}_stream is used instead"
current_device: Private[[], int] = Private("torch._C._cuda_getDevice", torch.cuda.current_device)
set_device: Private[[int], None] = Private("torch._C._cuda_setDevice", torch.cuda.set_device)
is_capturing: Private[[], bool] = Private(
    "torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
stream_id: Private[[int], StreamId] = Private(
    "torch._C._cuda_getCurrentStream",
    _public_stream_id,
    _SLOWER.format("current"),
    _returns(lambda x: isinstance(x, tuple) and [isinstance(each, int) for each in x] == [True] * 3),
)
raw_stream: Private[[int], int] = Private(
    "torch._C._cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
    _SLOWER.format("current"),
    _returns(lambda x: isinstance(x, int)),
)


def _stream_setter(found: Any) -> Callable[[int, int, int], None]:
    def set_stream(number: int, index: int, kind: int) -> None:
        found(stream_id=number, device_index=index, device_type=kind)

    set_stream(*stream_id(current_device()))
    return set_stream


set_stream: Private[[int, int, int], None] = Private(
    "torch._C._cuda_setStream",
    lambda number, index, kind: torch.cuda.set_stream(
        torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
    ),
    _SLOWER.format("set"),
    _stream_setter,
)


def _pool_ender(end: Any) -> Callable[[int, Any], None]:
    release = torch._C._cuda_releasePool

    def end_pool(index: int, pool: Any) -> None:
        end(index, pool)
        release(index, pool)

    return end_pool


end_pool: Private[[int, Any], None] = Private(
    "torch._C._cuda_endAllocateToPool",
    lambda index, pool: None,
    "the memory of a CUDA graph whose capture broke is not given back",
    _pool_ender,
)


def _public_sleep(cycles: int) -> None:
    x = torch.zeros(2048, 2048, device="cuda")
    for _ in range(max(1, cycles // 1_000_000)):  # some 0.5 ms each
        x = x @ x


# keeps the current stream busy for so many GPU cycles
sleep_cycles: Private[[int], None] = Private(
    "torch.cuda._sleep", _public_sleep, "matrix products keep the GPU busy instead"
)

# autograd, the compiler, the profiler

is_view: Private[[torch.Tensor], bool] = Private(
    "torch.Tensor._is_view", lambda x: True, "each result of a call without gradients is detached from its base"
)


def _transforms(active: Any) -> Callable[[], bool]:
    if not isinstance(forward_ad._current_level, int):
        raise TypeError(f"torch.autograd.forward_ad._current_level is {forward_ad._current_level!r}")
    return lambda: forward_ad._current_level >= 0 or active()


# within forward-mode differentiation or a function transform
transformed: Private[[], bool] = Private(
    "torch._C._are_functorch_transforms_active",
    lambda: False,
    "a call within one fails with PyTorch's own error",
    _transforms,
)
# `torch.compiler.disable` imports the compiler. That takes seconds, and after `init_process_group` it keeps the
# process group alive.
disable_dynamo: Private[[Callable[..., Any]], Callable[..., Any]] = Private(
    "torch._disable_dynamo", torch.compiler.disable
)
# the compiler's exceptions when it finds no kernel
inductor_errors: Private[[], tuple[type[Exception], ...]] = Private(
    "torch._inductor.exc.InductorError",
    lambda: (),
    "a call that can't be compiled fails with the compiler's error",
    lambda error: lambda: (error,),
)
# arguments that make `torch.profiler.profile` record all threads
profile_all_threads: Private[[], dict[str, Any]] = Private(
    "torch._C._profiler._ExperimentalConfig",
    dict,
    "the profile lacks the threads of transports",
    lambda config: partial(dict, experimental_config=config(profile_all_threads=True)),
)


@lru_cache
def aten(name: str) -> Callable[..., Any]:
    """The operator `torch.ops.aten.<name>`, whose name is private. Raises UnsupportedCall if this PyTorch lacks it."""
    try:
        return cast(Callable[..., Any], getattr(torch.ops.aten, name))
    except AttributeError:
        raise UnsupportedCall(f"PyTorch {torch.__version__} has no operator aten::{name}; use another kernel") from None


def with_own_code(function: Any, name: str) -> FunctionType:
    """A copy of the function with a code object of its own, since PyTorch limits the compilations per code object."""
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__)


# process groups

# raises ValueError if there is none, as the public functions do
default_group: Private[[], dist.ProcessGroup] = Private(
    "torch.distributed.distributed_c10d._get_default_group",
    lambda: cast(dist.ProcessGroup, dist.group.WORLD),
    "torch.distributed.group.WORLD is used instead",
)


def _named_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend from a configuration such as "cpu:gloo,cuda:nccl"."""
    found = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    if device.type not in found:
        raise RuntimeError(f"the group has no backend for {device.type}")
    return found[device.type]


# the backend for the group's tensors on that device: "gloo", "nccl" or another; raises RuntimeError if there is none
backend: Private[[dist.ProcessGroup, torch.device], str] = Private(
    "torch.distributed.ProcessGroup._get_backend",
    _named_backend,
    "the group's configuration is read instead",
    lambda get: lambda group, device: str(get(group, device).name()),
)


def _has_store(get: Callable[[dist.ProcessGroup], Any]) -> Callable[[dist.ProcessGroup], dist.Store | None]:
    missing = lacks(dist.Store, "multi_get", "compare_set", "delete_key")
    if missing:
        raise AttributeError(missing)
    return get


def _no_store(group: dist.ProcessGroup) -> dist.Store | None:
    return None


# the group's key-value store; None if it can't be had
store: Private[[dist.ProcessGroup], dist.Store | None] = Private(
    "torch.distributed.distributed_c10d._get_process_group_store",
    _no_store,
    "ranks that ask for different plans are not found",
    _has_store,
)


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's current timeout for operations on that device."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # older versions of gloo have no options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


symmetric_memory: Private[[], Any] = Private(
    "torch.distributed._symmetric_memory", None, "use transport=nccl", module_with("empty", "rendezvous")
)
# Triton


def _hooks_of(runtime: Any) -> Callable[[], bool]:
    """Launch hooks are chains of functions."""
    for name in ("launch_enter_hook", "launch_exit_hook"):
        if not isinstance(getattr(runtime, name).calls, list):
            raise TypeError(f"{name} is no chain of hooks")
    return lambda: any(getattr(x, "calls", x) for x in (runtime.launch_enter_hook, runtime.launch_exit_hook))


# whether a profiler, or anything else, hooks Triton's launches
profiled: Private[[], bool] = Private(
    "triton.knobs.runtime", lambda: True, "kernels are launched through Triton's Python, slower", _hooks_of
)


def _launch_by_triton(compiled: Any, grid: Sequence[int], stream: int, *arguments: Any) -> None:
    compiled[grid](*arguments)


_RUN = (
    "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)"
)


def _launcher_of(kernel: Any) -> Callable[..., None]:
    """Judges the arguments of `run` by Triton's own call of it."""
    if _RUN not in "".join(inspect.getsource(kernel.__getitem__).split()):
        raise TypeError("the arguments of run have another order")

    def launch(compiled: Any, grid: Sequence[int], stream: int, *arguments: Any) -> None:
        if profiled():
            _launch_by_triton(compiled, grid, stream, *arguments)
        else:
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    return launch


# launches a compiled kernel on the raw stream, the current one, without Triton's Python unless launches are profiled
launch_compiled: Private[..., None] = Private(
    "triton.compiler.CompiledKernel",
    _launch_by_triton,
    "kernels are launched through Triton's Python, slower",
    _launcher_of,
)

# modules of other packages


@contextmanager
def replaced_modules(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Within the context, importing one of the dotted names gives this module, or with None fails. A module is an attribute of
    its package where both are given. Afterwards sys.modules is as before."""
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if modules.get(package) is not None:
            setattr(modules[package], last, module)
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(cast(dict[str, ModuleType], modules))
    try:
        yield
    finally:
        for name in modules:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


class Functions:
    """Private functions of a package. names: by the name that we use, its own name and the parameters that we give by keyword.
    instead: what is done where they are others."""

    def __init__(self, instead: str, **names: tuple[str, ...]):
        self.instead, self.names = instead, names

    def of(self, module: Any) -> SimpleNamespace:
        return SimpleNamespace(**{ours: getattr(module, name) for ours, (name, *_) in self.names.items()})

    def wrong(self, module: Any) -> str | None:
        """What is not as expected in the module and what is done instead, or None."""
        return (_wrong if isinstance(module, ModuleType) else _wrong.__wrapped__)(self, module)


@lru_cache(maxsize=64)
def _wrong(functions: Functions, module: Any) -> str | None:
    for name, *parameters in functions.names.values():
        found = lacks(module, name)
        if found is None:
            taken = _parameters(getattr(module, name))
            gone = [x for x in parameters if taken is not None and x not in taken]
            found = f"{module.__name__}.{name} has no parameter {gone[0]}" if gone else None
        if found:
            return f"{found}: {functions.instead}"
    return None


def _parameters(function: Any) -> set[str] | None:
    """The names of a function's parameters; None where any may be given, or the function does not tell."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return None if any(x.kind is x.VAR_KEYWORD for x in found.values()) else set(found)


_BAND = ("softmax_scale", "causal", "window_size_left", "window_size_right")
_FLASH2 = (*_BAND, "dropout_p", "softcap", "alibi_slopes")
FLASH2 = Functions(
    "PyTorch's own FlashAttention-2 is used instead",
    forward=("_flash_attn_forward", *_FLASH2, "return_softmax"),
    varlen_forward=("_flash_attn_varlen_forward", *_FLASH2, "return_softmax"),
    backward=("_flash_attn_backward", *_FLASH2, "deterministic"),
    varlen_backward=("_flash_attn_varlen_backward", *_FLASH2, "deterministic"),
)
FLASH3 = Functions(
    "kernel=flash3 is refused",
    forward=("_flash_attn_forward", *_BAND),
    backward=("_flash_attn_backward", "dq", "dk", "dv", "softmax_scale", "is_causal", "deterministic"),
)
FLASH4 = Functions("kernel=flash4 is refused", forward=("_flash_attn_fwd",), backward=("_flash_attn_bwd",))
CUDNN_FLEX = Functions(
    "kernel=cudnn_flex is refused",
    forward=("_flex_attention_forward", "mask_plan", "softmax_scale", "return_lse"),
    backward=("_flex_attention_backward", "mask_plan", "softmax_scale", "deterministic"),
)

FLASH4_VERSION = "4.0.0b36"


# the arguments of xformers' FlashAttention-2 operators
XFORMERS = {
    "FwOp": "query key value cu_seqlens_q cu_seqlens_k seqused_k max_seqlen_q max_seqlen_k p softmax_scale is_causal "
    "window_left window_right return_softmax block_tables",
    "BwOp": "grads_share_storage grad query key value out lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k p softmax_scale "
    "is_causal window_left window_right rng_state",
}


def other_arguments(operator: Any, names: str) -> str | None:
    """The arguments of an operator as a message, if they are not these; None if they are."""
    found = " ".join(x.name for x in operator.default._schema.arguments)
    return None if found == names else f"{operator} takes {found}, not {names}"
