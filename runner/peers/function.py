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
from attention.call import CallSpec, Settings, call_spec, positive, signed
from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.geometry.schedules import masks
from attention.kernels import KERNELS, Kernel, Shape, name_of
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
        if self.package.one_sequence and not spec.shape.packed and len(q) > 1:
            raise UnsupportedCall(
                f"batch={len(q)}: {self.package.name} takes a packed batch or a batch of 1; use batch=1 or seqlens"
            )
        plan = self.plans.get(spec)
        if plan is None:
            plan = self._planned(spec)
            self.plans.add(spec, plan)
        return plan

    def _planned(self, spec: CallSpec) -> Plan:
        self._check(spec)
        package, shape = self.package, spec.shape
        mask = mask_of(Band.of(spec.causal, spec.window), spec.cu_seqlens, spec.mask)
        problem = package.problem(spec.cu_seqlens, self.world, mask, self.options)
        self.options.check(shape.heads, shape.kv_heads, self.world)
        scaled = spec.scale != positive(None, shape.head_dim)
        if reason := package.refuses(problem, shape.heads, shape.kv_heads, scaled, shape.backward):
            raise UnsupportedCall(reason)
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
            deterministic=self.settings.deterministic,
            want_lse=False,
            sinks=False,
            kernel=_kernel(package, self.settings.kernel, shape, masks(problem)),
            transport=self.transport(spec.device),
            options=self.options,
            steps=(),
        )

    def _check(self, spec: CallSpec) -> None:
        package, shape, transport = self.package, spec.shape, self.settings.transport
        name, dtype = package.name, name_of(shape.dtype)
        refusals = {
            f"{name}: works over a process group; call torch.distributed.init_process_group first": not (
                package.layout.replicated or dist.is_initialized()
            ),
            f"transport={transport}: {name} sends by torch.distributed itself; use transport=auto": transport
            not in ("auto", "gloo", "nccl"),
            f"dtype={dtype}: {name} is for bf16 and fp16 only; use dtype=bf16": package.half
            and dtype not in ("bf16", "fp16"),
            f"return_lse=True: {name} gives no LSE here; use return_lse=False": spec.return_lse,
            f"sinks: {name} has none here; our own variants take sinks": spec.sinks,
            f"softcap: {name} has none here; our own variants take softcap": shape.softcap,
            f"v_head_dim={shape.v_head_dim}: {name} needs head_dim={shape.head_dim} here; our own variants take any": (
                shape.v_head_dim != shape.head_dim
            ),
            f"padding={spec.padding}: {name} has none here; our own variants take padding": spec.padding,
            f"replay=graphs: {name} brings its own exchange": self.settings.replay == "graphs",
        }
        for reason in (package.missing(shape.device), *(text for text, refused in refusals.items() if refused)):
            if reason:
                raise UnsupportedCall(reason)

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


def _kernel(package: Package[Any], wanted: str, shape: Shape, masks: tuple[Band, ...]) -> Kernel:
    """The local kernel under the package; for `auto` the one that its users have. Raises UnsupportedCall."""
    name, usual = package.name, package.kernels
    if wanted == "auto":
        fitting = (k for k in usual if not any(kernels.refusal(KERNELS[k], shape, mask) for mask in masks))
        wanted = next(fitting, usual[0])
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
