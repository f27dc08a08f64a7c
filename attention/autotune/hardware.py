"""What the model knows of a machine: measured rates of kernels and links, or ceilings in their place, and overheads of launches. Pure
Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attention.executors.timeline import Pattern
from attention.masks.band import Band
from attention.measured import links, rates
from attention.measured.links import Link, Measured
from attention.measured.rates import LONG, Rate, Speed

Both = tuple[float, float]  # forward and backward
KernelOf = Callable[[tuple[Band, ...]], str]

KERNEL_SHARE = 0.8  # of the matrix product rate that a good attention kernel reaches: 672 of 793 on an H200


@dataclass(frozen=True)
class LaunchCosts:
    """Microseconds of CPU launch overhead: for a call itself, for each kernel call with its merges, and for each exchange."""

    whole: Both = (0, 0)
    call: Both = (0, 0)
    exchange: float = 0


@dataclass(frozen=True)
class Overheads:
    """Microseconds. `call`, `merge`: a launch and its tail leave the GPU idle for so long. `eager`, `traced`: CPU launch overhead of
    launches that run from Python, or are replayed from a launch trace. `decode`: that of a decode with its kernel call, `reduction` of
    each of its collectives."""

    call: Both
    merge: float
    eager: LaunchCosts = field(default_factory=LaunchCosts)
    traced: LaunchCosts = field(default_factory=LaunchCosts)
    decode: float = 0
    reduction: float = 0


# cuda: the GPU's from zigzag_llama3 with heads_k_stride 8 to 1 on 4 H200, whose compute and bytes are the same; the CPU's from 2048
# tokens a GPU on 2, on hosts that differ by a third; a decode's from results/h200-x4/tree_scaling
OVERHEADS = {
    "cuda": Overheads(
        call=(10, 60),
        merge=10,
        eager=LaunchCosts((300, 600), (75, 125), 100),
        traced=LaunchCosts((20, 280), (75, 90), 20),
        decode=200,
        reduction=350,
    ),
    "cpu": Overheads((20, 20), 20),
}


@dataclass(frozen=True)
class Ceilings:
    """What an unmeasured machine is taken to do: TFLOP/s of attention, GB/s of a copy (read plus written), and its link for every
    pattern. `source` says where that is from."""

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


# a transfer's row in the table of links; symmetric memory leaves reductions to NCCL
PULLED: dict[Pattern, tuple[str, str]] = {
    "one": ("symm", "pull"), "all": ("symm", "pull_all"), "gather": ("symm", "pull_all"), "slots": ("symm", "slots"),
    "reduce": ("nccl", "all_gather"),
}  # fmt: skip
SENT: dict[Pattern, str] = {
    "one": "p2p", "all": "p2p", "gather": "all_gather", "slots": "all_gather", "reduce": "all_gather"
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """`gpu`: its name in the tables, empty for a CPU. `kernel` gives the kernel that does all of these masks, or raises ValueError.
    `transports` that work here. `memory`: bytes that a rank may hold beside its inputs. `graphed`: whole calls are captured in a CUDA
    graph. `replayed`: forward and backward are replayed from CUDA graphs, inputs copied in and results out; "auto": where that is
    faster. `launch_replay`: launches are replayed where they can be recorded."""

    gpu: str
    kernel: KernelOf
    transports: tuple[str, ...]
    rates: tuple[Rate, ...] = ()
    links: tuple[Measured, ...] = ()
    device: str = "cuda"
    memory: float | None = None
    ceilings: Ceilings | None = None
    graphed: bool = False
    replayed: bool | str = False
    launch_replay: bool = True
    found: dict[Any, tuple[Speed, Speed]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def symmetric(self) -> bool:
        return "symm" in self.transports

    @property
    def ways(self) -> tuple[Machine, ...]:
        """This machine launching from Python, or replaying graphs; both where that is to be decided."""
        over = ("symm",) if self.symmetric else self.transports  # over NCCL a capture may hang
        launched = replace(self, replayed=False)
        replayed = replace(self, graphed=True, replayed=True, transports=over)
        if self.replayed == "auto":
            return (launched, replayed) if self.can_replay else (launched,)
        return (replayed,) if self.replayed else (launched,)

    @property
    def can_replay(self) -> bool:
        return self.device == "cuda" and self.symmetric and not self.graphed

    @property
    def fallback(self) -> Ceilings:
        """For what no table has."""
        return self.ceilings or DEFAULTS[self.device]

    @property
    def overheads(self) -> Overheads:
        return OVERHEADS[self.device]

    def measured(self, kernel: str) -> bool:
        return any(r.gpu == self.gpu and r.kernel == kernel for r in self.rates)

    def speeds(
        self, kernel: str, mask: Band, head_dim: int, gqa: bool, packed: bool, tokens: int
    ) -> tuple[Speed, Speed]:
        """Forward and backward of 16-bit calls: of the kernel's measured class that is most alike, else by the ceilings. tokens: of a
        rank."""
        key = kernel, mask, head_dim, gqa, packed, tokens
        if key not in self.found:
            # what lies on a mask's edge is counted apart, so that a long sequence's rate holds for short ones, too; a short packed
            # call would measure its launch
            long = mask.edges or packed or tokens >= LONG
            wanted = (
                "packed" if packed else "dense",
                "window" if mask.windowed else "causal" if mask.causal else "full",
                "long" if long else "short",
                "gqa" if gqa else "mha",
            )

            def unlike(r: Rate) -> tuple[Any, ...]:
                c = r.call
                differs = [a != b for a, b in zip((c.layout, c.mask, c.length, c.heads), wanted, strict=True)]
                return (c.head_dim < head_dim, abs(c.head_dim - head_dim), *differs)

            here = [r for r in self.rates if r.gpu == self.gpu and r.kernel == kernel]
            self.found[key] = rates.speeds(self.rates, min(here, key=unlike)) if here else self.unmeasured
        return self.found[key]

    @property
    def unmeasured(self) -> tuple[Speed, Speed]:
        speed = Speed(self.fallback.tflops * 1e12)
        return speed, speed

    def link(self, transport: str, pattern: Pattern, world: int) -> Link:
        row = PULLED[pattern] if transport == "symm" else (transport, SENT[pattern])
        return links.find(self.links, self.gpu, world, *row) or self.fallback.link

    def copy_seconds(self, size: float) -> float:
        """To read and write `size` bytes in all within a device."""
        rate = links.find(self.links, self.gpu, 1, "memory", "copy")
        return size / ((rate.gb_s if rate else self.fallback.copy_gb_s) * 1e9)
