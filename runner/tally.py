"""Where a sweep is: the run, what is done, failed and skipped, and the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runner.output.terminal import seconds

SKIPPED = ("invalid", "unsupported")  # statuses of runs that were not started


class Tally:
    """Of one sweep of this process. `runs` is None where another program counts them."""

    def __init__(self) -> None:
        self.runs: int | None = None
        self.started = time.monotonic()
        self.expected: dict[str, float] = {}  # seconds by a run's name, from a plan of all runs
        self.left: dict[str, float] = {}  # the share of each run that is not over
        self.spent = 0.0  # expected seconds of what was run
        self.statuses: list[str] = []
        self.until_limit = False  # a run that ends out of memory is no failure

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
