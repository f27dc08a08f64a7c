"""`make("auto")`: what is known of the problem and of this machine, and what `choice` makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from attention import kernels, transports
from attention.autotune.model import Choice, Machine, Task, check_trials, choose, task_of
from attention.geometry.costs import Shapes
from attention.kernels import Shape
from attention.masks.band import Mask
from attention.measured import links, rates
from attention.tensors import on_host

NEEDED = ("heads", "head_dim")  # and tokens or cu_seqlens
KNOWN = (
    "tokens", "cu_seqlens", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "window", "backward", "q_tokens",
    "device", "memory_gb", "ceilings", "graphed", "graphs", "trials", "deterministic",
)  # fmt: skip


def decide(group: dist.ProcessGroup | None, kernel: str, transport: str, given: dict[str, Any]) -> Choice:
    """The choice for a problem described by options of `make`. Every rank must be given the same on a GPU of the same kind,
    and on CUDA all have to call it, since whether they can read each other's memory is tried.

    given: `tokens` of a sequence or a pack's global `cu_seqlens`; `heads`, `head_dim`; `kv_heads` (default: as many as
    heads), `batch` (1), `dtype` (torch.bfloat16), `causal` (False), `window`, `backward` (True), `q_tokens` of a decode,
    `device` (CUDA where there is one), `memory_gb` that a rank may hold beside its inputs (a GPU's whole memory),
    `ceilings` that stand for the links, and for the rates of a GPU that is not in their table;
    `graphed` where calls are captured in a CUDA graph, `graphs` where their passes are, as by `make(graphs=True)`, or "auto" where
    they may be;
    `deterministic` as `make` has it. `trials`: of so many variants (two at least), those in front by the model, the best is run on
    random inputs and the fastest taken, in some seconds, or of long sequences some iterations each, in which all ranks take part;
    what all of them hold is held at once, and what they exchange through is kept, as any call's is, until `transports.release()`.
    Raises ValueError for what is missing, unknown or impossible."""
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
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    dtype: torch.dtype = given.get("dtype") or torch.bfloat16
    packs = given.get("cu_seqlens")
    heads = given["heads"]
    shapes = Shapes(given.get("batch") or 1, heads, given.get("kv_heads") or heads, given["head_dim"], dtype.itemsize)
    task = task_of(
        _plain(packs) if packs is not None else (0, given["tokens"]),
        world,
        shapes,
        bool(given.get("causal", False)),
        given.get("window") or (-1, -1),
        packs is not None,
        bool(given.get("backward", True)),
        given.get("q_tokens"),
    )
    device = torch.device(given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    trials = given.get("trials")
    check_trials(trials)
    if trials is not None and given.get("graphed"):
        raise ValueError(
            f"trials={trials!r}: calls are tried as a host launches them, not captured whole; use trials=None"
        )
    choice = choose(task, machine(task, device, dtype, group, kernel, transport, given))
    if trials is None:
        return choice
    from attention.autotune.trials import by_trial  # which makes functions, as what asks this does

    return by_trial(
        choice,
        trials,
        task,
        group=group,
        kernel=kernel,
        deterministic=bool(given.get("deterministic")),
        device=device,
        dtype=dtype,
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
    """This one, for the task: the kernel and transports that work here among those that are asked for."""
    local = task.q_tokens or task.cu_seqlens[-1] // task.world
    shape = Shape(
        device.type, dtype, task.shapes.heads, task.shapes.kv_heads, task.shapes.head_dim, task.packed, task.backward, local
    )  # fmt: skip

    def kernel_of(masks: tuple[Mask, ...]) -> str:
        return kernels.select(kernel, shape, masks, task.decode).name

    cuda = device.type == "cuda"
    works = transports.resolve(transport, device)
    if task.world > 1:
        works = transports.select(transport, device, group).name
    both = ["nccl"] if cuda and transport == "auto" and works != "nccl" else []
    memory = given.get("memory_gb")
    return Machine(
        kernels.gpu_name() if cuda else "",
        kernel_of,
        (works, *both),
        rates.table(),
        () if given.get("ceilings") else links.table(),
        "cuda" if cuda else "cpu",
        memory * 1e9 if memory is not None else torch.cuda.get_device_properties(device).total_memory if cuda else None,
        given.get("ceilings"),
        bool(given.get("graphed")),
        given.get("graphs") or False,
    )


def known(device: torch.device) -> bool:
    """Whether the tables know this machine's GPU, so that no ceilings of it are needed."""
    name = kernels.gpu_name() if device.type == "cuda" else ""
    return any(r.gpu == name for r in rates.table()) and any(m.gpu == name for m in links.table())


def _plain(packs: torch.Tensor | Sequence[int]) -> Sequence[int]:
    return on_host(packs) if isinstance(packs, torch.Tensor) else packs
