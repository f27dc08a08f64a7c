"""`make("auto")`: describes the task and this machine to the model, and times its first choices on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from attention import kernels, transports
from attention.autotune.choice import Choice, Estimate, Task, check_trials
from attention.autotune.hardware import Machine
from attention.autotune.model import choose, task_of
from attention.autotune.trials import by_trial
from attention.geometry.counts import Shapes
from attention.kernels import Shape
from attention.measured import links, rates
from attention.tensors import on_host

if TYPE_CHECKING:
    from attention.api import ContextParallel

NEEDED = ("heads", "head_dim")  # and tokens or cu_seqlens
KNOWN = (
    "tokens", "cu_seqlens", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "window", "backward", "q_tokens",
    "device", "memory_gb", "ceilings", "graphed", "replay", "trials", "deterministic",
)  # fmt: skip


def decide(
    group: dist.ProcessGroup | None,
    kernel: str,
    transport: str,
    given: dict[str, Any],
    build: Callable[[Estimate], ContextParallel],
) -> Choice:
    """The choice for options of `make("auto")`. Every rank must give the same ones, on GPUs of one kind. On CUDA it is
    collective, since ranks try whether they can read each other's memory.

    given: `tokens` of a sequence or a packed batch's global `cu_seqlens`; `heads`, `head_dim`. Optional, with defaults:
    `kv_heads` (heads), `batch` (1), `dtype` (torch.bfloat16), `causal` (False), `window`, `backward` (True), `q_tokens`
    of a decode, `device` (CUDA if there is one), `memory_gb` that a rank may hold besides its inputs (all of the
    GPU's), `ceilings` in place of measured links, and of the rates of a GPU without any, `graphed` if the caller
    captures whole calls in a CUDA graph, `replay` and `deterministic` as for `make`. `trials`: how many variants, at
    least 2, are timed on random inputs (`trials.by_trial`). That takes some seconds. What they exchange through is kept
    until `transports.release()`, as for any call.
    build: makes the function of an estimate, for trials.
    Raises ValueError for options that are missing, unknown or impossible."""
    _check(given)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    dtype: torch.dtype = given.get("dtype") or torch.bfloat16
    device = torch.device(given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = _task(given, world, dtype)
    choice = choose(task, machine(task, device, dtype, group, kernel, transport, given))
    trials = given.get("trials")
    return choice if trials is None else by_trial(choice, trials, task, build, device=device, dtype=dtype)


def _check(given: dict[str, Any]) -> None:
    for option, value in given.items():
        if option not in KNOWN:
            raise ValueError(f"{option}={value!r}: auto has no such option; its options: {', '.join(KNOWN)}")
    missing = [name for name in NEEDED if given.get(name) is None]
    if (given.get("tokens") is None) == (given.get("cu_seqlens") is None):
        missing.insert(0, "tokens or else cu_seqlens")
    if missing:
        raise ValueError(
            f"attention.make('auto'): {', '.join(missing)}: must be given, since the layout of the tensors follows from "
            "the shapes; for instance tokens=32768, heads=32, kv_heads=8, head_dim=128, causal=True"
        )
    trials = given.get("trials")
    check_trials(trials)
    if trials is not None and given.get("graphed"):
        raise ValueError(
            f"trials={trials!r}: calls are tried as launched one by one, not captured whole; use trials=None"
        )


def _task(given: dict[str, Any], world: int, dtype: torch.dtype) -> Task:
    packed, heads = given.get("cu_seqlens"), given["heads"]
    cu_seqlens = (0, given["tokens"]) if packed is None else packed
    return task_of(
        on_host(cu_seqlens) if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens,
        world,
        Shapes(given.get("batch") or 1, heads, given.get("kv_heads") or heads, given["head_dim"], dtype.itemsize),
        bool(given.get("causal", False)),
        given.get("window") or (-1, -1),
        packed is not None,
        bool(given.get("backward", True)),
        given.get("q_tokens"),
    )


def machine(
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    kernel: str,
    transport: str,
    given: dict[str, Any],
) -> Machine:
    """This machine, with those of the requested kernel and transports that work here for the task."""
    sizes, cuda, replay = task.shapes, device.type == "cuda", given.get("replay", "none")
    local = task.q_tokens or task.tokens
    shape = Shape(device.type, dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, task.packed, task.backward, local)
    if task.world > 1:
        works = transports.select(transport, device, group).name
    else:
        works = transports.resolve(transport, device)
    nccl = ["nccl"] if cuda and transport == "auto" and works != "nccl" else []
    memory: float | None = torch.cuda.get_device_properties(device).total_memory if cuda else None
    if given.get("memory_gb") is not None:
        memory = given["memory_gb"] * 1e9
    return Machine(
        gpu=kernels.gpu_name() if cuda else "",
        kernel=lambda masks: kernels.select(kernel, shape, masks, task.decode).name,
        transports=(works, *nccl),
        rates=rates.table(),
        links=() if given.get("ceilings") else links.table(),
        device="cuda" if cuda else "cpu",
        memory=memory,
        ceilings=given.get("ceilings"),
        graphed=bool(given.get("graphed")),
        replayed="auto" if replay == "auto" else replay == "graphs",
        launch_replay=replay != "none",
    )


def known(device: torch.device) -> bool:
    """Whether the tables have this machine's GPU, so that its ceilings are not needed."""
    name = kernels.gpu_name() if device.type == "cuda" else ""
    return any(r.gpu == name for r in rates.table()) and any(m.gpu == name for m in links.table())
