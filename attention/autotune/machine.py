"""`make("auto")`: describes the task and this machine to the model, and times its first choices on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from attention import kernels, transports
from attention.arguments import check_softcap
from attention.autotune.choice import Choice, Estimate, Task, check_trials
from attention.autotune.hardware import Ceilings, Machine
from attention.autotune.model import choose, task_of
from attention.autotune.trials import by_trial
from attention.geometry.counts import Shapes
from attention.kernels import Shape
from attention.measured import links, rates
from attention.tensors import on_host

if TYPE_CHECKING:
    from attention.api import ContextParallel


@dataclass(frozen=True)
class AutoRequest:
    """The options of `make("auto")`; None: the default. A dense batch gives `tokens`, a packed one `cu_seqlens`."""

    tokens: int | None = None  # of a sequence
    cu_seqlens: torch.Tensor | Sequence[int] | None = None  # the global ones
    batch: int | None = None  # 1
    heads: int | None = None  # must be given
    kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # must be given
    v_head_dim: int | None = None  # head_dim
    dtype: torch.dtype | None = None  # torch.bfloat16
    causal: bool | None = False
    window: tuple[int, int] | None = None
    backward: bool | None = True
    q_tokens: int | None = None  # queries of a decode
    softcap: float | None = None
    device: torch.device | str | None = None  # CUDA if there is one
    memory_gb: float | None = None  # that a rank may hold besides its inputs; all of a GPU's
    ceilings: Ceilings | None = None  # in place of measured links, and of the rates of a GPU without any
    graphed: bool | None = False  # the caller captures whole calls in a CUDA graph
    replay: str = "none"  # as for `make`, as is `deterministic`
    trials: int | None = None  # how many variants, at least 2, are timed on random inputs
    deterministic: bool | None = False


KNOWN = [field.name for field in fields(AutoRequest)]


def decide(
    group: dist.ProcessGroup | None,
    kernel: str,
    transport: str,
    given: dict[str, Any],
    build: Callable[[Estimate], ContextParallel],
) -> Choice:
    """The choice for `given` options of `make("auto")`, which are those of `AutoRequest`. Every rank must give the same ones,
    on GPUs of one kind. On CUDA it is collective, since ranks try whether they can read each other's memory. Trials
    (`trials.by_trial`) take some seconds. What they exchange through is kept until `transports.release()`, as for any
    call.

    build: makes the function of an estimate, for trials.
    Raises ValueError for options that are missing, unknown or impossible."""
    asked = _checked(given)
    dtype = asked.dtype or torch.bfloat16
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    packed, heads, head_dim = asked.cu_seqlens, cast(int, asked.heads), cast(int, asked.head_dim)
    cu_seqlens = (0, cast(int, asked.tokens)) if packed is None else packed
    task = task_of(
        on_host(cu_seqlens) if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens,
        dist.get_world_size(group) if dist.is_initialized() else 1,
        Shapes(asked.batch or 1, heads, asked.kv_heads or heads, head_dim, dtype.itemsize, asked.v_head_dim),
        bool(asked.causal),
        asked.window or (-1, -1),
        packed is not None,
        bool(asked.backward),
        asked.q_tokens,
        check_softcap(asked.softcap),
    )
    choice = choose(task, machine(task, asked, device, dtype, group, kernel, transport))
    if asked.trials is None:
        return choice
    return by_trial(choice, asked.trials, task, build, device=device, dtype=dtype)


def _checked(given: dict[str, Any]) -> AutoRequest:
    for option, value in given.items():
        if option not in KNOWN:
            raise ValueError(f"{option}={value!r}: auto has no such option; its options: {', '.join(KNOWN)}")
    asked = AutoRequest(**given)
    missing = [name for name in ("heads", "head_dim") if getattr(asked, name) is None]
    if (asked.tokens is None) == (asked.cu_seqlens is None):
        missing.insert(0, "tokens or else cu_seqlens")
    if missing:
        raise ValueError(
            f"attention.make('auto'): {', '.join(missing)}: must be given, since the layout of the tensors follows from "
            "the shapes; for instance tokens=32768, heads=32, kv_heads=8, head_dim=128, causal=True"
        )
    check_trials(asked.trials)
    if asked.trials is not None and asked.graphed:
        raise ValueError(
            f"trials={asked.trials!r}: calls are tried as launched one by one, not captured whole; use trials=None"
        )
    return asked


def machine(
    task: Task,
    asked: AutoRequest,
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    kernel: str,
    transport: str,
) -> Machine:
    """This machine, with those of the requested kernel and transports that work here for the task."""
    sizes, cuda, local = task.shapes, device.type == "cuda", task.q_tokens or task.tokens
    value_dim = None if sizes.v_head_dim == sizes.head_dim else sizes.v_head_dim
    shape = Shape(
        device.type, dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, task.packed, task.backward, local,
        value_dim, task.softcap is not None,
    )  # fmt: skip
    if task.world > 1:
        works = transports.select(transport, device, group).name
    else:
        works = transports.resolve(transport, device)
    nccl = ["nccl"] if cuda and transport == "auto" and works != "nccl" else []
    memory: float | None = torch.cuda.get_device_properties(device).total_memory if cuda else None
    return Machine(
        gpu=kernels.gpu_name() if cuda else "",
        kernel=lambda masks: kernels.select(kernel, shape, masks, task.decode).name,
        transports=(works, *nccl),
        rates=rates.table(),
        links=() if asked.ceilings else links.table(),
        device="cuda" if cuda else "cpu",
        memory=memory if asked.memory_gb is None else asked.memory_gb * 1e9,
        ceilings=asked.ceilings,
        graphed=bool(asked.graphed),
        replayed="auto" if asked.replay == "auto" else asked.replay == "graphs",
    )


def known(device: torch.device) -> bool:
    """Whether the tables have this machine's GPU, so that its ceilings are not needed."""
    name = kernels.gpu_name() if device.type == "cuda" else ""
    return any(r.gpu == name for r in rates.table()) and any(m.gpu == name for m in links.table())
