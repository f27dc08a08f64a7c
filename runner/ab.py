"""`ab=KEY:FIRST,SECOND`: a sweep over two values of one key, whose runs take turns, and a verdict at its end.

    python -m runner ab=kernel:sdpa_flash,math
    python -m runner ab=attention:ring,zigzag seq_len=8192,16384
    python -m runner ab='window:[512,0],[1024,0]' timing.timing_runs=60

It stands for `-m KEY=FIRST,SECOND order=interleaved:KEY`. With further values of other keys there is a verdict for each of
their combinations. What both runs of a pair have in common in a round, such as a slower clock, is taken out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import ChoiceSweep

from runner.config import overrides
from runner.config.values import InvalidConfig, shown
from runner.rounds import INTERLEAVED

if TYPE_CHECKING:
    from runner.report.runs import Run
    from runner.report.verdicts import Interval

PREFIX = "ab="
ORDER = f"order={INTERLEAVED}:"
WHERE = "dry_run=", "order=", "output=", "resume=", "hydra"  # overrides that say nothing of a run's work
NO_SETTINGS = "experiment", "hydra"  # keys


def expand(arguments: Sequence[str]) -> list[str]:
    """The overrides with `ab=` written out as a sweep. Raises InvalidConfig."""
    asked = [text for text in arguments if text.startswith(PREFIX)]
    if not asked:
        return list(arguments)
    if len(asked) > 1:
        raise InvalidConfig(f"{shown(' '.join(asked))}: one key is compared; sweep over the other one, KEY=VALUE,VALUE")
    key, _, values = asked[0].removeprefix(PREFIX).partition(":")
    override = overrides.parse(f"{key}={values}") if key and values else None
    if override is None or override.is_add() or len(_values(f"{key}={values}")) != 2:
        raise InvalidConfig(f"{shown(asked[0])}: must be ab=KEY:FIRST,SECOND; for instance ab=kernel:sdpa_flash,math")
    if key.split(".")[0].split("/")[0] in NO_SETTINGS:
        raise InvalidConfig(f"{shown(asked[0])}: {key} is no setting of a run; compare another key")
    if len({*_values(f"{key}={values}")}) == 1:
        raise InvalidConfig(f"{shown(asked[0])}: both values are the same; seed is one to see the noise, ab=seed:1,2")
    others = [text for text in arguments if text not in (asked[0], f"order={INTERLEAVED}")]
    for text in others:
        name = text.lstrip("+").partition("=")[0]
        if name == key:
            raise InvalidConfig(f"{shown(text)}: {asked[0]} gives both values; leave it out")
        if name in ("hydra/launcher", "order"):
            raise InvalidConfig(f"{shown(text)}: the runs of ab= take turns in one program; leave it out")
    return [*others, f"{key}={values}", f"{ORDER}{key}"]


def _values(text: str) -> list[str]:
    """The overrides of a sweep's runs, as a run records them."""
    override = overrides.parse(text)
    if not isinstance(override.value(), ChoiceSweep):
        return []
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def verdicts(folder: Path, arguments: Sequence[str]) -> list[str]:
    """A line for each pair of runs in a sweep's folder that `ab=` compares, by the sweep's overrides."""
    key = next((text.removeprefix(ORDER) for text in arguments if text.startswith(ORDER)), None)
    if key is None:
        return []
    from runner.report.runs import read  # of use to few runs

    both = _values(next(text for text in arguments if text.startswith(f"{key}=")))
    alike: dict[frozenset[str], dict[str, Run]] = {}
    for run in read([folder]):
        asked = run.environment.overrides
        for mine in {*both} & {*asked}:
            others = frozenset(text for text in asked if text != mine and not text.startswith(WHERE))
            alike.setdefault(others, {})[mine] = run
    pairs = [(others, runs) for others, runs in alike.items() if len(runs) == 2]
    common = frozenset.intersection(*(others for others, _ in pairs)) if pairs else frozenset()
    return [_line(sorted(others - common), both, runs) for others, runs in pairs]


def _line(others: list[str], both: list[str], runs: dict[str, Run]) -> str:
    from runner.report.table import time
    from runner.report.verdicts import TOLERANCE, speed

    about = f"{' '.join(others)}: " if others else ""
    for mine, run in runs.items():
        if not run.ok:
            reason = f", {run.result.reason}" if run.result.reason else ""
            return f"{about}no verdict: {mine} is {run.status}{reason}"
    first, second = (runs[text] for text in both)
    verdict, ratio = speed(first, second, "total", TOLERANCE, paired=True)
    times = f"{time(first, 'total')} → {time(second, 'total')} ms"
    return f"{about}{both[1]} against {both[0]}: {verdict}, {_by(verdict, ratio)} ({times})"


def _by(verdict: str, ratio: Interval | None) -> str:
    if ratio is None:
        return "as an interval needs 6 samples; give more timing.timing_runs"
    low, high = (f"{end - 1:+.1%}" for end in ratio)
    more = "; more timing.timing_runs narrows it" if verdict == "inconclusive" else ""
    return f"{low} to {high} of its time{more}"
