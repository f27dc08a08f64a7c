"""How far predictions are from results: those of smaller worlds calibrate, those of the largest one are predicted.

Calibrated is the compute alone: its time is multiplied by a factor, the median over the smaller worlds' passes of the same kernel and
kind of call that are not bound by CPU launch overhead. Transfers are as the model has them. A CPU's rates and links are those that
the result itself measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from runner.config.values import Refusal
from runner.costs.model import Duration
from runner.reading import read_text
from runner.report.modelled import Kind, Point, points
from runner.report.runs import Run

LEAST = 3  # passes that make a factor
STORED = Path(__file__).with_name("validated.json")


def factors(measured: Iterable[Point]) -> dict[Kind, float]:
    """By how much compute takes longer than by the model."""
    same: dict[Kind, list[float]] = defaultdict(list)
    for point in measured:
        if not point.launch_bound and point.model.compute:
            rest = point.model.gpu - point.model.compute
            same[point.kind].append((point.measured - rest) / point.model.compute)
    return {kind: median(ratios) for kind, ratios in same.items() if len(ratios) >= LEAST and median(ratios) > 0}


def calibrated(duration: Duration, kind: Kind, by: Mapping[Kind, float]) -> Duration:
    return replace(duration, compute=duration.compute * by.get(kind, 1.0))


@dataclass(frozen=True)
class Errors:
    """Of the passes of one kind of call: shares of the measured time, by size."""

    called: str
    launch_bound: bool
    passes: int
    median: float
    p90: float
    worst: float

    @property
    def text(self) -> str:
        bound = ", bound by CPU launch overhead" if self.launch_bound else ""
        return f"{self.called}{bound}: median {self.median:.1%}, worst {self.worst:.0%} of {self.passes} passes"

    @property
    def markdown(self) -> str:
        bound = "CPU launch overhead" if self.launch_bound else "GPU"
        return f"| {self.called} | {bound} | {self.passes} | {self.median:.1%} | {self.p90:.1%} | {self.worst:.0%} |"


@dataclass(frozen=True)
class Validation:
    """device: of the results. calibrated_on, predicted: their world sizes."""

    device: str
    calibrated_on: tuple[int, ...]
    predicted: int
    errors: tuple[Errors, ...]
    factors: tuple[tuple[Kind, float], ...]

    @property
    def _worlds(self) -> str:
        return " and ".join(map(str, self.calibrated_on))

    def text(self, called: Collection[str]) -> str:
        """Of these kinds of call."""
        errors = "; ".join(error.text for error in self.errors if error.called in called)
        return f"{self.device}, {self._worlds} to {self.predicted} ranks: {errors or 'no such call'}"

    @property
    def markdown(self) -> str:
        return (
            f"{self.device}: calibrated on {self._worlds} ranks, predicted {self.predicted}. Shares of the measured time.\n\n"
            "| call | bound by | passes | median | p90 | worst |\n|---|---|---:|---:|---:|---:|\n"
        ) + "\n".join(error.markdown for error in self.errors)


def validate(runs: Sequence[Run]) -> Validation:
    """Raises Refusal where there are not two world sizes of the model's variants on one kind of device."""
    known = points(runs)
    devices = {point.run.gpu or "cpu" for point in known}
    worlds = sorted({point.run.world_size or 1 for point in known})
    if len(worlds) < 2 or len(devices) != 1:
        raise Refusal(
            f"{len(known)} passes of world sizes {worlds} on {', '.join(sorted(devices)) or 'no device'}: a validation needs results "
            "of two world sizes on one kind of device; give --validate a folder with both"
        )
    *smaller, largest = worlds
    by = factors(point for point in known if point.run.world_size != largest)
    shares: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for point in known:
        if point.run.world_size == largest:
            ms = calibrated(point.model, point.kind, by).ms
            shares[point.launch_bound, point.kind[3]].append(abs(ms / point.measured - 1))
    errors = []
    for (bound, name), ordered in sorted((key, sorted(x)) for key, x in shares.items()):
        p90 = ordered[int(0.9 * (len(ordered) - 1))]
        summed = (round(x, 4) for x in (median(ordered), p90, ordered[-1]))
        errors.append(Errors(name, bound, len(ordered), *summed))
    return Validation(devices.pop(), tuple(smaller), largest, tuple(errors), tuple(sorted(by.items())))


def stored() -> Validation:
    """The validation of the results that this project keeps, of which `--write` makes a new one."""
    values = json.loads(read_text(STORED))
    values["calibrated_on"] = tuple(values["calibrated_on"])
    values["errors"] = tuple(Errors(**error) for error in values["errors"])
    values["factors"] = tuple((tuple(kind), factor) for kind, factor in values["factors"])
    return Validation(**values)
