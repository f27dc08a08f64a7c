"""`python -m tests.torture`: faults and bad input at random, tried on the real program on CPU ranks.

    python -m tests.torture --runs 60 --seed 1
    python -m tests.torture --runs 1 --seed 17 --kinds fault    # one of them again

Each trial has a seed of its own: the first one --seed, the next one more. Checked after each: every run has one typed
result, no other run is harmed, no process, world's folder or shared memory is left, and nothing ended in a traceback.

Kinds: `overrides` are command lines that nobody would write, stopped before a world would start; `damaged` are files of a
sweep that is reported, compared, packed or resumed; `fault` is launch.fault; `process` kills or stops a process of a world; `stop`
signals the program; `disk` limits its files, `memory` its ranks; `together` is two programs in one folder. Of any 60 trials in
a row each kind has a fixed number, the more the cheaper it is.

Exit status: 0 when everything was handled, else 1."""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from runner.output import commands, display
from tests.torture import left, program
from tests.torture.kinds import KINDS, Store, Trial, kind_of


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options))


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("tests.torture", __doc__)
    add = parser.add_argument
    add("--runs", type=int, default=60, help="trials (default 60)")
    add("--seed", type=int, default=None, help="of the first trial (default: random)")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="KIND", help="only these")
    return parser


@dataclass
class Tally:
    """The trials of a kind: how many there were, the seeds of those that failed, and their CPU time."""

    tried: int = 0
    failed: list[int] = field(default_factory=list)
    cpu_s: float = 0.0


def _main(options: argparse.Namespace) -> int:
    if options.runs < 1:
        raise ValueError(f"--runs {options.runs}: must be at least 1")
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    program.warm()
    tallies = {kind: Tally() for kind in KINDS}
    started = time.monotonic()
    try:
        with _folder() as folder:
            store = Store(folder / "store")
            for number in range(seed, seed + options.runs):
                kind = kind_of(number, options.kinds)
                before_s = _cpu_s()
                handled = _tried(kind, number, folder, store)
                tally = tallies[kind]
                tally.tried += 1
                tally.cpu_s += _cpu_s() - before_s
                tally.failed += [] if handled else [number]
    except Stopped as stopped:
        print(f"{stopped}; nothing is left of its trials", file=sys.stderr)
        return stopped.status
    finally:
        if tried := {kind: tally for kind, tally in tallies.items() if tally.tried}:
            _table(tried)
    display.out.print(f"{options.runs} from --seed {seed} in {time.monotonic() - started:.0f} s")
    return 1 if any(tally.failed for tally in tallies.values()) else 0


class Stopped(BaseException):
    """Ctrl-C or SIGTERM; status: the program's exit status."""

    def __init__(self, number: int, _: object = None):
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.status = 128 + number


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The folder of all trials. At its end, and where a signal ends it, their processes are killed and it is removed."""

    def stop(number: int, frame: object) -> None:
        for each in stops:
            signal.signal(each, signal.SIG_IGN)  # more of them would interrupt the cleaning up
        raise Stopped(number)

    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in stops}
    try:
        # a short path: there are sockets below
        with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as name:
            try:
                yield Path(name)
            finally:
                program.kill_all()
                left.kill(Path(name))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cpu_s() -> float:
    """CPU time of the processes that ended, but for those that nobody waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tried(kind: str, number: int, folder: Path, store: Store) -> bool:
    """Do one trial and print what was wrong; whether it was handled."""
    with tempfile.TemporaryDirectory(prefix="t-", dir=folder, ignore_cleanup_errors=True) as name:
        trial = Trial(Path(name), random.Random(f"{number} {kind}"), store)
        try:
            wrong = KINDS[kind][0](trial)
        except Exception:  # ours; the other trials go on
            wrong = [traceback.format_exc()]
        wrong += left.left(trial.folder)
    if wrong:
        lines = "\n".join(f"    {one}" for one in wrong)
        text = f"failed: --runs 1 --seed {number} --kinds {kind}: {', '.join(trial.notes)}\n{lines}"
        display.out.print(text, soft_wrap=True, markup=False)
    return not wrong


def _table(tallies: dict[str, Tally]) -> None:
    table = Table("kind", *("tried", "handled", "failed", "CPU s"), "seeds to repeat")
    for kind, one in tallies.items():
        seeds = " ".join(map(str, one.failed))
        table.add_row(kind, *_counts([one]), escape(seeds))
    table.add_row("all", *_counts(list(tallies.values())))
    display.out.print(table)


def _counts(tallies: Sequence[Tally]) -> tuple[str, ...]:
    tried, failed = sum(one.tried for one in tallies), sum(len(one.failed) for one in tallies)
    return str(tried), str(tried - failed), str(failed), f"{sum(one.cpu_s for one in tallies):.0f}"


if __name__ == "__main__":
    sys.exit(main())
