"""`python -m runner.torture`: faults and bad input at random, tried on the real program on CPU ranks.

    python -m runner.torture --runs 60 --seed 1
    python -m runner.torture --runs 1 --seed 17 --kinds fault    # one of them again

Each trial has a seed of its own: the first one --seed, the next one more. Checked after each: every run has one typed
result, no other run is harmed, no process, world's folder or shared memory is left, and nothing ended in a traceback.

Kinds: `overrides` are command lines that nobody would write, stopped before a world would start; `damaged` are files of a
sweep that is reported, compared or resumed; `fault` is launch.fault; `process` kills or stops a process of a world; `stop`
signals the program; `disk` limits its files, `memory` its ranks; `together` is two programs in one folder.

Exit status: 0 when everything was handled, else 1."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from runner.output import commands, display
from runner.torture import left, program
from runner.torture.kinds import KINDS, Store, Trial


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options))


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.torture", __doc__)
    add = parser.add_argument
    add("--runs", type=int, default=60, help="trials (default 60)")
    add("--seed", type=int, default=None, help="of the first trial (default: random)")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="KIND", help="only these")
    return parser


def _main(options: argparse.Namespace) -> int:
    if options.runs < 1:
        raise ValueError(f"--runs {options.runs}: must be at least 1")
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    program.warm()
    tried: Counter[str] = Counter()
    failed: dict[str, list[int]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as name:  # a short path: there are sockets below
        store = Store(Path(name) / "store")
        for number in range(seed, seed + options.runs):
            kind = _kind(number, options.kinds)
            tried[kind] += 1
            if not _tried(kind, number, Path(name), store):
                failed.setdefault(kind, []).append(number)
    _table(tried, failed)
    display.out.print(f"{options.runs} from --seed {seed} in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def _kind(number: int, kinds: Sequence[str]) -> str:
    return random.Random(number).choices(list(kinds), [KINDS[kind][1] for kind in kinds])[0]


def _tried(kind: str, number: int, folder: Path, store: Store) -> bool:
    """Do one trial and print what was wrong; whether it was handled."""
    with tempfile.TemporaryDirectory(prefix="t-", dir=folder, ignore_cleanup_errors=True) as name:
        trial = Trial(Path(name), random.Random(f"{number} {kind}"), store)
        before = left.shared()
        try:
            wrong = KINDS[kind][0](trial)
        except Exception:  # ours; the other trials go on
            wrong = [traceback.format_exc()]
        wrong += left.left(trial.folder, before)
    if wrong:
        lines = "\n".join(f"    {one}" for one in wrong)
        text = f"failed: --runs 1 --seed {number} --kinds {kind}: {', '.join(trial.notes)}\n{lines}"
        display.out.print(text, soft_wrap=True, markup=False)
    return not wrong


def _table(tried: Counter[str], failed: dict[str, list[int]]) -> None:
    table = Table("kind", *(("tried", "handled", "failed")), "seeds to repeat")
    for kind in (one for one in KINDS if tried[one]):
        bad = failed.get(kind, [])
        seeds = " ".join(map(str, bad))
        table.add_row(kind, str(tried[kind]), str(tried[kind] - len(bad)), str(len(bad)), escape(seeds))
    lost = sum(map(len, failed.values()))
    table.add_row("all", str(tried.total()), str(tried.total() - lost), str(lost))
    display.out.print(table)


if __name__ == "__main__":
    sys.exit(main())
