"""What the model of time knows of a machine: rates of kernels and links, measured or assumed, and launch overheads. Pure
Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from attention.masks.band import Band
from runner.costs import links, rates
from runner.costs.links import Link, Measured
from runner.costs.rates import LONG, Rate, Speed
from runner.costs.topology import ONE_NODE, Pattern, Topology, Transfer

Both = tuple[float, float]  # forward and backward

KERNEL_SHARE = 0.8  # of the matrix product rate that a good attention kernel reaches: 672 of 793 on an H200


class LaunchCosts(NamedTuple):
    """CPU launch overhead in µs: of a whole forward or backward, of each kernel call with its merges, of each exchange."""

    whole: Both = (0, 0)
    call: Both = (0, 0)
    exchange: float = 0


class Overheads(NamedTuple):
    """In µs. call, merge: how long a launch and its tail leave the GPU idle. eager: launches from Python.
    decode, reduction: CPU overhead of a decode with its kernel call, and of each of its collectives."""

    call: Both
    merge: float
    eager: LaunchCosts = LaunchCosts()
    decode: float = 0
    reduction: float = 0


# `call` from zigzag_llama3 with heads_k_stride 8 to 1 on 4 H200, with equal compute and bytes. CPU overheads from 2048
# tokens a GPU on 2 H200, on hosts that differ by a third; of a decode from results/h200-x4/tree_scaling.
CUDA = Overheads((10, 60), 10, LaunchCosts((300, 600), (75, 125), 100), 200, 350)
OVERHEADS = {"cuda": CUDA, "cpu": Overheads((20, 20), 20)}


@dataclass(frozen=True)
class Ceilings:
    """Assumed rates of an unmeasured machine: TFLOP/s of attention, GB/s of a copy (read plus written), and one link
    for every pattern. source: where they are from."""

    tflops: float
    copy_gb_s: float
    link: Link
    source: str = "defaults"


DEFAULTS = {"cuda": Ceilings(300, 2000, Link(100, 50)), "cpu": Ceilings(0.1, 10, Link(1, 300))}


def ceilings(measured: Mapping[str, float], device: str) -> Ceilings:
    """From a machine's measured `matmul_tflops`, `copy_gb_s` and, in a world of several ranks, `link_gb_s`."""
    usual = DEFAULTS[device].link
    link = replace(usual, gb_s=measured.get("link_gb_s", usual.gb_s))
    return Ceilings(measured["matmul_tflops"] * KERNEL_SHARE, measured["copy_gb_s"], link, "this machine's ceilings")


# rows of the table of links by pattern: over symmetric memory, whose reductions are NCCL's, and over other transports
PULLED: dict[Pattern, tuple[str, str]] = {
    "one": ("symm", "pull"), "all": ("symm", "pull_all"), "gather": ("symm", "pull_all"), "slots": ("symm", "slots"),
    "reduce": ("nccl", "all_gather"),
}  # fmt: skip
SENT: dict[Pattern, str] = {"one": "p2p", "all": "p2p"}  # and the collectives as an all-gather


@dataclass(frozen=True)
class Machine:
    """gpu: its name in the tables, empty for a CPU. kernel: of its calls. transports: those that work here. memory: bytes that a rank may hold besides its inputs. graphed: the
    caller captures whole calls in a CUDA graph. replayed: forward and backward are replayed from CUDA graphs, with
    inputs and results copied. topology: which ranks are in one node."""

    gpu: str
    kernel: str
    transports: tuple[str, ...]
    rates: tuple[Rate, ...] = field(default_factory=rates.table)
    links: tuple[Measured, ...] = field(default_factory=links.table)
    device: str = "cuda"
    memory: float = math.inf
    ceilings: Ceilings | None = None
    graphed: bool = False
    replayed: bool = False
    topology: Topology = ONE_NODE
    cache: dict[Any, tuple[Speed, Speed]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def fallback(self) -> Ceilings:
        """For what is in no table."""
        return self.ceilings or DEFAULTS[self.device]

    @property
    def overheads(self) -> Overheads:
        return OVERHEADS[self.device]

    def measured(self, kernel: str) -> bool:
        return any(r.gpu == self.gpu and r.kernel == kernel for r in self.rates)

    def speeds(self, mask: Band, head_dim: int, gqa: bool, packed: bool, tokens: int) -> tuple[Speed, Speed]:
        """Forward and backward speed of a 16-bit call with `tokens` a rank: from the kernel's most similar measured
        class, else from the ceilings."""
        key = mask, head_dim, gqa, packed, tokens
        if key not in self.cache:
            # the cost of a mask's edges is separate, so the rate of long sequences also holds for short ones; a short
            # packed call would measure its launch
            wanted = (
                "packed" if packed else "dense",
                "window" if mask.windowed else "causal" if mask.causal else "full",
                "long" if mask.edges or packed or tokens >= LONG else "short",
                "gqa" if gqa else "mha",
            )

            def unlike(r: Rate) -> tuple[Any, ...]:
                c = r.call
                differs = [a != b for a, b in zip((c.layout, c.mask, c.length, c.heads), wanted, strict=True)]
                return (c.head_dim < head_dim, abs(c.head_dim - head_dim), *differs)

            here = [r for r in self.rates if r.gpu == self.gpu and r.kernel == self.kernel]
            self.cache[key] = rates.speeds(self.rates, min(here, key=unlike)) if here else self.unmeasured
        return self.cache[key]

    @property
    def unmeasured(self) -> tuple[Speed, Speed]:
        return (Speed(self.fallback.tflops * 1e12),) * 2

    def link(self, transport: str, pattern: Pattern, world: int) -> Link:
        row = PULLED[pattern] if transport == "symm" else (transport, SENT.get(pattern, "all_gather"))
        return links.find(self.links, self.gpu, world, *row) or self.fallback.link

    def moving(self, transport: str, transfer: Transfer, rank: int, world: int) -> float:
        """Seconds of a transfer to a rank."""
        inside = self.link(transport, transfer.pattern, self.topology.in_node(world))
        return self.topology.seconds(transfer, rank, world, inside)

    def copy_seconds(self, size: float) -> float:
        """Time to read and write `size` bytes in total within a device."""
        rate = links.find(self.links, self.gpu, 1, "memory", "copy")
        return size / ((rate.gb_s if rate else self.fallback.copy_gb_s) * 1e9)
