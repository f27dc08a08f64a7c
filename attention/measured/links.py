"""What links were measured to do, by GPU, world size, transport and pattern. The table `links.csv` beside this file holds
them; a GPU that is not in it is estimated by `runner.measure.ceilings` or by defaults. No torch.

Patterns: `pull`, from one peer; `pull_all`, from all peers at once; `p2p`, send and receive; `all_gather`; `slots`, small
partial results exchanged between all peers in one kernel; `copy`, within a GPU, read plus written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

COLUMNS = ("gpu", "world", "transport", "pattern", "gb_s", "latency_us", "slows", "measured_with")


@dataclass(frozen=True)
class Link:
    """A transfer takes `latency_us` and, for what a rank receives, 1 / `gb_s`. `slows`: by what share compute beside it
    takes longer."""

    gb_s: float
    latency_us: float
    slows: float = 0.0

    def seconds(self, received: float) -> float:
        """Nothing for no bytes."""
        return self.latency_us / 1e6 + received / self.gb_s / 1e9 if received else 0.0


@dataclass(frozen=True)
class Measured:
    gpu: str
    world: int
    transport: str
    pattern: str
    link: Link
    measured_with: str = ""


def through(small: tuple[float, float], large: tuple[float, float], slows: float = 0.0) -> Link:
    """The link on which two messages, each (bytes received, seconds), take as long as they did. Raises ValueError unless
    the larger one took longer."""
    (few, soon), (many, late) = small, large
    if not (few < many and 0 < soon < late):
        raise ValueError(f"{small} and {large}: the second message must have more bytes and take longer")
    rate = (many - few) / (late - soon)
    return Link(rate / 1e9, max(0.0, soon - few / rate) * 1e6, slows)


def find(table: Iterable[Measured], gpu: str, world: int, transport: str, pattern: str) -> Link | None:
    """Of the measured world size that is nearest by ratio; None where that pattern was not measured on that GPU."""
    here = [m for m in table if (m.gpu, m.transport, m.pattern) == (gpu, transport, pattern)]
    return min(here, key=lambda m: abs(math.log(m.world / world))).link if here else None


def parse(text: str) -> tuple[Measured, ...]:
    """Raises ValueError for a table with other columns or a bandwidth that is none."""
    rows = csv.DictReader(io.StringIO(text))
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"columns {', '.join(rows.fieldnames or ())}: must be {', '.join(COLUMNS)}")
    return tuple(_measured(row) for row in rows)


def path() -> Path:
    return Path(str(resources.files("attention.measured") / "links.csv"))


@lru_cache
def table() -> tuple[Measured, ...]:
    """The package's table."""
    return parse(path().read_text())


def _measured(row: dict[str, str]) -> Measured:
    link = Link(float(row["gb_s"]), float(row["latency_us"]), float(row["slows"]))
    if not (link.gb_s > 0 and link.latency_us >= 0 and link.slows >= 0):
        raise ValueError(f"{row['transport']} {row['pattern']}: {link}: must be above 0")
    return Measured(row["gpu"], int(row["world"]), row["transport"], row["pattern"], link, row["measured_with"])
