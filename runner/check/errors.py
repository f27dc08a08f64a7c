"""Errors of results against a reference, which add up over pieces and ranks, and the tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # the reference shares nothing with the library
    from runner.record.fields import Correctness

SUMS = ("difference", "reference", "along", "along_square", "weight")  # fields of `Error` that add up
CHANCE = 5.0  # standard errors up to which a gain may be chance

Place = tuple[int, int, int]  # batch element, token, head


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of one tensor.

    rel_l2: of the whole tensor. absolute: of each element; the same relative to the element is allowed in addition.
    row: of each token row of a head, relative to its scale (`reference.Reference.scales`).
    gain: of a factor common to all rows. ratio: relative to the error of a local call; None: any."""

    rel_l2: float
    absolute: float = math.inf
    row: float = math.inf
    gain: float = math.inf
    ratio: float | None = None


@dataclass(frozen=True)
class Compared:
    """A workload's comparison with its reference. limits: each output's tolerance.
    outputs: this rank's, as `Workload.outputs`, in CPU memory, to compare timed outputs with; None if memory is limited. new_pack: of
    the new packed batch, if one was compared."""

    correctness: Correctness
    limits: dict[str, Tolerance]
    outputs: dict[str, Tensor] | None = None
    new_pack: Compared | None = None


@dataclass
class Error:
    """Running sums of one tensor's comparison."""

    difference: float = 0.0  # sum of (x - ref)^2
    reference: float = 0.0  # sum of ref^2
    worst: float = 0.0  # the largest |x - ref|
    excess: float = -math.inf  # the largest |x - ref| - rtol |ref|
    row: float = 0.0  # the largest error of a row, relative to its scale
    row_at: Place | None = None
    along: float = 0.0  # sum over rows of <x - ref, ref> / scale^2
    along_square: float = 0.0  # sum over rows of its square
    weight: float = 0.0  # sum over rows of <ref, ref> / scale^2

    def add(
        self,
        x: Tensor,
        reference: Tensor,
        scales: Tensor,
        rtol: float,
        batch: int = 0,
        tokens: Tensor | None = None,
        head: int = 0,
    ) -> None:
        """Adds x and reference, `[rows, heads, D]`; scales: `[rows, heads]`. batch, tokens, head: the batch element, each row's
        token (default: its number) and the first head, to name a place in the whole."""
        delta = x.to(reference.dtype) - reference
        self.difference += float(delta.double().square().sum())
        self.reference += float(reference.double().square().sum())
        if not x.numel():
            return
        self.worst = max(self.worst, float(delta.abs().max()))
        self.excess = max(self.excess, float((delta.abs() - rtol * reference.abs()).max()))
        norms = delta.norm(dim=-1)
        rows = (norms / scales).masked_fill_(norms == 0, 0.0).nan_to_num_(math.inf, math.inf).flatten()
        worst = int(rows.argmax())
        if float(rows[worst]) > self.row or self.row_at is None:
            row, number = divmod(worst, x.shape[1])
            self.row = float(rows[worst])
            self.row_at = batch, row if tokens is None else int(tokens[row]), head + number
        by = scales.masked_fill(scales == 0, math.inf).unsqueeze(-1)
        scaled = reference / by
        along = (delta / by * scaled).sum(-1).double()
        self.along += float(along.sum())
        self.along_square += float(along.square().sum())
        self.weight += float(scaled.double().square().sum())

    def plus(self, other: Error) -> Error:
        worse = max(self, other, key=lambda error: (error.row_at is not None, error.row))
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        highest = {name: max(getattr(self, name), getattr(other, name)) for name in ("worst", "excess")}
        return Error(row=worse.row, row_at=worse.row_at, **sums, **highest)

    @property
    def rel_l2(self) -> float:
        return (self.difference / self.reference) ** 0.5 if self.reference else self.difference**0.5

    @property
    def gain(self) -> float:
        """x is about 1 + gain times the reference. It is the projection of the error on the reference, each row
        relative to its scale; rounding alone has none."""
        return self.along / self.weight if self.weight else 0.0

    @property
    def sure_gain(self) -> float:
        """The gain beyond what chance explains."""
        chance = CHANCE * self.along_square**0.5 / self.weight if self.weight else 0.0
        return max(0.0, abs(self.gain) - chance)

    def faults(self, name: str, tolerance: Tolerance, local: Error | None = None) -> list[str]:
        """A sentence for each tolerance that is exceeded."""
        ratio, atol, gain = self.ratio_to(local), tolerance.absolute, tolerance.gain
        within = {
            "is not finite": math.isfinite(self.difference),
            f"rel L2 {self.rel_l2:.2e} > {tolerance.rel_l2:.0e}": self.rel_l2 <= tolerance.rel_l2,
            f"max abs {self.worst:.2e} > {atol:.1e} + {atol:.1e} |ref|": self.excess <= atol,
            f"row error {self.row:.2e} of its scale > {tolerance.row:.1e} at {self.place}": self.row <= tolerance.row,
            f"is {1 + self.gain:.6f} times the reference, > {gain:.1e} off": self.sure_gain <= gain,
            f"has {ratio or 0:.2f} times the error of a local call, > {tolerance.ratio}": (
                not tolerance.ratio or (ratio or 0) <= tolerance.ratio
            ),
        }
        return [f"{name} {text}" for text, holds in within.items() if not holds]

    @property
    def place(self) -> str:
        """Of the worst row, in words."""
        return "no row" if self.row_at is None else "batch {}, token {}, head {}".format(*self.row_at)

    def ratio_to(self, local: Error | None) -> float | None:
        return self.rel_l2 / local.rel_l2 if local is not None and local.rel_l2 else None

    def beside(self, local: Error) -> dict[str, Any]:
        """The fields of a `TensorError` that tell of a local call."""
        return {"local_rel_l2": local.rel_l2, "ratio_to_local": self.ratio_to(local)}

    def plain(self) -> dict[str, Any]:
        """The fields of a `TensorError`. worst_row is relative to the row's scale; worst_row_at is empty without rows."""
        at = dict(zip(("batch", "token", "head"), self.row_at or (), strict=False))
        of_row = {"worst_row": self.row, "worst_row_at": at}
        return {"rel_l2": self.rel_l2, "max_abs": self.worst, **of_row, "gain": self.gain}


def total(errors: Iterable[Error]) -> Error:
    return reduce(Error.plus, errors, Error())


def verdict(why: Iterable[str]) -> dict[str, Any]:
    """The fields `passed` and `why`: the faults, None without."""
    text = "; ".join(why) or None
    return {"passed": text is None, "why": text}
