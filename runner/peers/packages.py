"""Other packages' context-parallel attention as variants. Their adapters lie beside this module, and are imported with their package
at the first call. Imports without torch.

The layout is the one that the package expects, so that `shard` does what its users do before the timed call. The
schedule is the one that it follows, from which FLOPs are counted. How it moves data is its own: bytes and phases are
unknown."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.errors import nearest
from attention.geometry.layouts import CONTIGUOUS, Layout
from attention.geometry.options import Options, check_stride, divisors, one_of, ulysses_group
from attention.geometry.schedules import GATHER, RING, Schedule
from attention.variants import registry, stripe, zigzag
from attention.variants.base import Chosen, Variant
from attention.variants.llama3 import PACKED
from runner.reading import read_yaml

FLASH = ("flash2", "sdpa_flash", "math")
SDPA = ("sdpa_cudnn", "sdpa_flash")  # not sdpa_efficient: no GQA, and its dq was wrong over two GPUs (torch 2.11)


@dataclass(frozen=True, kw_only=True)
class Package(Variant[Chosen]):
    """A variant of another package. `adapter` is a module of `runner.peers`. `kernels`: what kernel=auto tries, in this order; with `only`
    others are refused, with `own_kernel` all are, and they are but what a local call is compared with."""

    executor: Any = "external"  # none of ours
    use: str = "a comparison with our variants"
    layout: Layout = zigzag.ZIGZAG
    schedule: Schedule = RING
    options: Any = Options
    windows: bool = False
    packs: bool = False
    adapter: str
    function: str | None = None  # the package's, where an adapter has several
    kernels: tuple[str, ...] = FLASH
    needs: str = ""  # the package to import
    install: str | None = None  # how to get it
    only: bool = False
    own_kernel: bool = False
    one_sequence: bool = False  # takes a packed batch or a batch of 1
    cuda: bool = False  # needs CUDA
    half: bool = False  # bf16 and fp16 only: in wider dtypes its fp32 sums would be the blocks' own buffers

    def missing(self, device: str) -> str | None:
        """Why the package can't run on this machine's `device` ("cpu" or "cuda"), or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.name} needs the package {self.needs}: {self.install}"
        if self.cuda and device == "cpu":
            return f"{self.name} needs CUDA GPUs: {self.source} has no CPU path"
        return None

    def served(self, kernel: str) -> str:
        """What computed and what moved the data, for the result's reader."""
        if self.only or self.own_kernel:
            return f"{self.source}, {'its own kernel' if self.own_kernel else kernel} and its own exchange"
        return (
            f"{self.source}: its exchange and merging; the flash_attn functions it calls are served by kernel {kernel}"
        )


@dataclass(frozen=True)
class TorchOptions(Options):
    rotate: str = one_of(("allgather", "alltoall"), "allgather")


@dataclass(frozen=True)
class TransformerEngineOptions(Options):
    cp_comm_type: str = one_of(("p2p", "all_gather"), "p2p")


@dataclass(frozen=True)
class RfaLlama3Options(Options):
    heads_k_stride: int | None = 1

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        check_stride(self.heads_k_stride, kv_heads)


@dataclass(frozen=True)
class SharedHeadsOptions(Options):
    ulysses_size: int | None = None

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        ranks = self.sharing(world)
        if heads % ranks or kv_heads % ranks:
            fits = [n for n in divisors(world) if heads % n == kv_heads % n == 0]
            raise ValueError(
                f"heads={heads}, kv_heads={kv_heads}: are divided among {ranks} ranks; ulysses_size may be {fits}"
            )

    def sharing(self, world: int) -> int:
        return ulysses_group(self.ulysses_size, world)


_OF_ONE: dict[str, dict[str, Any]] = {  # what packages.yaml cannot say
    "torch_cp": {"options": TorchOptions, "kernels": SDPA},
    "torch_flex_cp": {"kernels": SDPA, "schedule": GATHER},
    "rfa_ring": {"layout": CONTIGUOUS},
    "rfa_stripe": {"layout": stripe.STRIPE},
    "rfa_llama3": {"layout": PACKED, "schedule": GATHER, "options": RfaLlama3Options},
    "usp_yunchang": {"options": SharedHeadsOptions},
    "rm_usp": {"options": SharedHeadsOptions, "layout": CONTIGUOUS},
    "transformer_engine": {"options": TransformerEngineOptions, "kernels": SDPA},
}
PEERS: dict[str, Package[Any]] = {
    name: Package(name=name, **about, **_OF_ONE.get(name, {}))
    for name, about in read_yaml(Path(__file__).with_name("packages.yaml")).items()
}


def everything() -> dict[str, Variant[Any]]:
    """The library's variants and, after them, the peers."""
    return registry.everything() | PEERS


def variant(name: str) -> Variant[Any]:
    """A variant or a peer. Raises ValueError for an unknown name, with the nearest ones."""
    known = everything()
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]


def missing(chosen: Variant[Any], device: str) -> str | None:
    """Why a peer can't run on this machine's `device` ("cpu" or "cuda"), or None; the library's variants run everywhere."""
    return chosen.missing(device) if isinstance(chosen, Package) else None
