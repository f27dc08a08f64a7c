"""What the runs of a command share: where its sweep is (the run, what is done, failed and skipped, the time left), the lengths that
failed, and its folders."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from runner.config.resolve import series
from runner.output.terminal import seconds

LIMITS = ("oom", "timeout", "crash")  # statuses that end a series of lengths
SKIPPED = ("invalid", "unsupported")  # statuses of runs that were not started


class Tally:
    """Of one command of this process. runs: None where another program counts them. error: why the command cannot go on."""

    def __init__(self) -> None:
        self.runs: int | None = None
        self.started = time.monotonic()
        self.expected: dict[str, float] = {}  # seconds by a run's name, from a plan of all runs
        self.left: dict[str, float] = {}  # the share of each run that is not over
        self.spent = 0.0  # expected seconds of what was run
        self.statuses: list[str] = []
        self.until_limit = False  # a run that ends out of memory is no failure
        self.folders: list[Path] = []  # of sweeps
        self.error: Exception | None = None
        self._failed: dict[str, tuple[int, str]] = {}  # the shortest length that failed and how, by series

    def expect(self, by_name: Mapping[str, float]) -> None:
        self.expected = dict(by_name)

    def over(self, name: str, status: str | None, share: float = 1.0, ran: bool = True) -> None:
        """So large a share of a run has ended; status: of one that is wholly over. ran: whether it took time."""
        if ran:
            self.spent += share * self._weight(name)
        self.left[name] = 0.0 if status else self.left.get(name, 1.0) - share
        if status:
            self.statuses.append(status)

    def _weight(self, name: str) -> float:
        return self.expected.get(name, 0.0) if self.expected else 1.0

    def seconds_left(self) -> float | None:
        """By what the runs so far took of the time expected for them; before the first ended, by the plan alone. None where
        nothing is known."""
        if self.runs is None:
            return None
        if self.expected:
            rest = sum(weight * self.left.get(name, 1.0) for name, weight in self.expected.items())
        else:
            rest = max(0, self.runs - len(self.left)) + sum(self.left.values())
        if self.spent:
            return rest * (time.monotonic() - self.started) / self.spent
        return rest if self.expected else None

    def place(self, number: int) -> str:
        """The place of run `number` (from 0) in its sweep, and the time since the start: `3 of 11, 24 s`."""
        of = f" of {self.runs}" if self.runs is not None else ""
        return f"{number + 1}{of}, {time.monotonic() - self.started:.0f} s"

    def counts(self) -> str:
        """`2 done, 1 failed, 0 skipped, about 3 min left`; kept runs are done. Empty where another program counts the runs."""
        if self.runs is None:
            return ""
        done, skipped = self.statuses.count("ok"), sum(status in SKIPPED for status in self.statuses)
        text = f"{done} done, {len(self.statuses) - done - skipped} failed, {skipped} skipped"
        left = self.seconds_left()
        return text if not left else f"{text}, about {seconds(left)} left"

    def note_failure(self, cfg: DictConfig, status: str, reason: str | None) -> None:
        """Remembers the length of a run that failed, for `beyond_limit`."""
        if status in LIMITS and cfg.seq_len is not None:
            key, length = series(cfg), cfg.seq_len
            if key not in self._failed or length < self._failed[key][0]:
                self._failed[key] = length, f"{status}: {reason}"

    def beyond_limit(self, cfg: DictConfig) -> str | None:
        """With `until_limit`, why a run is not started: a shorter one that differs in its length alone failed."""
        failure = self._failed.get(series(cfg)) if cfg.until_limit and cfg.seq_len is not None else None
        if failure is None or cfg.seq_len <= failure[0]:
            return None
        length, how = failure
        return f"seq_len={cfg.seq_len}: not run, as seq_len={length} ended as {how}; until_limit=false runs it"
