"""`ab=KEY:FIRST,SECOND`: a sweep over two values of one key, whose runs take turns, and a verdict at its end.

    python -m runner ab=kernel:sdpa_flash,math
    python -m runner ab=attention:ring,zigzag seq_len=8192,16384
    python -m runner ab='window:[512,0],[1024,0]' timing.timing_runs=60

It stands for `-m KEY=FIRST,SECOND order=interleaved`. With further values of other keys there is a verdict for each of
their combinations. What both runs of a pair have in common in a round, such as a slower clock, is taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import ChoiceSweep

from runner.config import overrides
from runner.config.values import InvalidConfig, shown

if TYPE_CHECKING:
    from runner.report.runs import Run
    from runner.report.verdicts import Interval

PREFIX = "ab="
ORDER = "order=interleaved"
WHERE = "dry_run=", "order=", "output=", "resume=", "hydra"  # overrides that say nothing of a run's work
NONE = "experiment", "hydra"  # keys that are no setting of a run


@dataclass(frozen=True)
class Ab:
    """text: as it was given. The key, and the overrides that set its two values."""

    text: str
    key: str
    first: str
    second: str

    def verdicts(self, folder: Path) -> list[str]:
        """A line for each pair of runs in a sweep's folder."""
        from runner.report.runs import read  # of use to few runs

        found: dict[frozenset[str], dict[str, Run]] = {}
        for run in read([folder]):
            given = run.environment.overrides
            for mine in {self.first, self.second} & set(given):
                others = frozenset(text for text in given if text != mine and not text.startswith(WHERE))
                found.setdefault(others, {})[mine] = run
        pairs = [(others, runs) for others, runs in found.items() if len(runs) == 2]
        common = frozenset.intersection(*(others for others, _ in pairs)) if pairs else frozenset()
        return [self._line(sorted(others - common), runs) for others, runs in pairs]

    def _line(self, others: list[str], runs: dict[str, Run]) -> str:
        from runner.report.table import time
        from runner.report.verdicts import TOLERANCE, speed

        a, b = runs[self.first], runs[self.second]
        about = f"{' '.join(others)}: " if others else ""
        for mine, run in runs.items():
            if not run.ok:
                return f"{about}no verdict: {mine} is {run.status}" + (
                    f", {run.result.reason}" * bool(run.result.reason)
                )
        verdict, ratio = speed(a, b, "total", TOLERANCE, paired=True)
        times = f"{time(a, 'total')} → {time(b, 'total')} ms"
        return f"{about}{self.second} against {self.first}: {verdict}, {_by(verdict, ratio)} ({times})"


def _by(verdict: str, ratio: Interval | None) -> str:
    if ratio is None:
        return "as an interval needs 6 samples; give more timing.timing_runs"
    low, high = (f"{end - 1:+.1%}" for end in ratio)
    more = "; more timing.timing_runs narrows it" if verdict == "inconclusive" else ""
    return f"{low} to {high} of its time{more}"


def expand(arguments: Sequence[str]) -> tuple[list[str], Ab | None]:
    """The overrides with `ab=` written out as a sweep. Raises InvalidConfig."""
    given = [text for text in arguments if text.startswith(PREFIX)]
    if not given:
        return list(arguments), None
    if len(given) > 1:
        raise InvalidConfig(f"{shown(' '.join(given))}: one key is compared; sweep over the other one, KEY=VALUE,VALUE")
    key, _, values = given[0].removeprefix(PREFIX).partition(":")
    found = overrides.parse(f"{key}={values}") if key and values else None
    sweep = found.value() if found else None
    if found is None or not isinstance(sweep, ChoiceSweep) or len(sweep.list) != 2 or found.is_add():
        raise InvalidConfig(f"{shown(given[0])}: must be ab=KEY:FIRST,SECOND; for instance ab=kernel:sdpa_flash,math")
    if key.split(".")[0].split("/")[0] in NONE:
        raise InvalidConfig(f"{shown(given[0])}: {key} is no setting of a run; compare another key")
    others = [text for text in arguments if text != given[0]]
    for text in others:
        name, _, value = text.lstrip("+").partition("=")
        if name == key:
            raise InvalidConfig(f"{shown(text)}: {given[0]} gives both values; leave it out")
        if name == "hydra/launcher" or (name == "order" and value != "interleaved"):
            raise InvalidConfig(f"{shown(text)}: the runs of ab= take turns in one program; leave it out")
    first, second = (f"{key}={text}" for text in found.sweep_string_iterator())
    if first == second:
        raise InvalidConfig(f"{shown(given[0])}: both values are the same; seed is one to see the noise, ab=seed:1,2")
    order = [] if ORDER in others else [ORDER]
    return [*others, f"{key}={values}", *order], Ab(given[0], key, first, second)
