"""`make("auto")`: the task and this machine are described to the model, and its choice is tried where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from attention.masks.band import Band
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
    """The choice for a problem described by options of `make`. Every rank must be given the same on a GPU of the same kind. On CUDA it is
    collective, since ranks try whether they can read each other's memory.

    given: `tokens` of a sequence or a packed batch's global `cu_seqlens`; `heads`, `head_dim`; `kv_heads` (default: as many as heads),
    `batch` (1), `dtype` (torch.bfloat16), `causal` (False), `window`, `backward` (True), `q_tokens` of a decode, `device` (CUDA where
    there is one), `memory_gb` that a rank may hold beside its inputs (default: all of the GPU's), `ceilings` in place of measured links,
    and of the rates of a GPU that the table lacks, `graphed` where whole calls are captured in a CUDA graph, `replay` and
    `deterministic` as `make` has them. `trials`: of so many variants, at least 2, the best is run on random inputs and the fastest
    taken. That takes some seconds, for long sequences some iterations each; all of them hold their memory at once, and what they
    exchange through is kept, as any call's is, until `transports.release()`.
    build: the function of an estimate, for trials.
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
    return task_of(
        _plain(packed) if packed is not None else (0, given["tokens"]),
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
    """This one, with the kernel and transports that work here for the task among those that are asked for."""
    local, sizes = task.q_tokens or task.tokens, task.shapes
    shape = Shape(
        device.type, dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, task.packed, task.backward, local
    )  # fmt: skip

    def kernel_of(masks: tuple[Band, ...]) -> str:
        return kernels.select(kernel, shape, masks, task.decode).name

    cuda = device.type == "cuda"
    works = transports.resolve(transport, device)
    if task.world > 1:
        works = transports.select(transport, device, group).name
    both = ["nccl"] if cuda and transport == "auto" and works != "nccl" else []
    memory, replay = given.get("memory_gb"), given.get("replay", "none")
    return Machine(
        gpu=kernels.gpu_name() if cuda else "",
        kernel=kernel_of,
        transports=(works, *both),
        rates=rates.table(),
        links=() if given.get("ceilings") else links.table(),
        device="cuda" if cuda else "cpu",
        memory=memory * 1e9 if memory is not None else _gpu_memory(device) if cuda else None,
        ceilings=given.get("ceilings"),
        graphed=bool(given.get("graphed")),
        replayed="auto" if replay == "auto" else replay == "graphs",
        launch_replay=replay != "none",
    )


def _gpu_memory(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory


def known(device: torch.device) -> bool:
    """Whether the tables know this machine's GPU, so that its ceilings are not needed."""
    name = kernels.gpu_name() if device.type == "cuda" else ""
    return any(r.gpu == name for r in rates.table()) and any(m.gpu == name for m in links.table())


def _plain(cu_seqlens: torch.Tensor | Sequence[int]) -> Sequence[int]:
    return on_host(cu_seqlens) if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
