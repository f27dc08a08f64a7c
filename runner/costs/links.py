"""Measured bandwidth and latency by GPU, world size, transport and pattern, from `links.csv` beside this file. GPUs
without a row are estimated from `runner.measure.ceilings` or from defaults. No torch.

Patterns: `pull`, from one remote rank; `pull_all`, from all at once; `p2p`, send and receive; `all_gather`; `slots`,
small partial results exchanged between all ranks in one kernel; `copy`, within a GPU (bytes read plus written)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """A transfer takes `latency_us`, plus the received bytes over `gb_s`."""

    gb_s: float
    latency_us: float

    def seconds(self, received: float) -> float:
        """Of one transfer; 0 for no bytes."""
        return self.latency_us / 1e6 + received / self.gb_s / 1e9 if received else 0.0


@dataclass(frozen=True)
class Measured:
    gpu: str
    world: int
    transport: str
    pattern: str
    link: Link


def find(table: Iterable[Measured], gpu: str, world: int, transport: str, pattern: str) -> Link | None:
    """The link of the measured world size nearest by ratio; None where the pattern was not measured on that GPU."""
    here = [m for m in table if (m.gpu, m.transport, m.pattern) == (gpu, transport, pattern)]
    return min(here, key=lambda m: abs(math.log(m.world / world))).link if here else None


@lru_cache
def table() -> tuple[Measured, ...]:
    """The package's table. Its last column says how a row was measured."""
    with Path(__file__).with_name("links.csv").open() as file:
        _, *rows = csv.reader(file)
    return tuple(
        Measured(gpu, int(world), transport, pattern, Link(float(gb_s), float(latency_us)))
        for gpu, world, transport, pattern, gb_s, latency_us, _ in rows
    )
