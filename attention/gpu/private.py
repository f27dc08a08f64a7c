"""All private interfaces of PyTorch, Triton, flash-attn and xformers that this library uses. Each is checked once, at
its first use. If it has changed, a warning names it and what is done instead, or the feature is refused."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from attention.errors import UnsupportedCall

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Private(Generic[P, R]):
    """A private interface as a function.

    name: where it is. public: the function that replaces it; None: it is refused with a RuntimeError. instead: what the
    warning or the error says. adapt: makes the function from the interface, and raises if that has changed."""

    name: str
    public: Callable[P, R] | None = None
    instead: str = "install a PyTorch that pyproject.toml allows"
    adapt: Callable[[Any], Callable[P, R]] = lambda interface: interface

    @cached_property
    def function(self) -> Callable[P, R]:
        try:
            return self.adapt(pkgutil.resolve_name(self.name))
        except Exception as error:
            message = f"{self.name} is not as expected ({error}): {self.instead}"
            if self.public is None:
                raise RuntimeError(message) from error
            warnings.warn(message, stacklevel=3)
            return self.public

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


# devices and streams


current_device = Private("torch._C._cuda_getDevice", torch.cuda.current_device, "its public form is used")
# stream_id, device_index and device_type, as `torch.cuda.Stream` takes them
stream_id: Private[[int], tuple[int, int, int]] = Private("torch._C._cuda_getCurrentStream")
set_stream: Private[[int, int, int], None] = Private("torch._C._cuda_setStream")
raw_stream: Private[[int], int] = Private("torch._C._cuda_getCurrentRawStream")
end_allocation: Private[[int, Any], None] = Private("torch._C._cuda_endAllocateToPool")
release_pool: Private[[int, Any], None] = Private("torch._C._cuda_releasePool")
# keeps the current stream busy for so many GPU cycles
sleep_cycles: Private[[int], None] = Private("torch.cuda._sleep", None, "the GPU can't be kept busy")

# autograd, the compiler, the profiler

is_view: Private[[torch.Tensor], bool] = Private(
    "torch.Tensor._is_view", lambda x: True, "each result of a call without gradients is detached from its base"
)
# within forward-mode differentiation or a function transform
transformed: Private[[], bool] = Private(
    "torch._C._are_functorch_transforms_active",
    lambda: False,
    "a call within one fails with PyTorch's own error",
    lambda active: lambda: forward_ad._current_level >= 0 or active(),
)
# `torch.compiler.disable` imports the compiler. That takes seconds, and after `init_process_group` it keeps the
# process group alive.
disable_dynamo: Private[[Callable[..., Any]], Callable[..., Any]] = Private(
    "torch._disable_dynamo", torch.compiler.disable, "calls start more slowly"
)


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.compiler.assume_constant_result`, which imports the compiler, too."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def eager_autograd() -> Any:
    """A context for eager operations within an operator of a compiled graph, where autograd and its views are switched off."""
    key, include = torch._C.DispatchKey, torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(include, torch._C.DispatchKeySet(key.AutocastCPU).add(key.AutocastCUDA))


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
    """The operator `torch.ops.aten.<name>`, whose name is private, by its own binding where it has one, which is faster. Raises
    UnsupportedCall if this PyTorch lacks it."""
    try:
        return cast(Callable[..., Any], getattr(torch, name, None) or getattr(torch.ops.aten, name))
    except AttributeError:
        raise UnsupportedCall(f"PyTorch {torch.__version__} has no operator aten::{name}; use another kernel") from None


def with_own_code(function: Any, name: str) -> FunctionType:
    """A copy of the function with a code object of its own, since PyTorch limits the compilations per code object."""
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__)


# process groups


def default_group() -> dist.ProcessGroup:
    """Raises ValueError if there is none, as PyTorch's functions do."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError("the default process group has not been initialized; call init_process_group first")
    return group


def backend(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend for the group's tensors on that device: "gloo", "nccl" or another; None if there is none."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device.type)


# the group's key-value store; None if it can't be had
store: Private[[dist.ProcessGroup], dist.Store | None] = Private(
    "torch.distributed.distributed_c10d._get_process_group_store",
    lambda group: None,
    "ranks that ask for different plans are not found",
)


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's current timeout for operations on that device."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # older versions of gloo have no options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


symmetric_empty: Private[..., torch.Tensor] = Private(
    "torch.distributed._symmetric_memory.empty", None, "use transport=nccl"
)
symmetric_rendezvous: Private[..., Any] = Private(
    "torch.distributed._symmetric_memory.rendezvous", None, "use transport=nccl"
)

# Triton


def _launch_by_triton(compiled: Any, grid: Sequence[int], stream: int, *arguments: Any) -> None:
    compiled[grid](*arguments)


_RUN = (
    "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)"
)


def _launcher(triton: Any) -> Callable[..., None]:
    """Judges the arguments of `run` by Triton's own call of it. A profiler, or anything else, may hook launches."""
    if _RUN not in "".join(inspect.getsource(triton.compiler.CompiledKernel.__getitem__).split()):
        raise TypeError("the arguments of CompiledKernel.run have another order")
    runtime = triton.knobs.runtime

    def launch(compiled: Any, grid: Sequence[int], stream: int, *arguments: Any) -> None:
        if any(getattr(hooks, "calls", True) for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook)):
            _launch_by_triton(compiled, grid, stream, *arguments)
        else:
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    return launch


# launches a compiled kernel on the raw stream, the current one, without Triton's Python unless launches are profiled
launch_compiled = Private(
    "triton", _launch_by_triton, "kernels are launched through Triton's Python, slower", _launcher
)

# modules of other packages


@contextmanager
def replaced(mapping: MutableMapping[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, the mapping has these entries; afterwards it is as before. In sys.modules, importing one of the
    dotted names gives this module, or with None fails."""
    before = {name: mapping[name] for name in entries if name in mapping}
    mapping.update(entries)
    try:
        yield
    finally:
        for name in entries:
            mapping.pop(name, None)
        mapping.update(before)


class Functions:
    """Private functions of a package. names: by the name that we use, its own name and the parameters that we give by keyword.
    instead: what is done where they are others."""

    def __init__(self, instead: str, **names: tuple[str, ...]):
        self.instead, self.names = instead, names

    def of(self, module: Any) -> SimpleNamespace:
        return SimpleNamespace(**{ours: getattr(module, name) for ours, (name, *_) in self.names.items()})

    def wrong(self, module: Any) -> str | None:
        """What is not as expected in the module and what is done instead, or None."""
        for name, *parameters in self.names.values():
            if not hasattr(module, name):
                return f"{module.__name__} has no {name}: {self.instead}"
            try:
                signature = inspect.signature(getattr(module, name))
            except (TypeError, ValueError):  # the function does not tell its parameters
                continue
            try:
                signature.bind_partial(**dict.fromkeys(parameters))
            except TypeError as error:
                return f"{module.__name__}.{name} {error}: {self.instead}"
        return None


FLASH3 = Functions(
    "kernel=flash3 is refused",
    forward=("_flash_attn_forward", "softmax_scale", "causal", "window_size_left", "window_size_right"),
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
    arguments = " ".join(x.name for x in operator.default._schema.arguments)
    return None if arguments == names else f"{operator} takes {arguments}, not {names}"
