"""Measured speed of the local kernels by GPU and class of call, from `rates.csv` beside this file, which
`python -m runner.calibrate --write` writes. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

from attention.masks.band import CAUSAL, FULL, Band

LONG = 4096  # query tokens from which a call counts as long
TOKENS = {"long": 16384, "short": 2048}  # in a class's sequence or packed batch
SHARES = (4, 6, 2, 1, 3)  # how a packed batch is divided among its sequences
HALF_TILE = 64  # keys: of a tile of 128 on the edge of a mask half is computed in vain, on average
MOST_EDGE = 2048
COLUMNS = (
    "gpu", "head_dim", "heads", "mask", "layout", "length", "kernel", "forward_tflops", "backward_tflops", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class CallClass:
    """Calls of one speed; bf16 and fp16 alike."""

    head_dim: int
    heads: str  # mha or gqa
    mask: str  # full, causal or window
    layout: str  # dense or packed
    length: str  # short or long


def sequences(call: CallClass, tokens: int) -> tuple[int, ...]:
    """The lengths of a class's sequences; of a dense batch, one."""
    if call.layout == "dense":
        return (tokens,)
    return tuple(tokens * share // sum(SHARES) for share in SHARES)


def mask_of(call: CallClass, tokens: int) -> Band:
    return {"full": FULL, "causal": CAUSAL, "window": Band(tokens // 4, 0)}[call.mask]


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a kernel within a mask. `edge`: what each query on an edge of the mask costs in addition, in keys. It
    covers the partly masked tile and the fixed cost of short rows."""

    flops: float
    edge: float = HALF_TILE


@dataclass(frozen=True)
class Rate:
    """TFLOP/s of one kernel for a class of calls on a GPU; `versions`: the packages that it was measured with."""

    gpu: str
    call: CallClass
    kernel: str
    forward: float
    backward: float
    versions: str = ""

    @property
    def edge_share(self) -> float:
        """Queries on an edge of the mask, per (query, key) pair."""
        tokens = TOKENS[self.call.length]
        mask = mask_of(self.call, tokens)
        lengths = sequences(self.call, tokens)
        return mask.edges * sum(lengths) / sum(mask.pairs(n, n) for n in lengths)


def speeds(rates: Sequence[Rate], measured: Rate) -> tuple[Speed, Speed]:
    """(forward, backward) speeds of a measured class. The cost of an edge follows from the same kernel's long and short
    dense sequences, preferably with the same heads."""
    of: dict[str, Rate] = {}
    for heads in (measured.call.heads, *("gqa", "mha")):
        if len(of) < 2:
            of = {
                r.call.length: r
                for r in rates
                if (r.gpu, r.kernel) == (measured.gpu, measured.kernel)
                and r.call == replace(measured.call, heads=heads, layout="dense", length=r.call.length)
            }

    def one(rate: Callable[[Rate], float]) -> Speed:
        edge: float = HALF_TILE
        if len(of) == 2 and measured.edge_share:
            ratio = rate(of["long"]) / rate(of["short"])
            more = of["short"].edge_share - ratio * of["long"].edge_share
            edge = min(max((ratio - 1) / more if more > 0 else MOST_EDGE, HALF_TILE), MOST_EDGE)
        return Speed(rate(measured) * 1e12 * (1 + measured.edge_share * edge), edge)

    return one(lambda r: r.forward), one(lambda r: r.backward)


def parse(text: str) -> list[Rate]:
    """The rows of a table."""
    _, *rows = csv.reader(io.StringIO(text))
    return [
        Rate(gpu, CallClass(int(head_dim), *call), kernel, float(forward), float(backward), versions)
        for gpu, head_dim, *call, kernel, forward, backward, versions in rows
    ]


def render(rates: Iterable[Rate]) -> str:
    """The table as text, ordered by GPU and class, fastest forward first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for r in sorted(rates, key=lambda r: (r.gpu, astuple(r.call), -r.forward, r.kernel)):
        writer.writerow([r.gpu, *astuple(r.call), r.kernel, f"{r.forward:.4g}", f"{r.backward:.4g}", r.versions])
    return out.getvalue()


def renewed(old: Iterable[Rate], new: Sequence[Rate]) -> list[Rate]:
    """The old rows and the new. A GPU's class is replaced as a whole: its kernels were measured together."""
    replaced = {(r.gpu, r.call) for r in new}
    return [*(r for r in old if (r.gpu, r.call) not in replaced), *new]


PATH = Path(__file__).with_name("rates.csv")


@lru_cache
def table() -> tuple[Rate, ...]:
    """The package's table."""
    return tuple(parse(PATH.read_text()))
