"""A peer as a function: the face of `attention.ContextParallel`, whose call is the package's own, over a local kernel of ours."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels
from attention.api import ContextParallel
from attention.call import CallSpec, Settings, call_spec, signed
from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.geometry.schedules import masks
from attention.kernels import Kernel, Shape, name_of
from attention.masks.band import Band
from attention.masks.sequences import mask_of
from attention.tensors import fit
from attention.transports import Transport
from runner.peers.packages import PEERS, Package


def make(
    name: str,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
    replay: str = "none",
    **options: Any,
) -> Peer:
    """The peer of this name as a function over `group`, as `attention.make` makes ours. Raises ValueError for a bad option."""
    package = PEERS[name]
    return Peer(Settings(package, package.parse(options), kernel, transport, deterministic, replay, 0.0, False), group)


class Peer(ContextParallel):
    """Shards as the package expects, plans what results need of a call, and calls the package. Its backward is the package's own.
    Ranks do not compare what they ask for."""

    @property
    def package(self) -> Package[Any]:
        assert isinstance(self.variant, Package)
        return self.variant

    def plan(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Plan:
        """As `ContextParallel.plan`, without the steps of an exchange. Raises UnsupportedCall where the package cannot do the call on
        this machine."""
        spec = call_spec(self, q, k, v, **given)
        if self.package.one_sequence and spec.batch > 1:
            raise UnsupportedCall(
                f"batch={spec.batch}: {self.package.name} takes a packed batch or a batch of 1; use batch=1 or seqlens"
            )
        plan = self.plans.get(spec)
        if plan is None:
            plan = self._planned(spec)
            self.plans.add(spec, plan)
        return plan

    def _planned(self, spec: CallSpec) -> Plan:
        package, shape, settings = self.package, spec.shape, self.settings
        if reason := _refusal(package, spec, settings):
            raise UnsupportedCall(reason)
        mask = mask_of(Band.of(spec.causal, spec.window), spec.cu_seqlens, spec.mask)
        problem = package.problem(spec.cu_seqlens, self.world, mask, self.options)
        self.options.check(shape.heads, shape.kv_heads, self.world)
        place, head = divmod(self.rank, problem.ulysses)
        return Plan(
            variant=package,
            problem=problem,
            rank=place,
            head=head,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            scale=spec.scale,
            packed=shape.packed,
            deterministic=settings.deterministic,
            kernel=_kernel(package, settings.kernel, shape, masks(problem)),
            transport=self.transport(spec.device),
            options=self.options,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        """This rank's out, like q."""
        plan = self.plan(q, k, v, **given)
        q, k, v = fit((signed(q, given.get("scale")), k, v), plan.kernel.align)
        out: Tensor = importlib.import_module(f"runner.peers.{self.package.adapter}").attend(q, k, v, plan, self.group)
        return out

    def transport(self, device: torch.device) -> Transport:
        """Of `unshard` alone: the package communicates by itself."""
        self.settings = replace(self.settings, transport="nccl" if device.type == "cuda" else "gloo")
        return super().transport(device)


def _refusal(package: Package[Any], spec: CallSpec, settings: Settings) -> str | None:
    """Why the package can't do such a call here, or None."""
    name, shape, transport, dtype = package.name, spec.shape, settings.transport, name_of(spec.shape.dtype)
    lacking = {
        "sinks": spec.sinks,
        "softcap": shape.softcap,
        f"padding={spec.padding}": spec.padding,
        f"v_head_dim={shape.v_head_dim}": shape.v_head_dim != shape.head_dim,
    }
    refusals = {
        f"{name}: works over a process group; call torch.distributed.init_process_group first": not dist.is_initialized(),
        f"transport={transport}: {name} sends by torch.distributed itself; use transport=auto": transport
        not in ("auto", "gloo", "nccl"),
        f"dtype={dtype}: {name} is for bf16 and fp16 only; use dtype=bf16": package.half
        and dtype not in ("bf16", "fp16"),
        f"return_lse=True: {name} gives no LSE here; use return_lse=False": spec.return_lse,
        f"replay=graphs: {name} brings its own exchange": settings.replay == "graphs",
    } | {f"{x}: {name} has none here; our own variants take {x.split('=')[0]}": asked for x, asked in lacking.items()}
    return package.missing(shape.device) or next((text for text, refused in refusals.items() if refused), None)


def _kernel(package: Package[Any], wanted: str, shape: Shape, masks: tuple[Band, ...]) -> Kernel:
    """The local kernel under the package; for `auto` the one that its users have. Raises UnsupportedCall."""
    name, usual = package.name, package.kernels
    if wanted == "auto":
        wanted = next((x for x in usual if not kernels.why_not(x, shape, masks)), usual[0])
    elif package.own_kernel:
        raise UnsupportedCall(f"kernel={wanted}: {name} brings its own kernel; use kernel=auto")
    elif package.only and wanted not in usual:
        raise UnsupportedCall(
            f"kernel={wanted}: {name} runs PyTorch's own kernels only; use {', '.join(usual)} or auto"
        )
    chosen = kernels.select(wanted, shape, masks)
    if package.own_kernel:
        chosen = copy.copy(chosen)  # the local call to compare with; the package runs its own
        chosen.name = name
    return chosen
