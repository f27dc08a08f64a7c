"""`python -m runner.max_seq attention=ring config=llama3_8b launch.memory_limit_gb=16`: the longest sequence that fits in memory,
predicted by the memory model and then found by forwards (and backwards) that really run, and how far the prediction was. Several
values of a key, such as `attention=ring,zigzag mode=forward,forward_backward`, are a row each. `launch.memory_limit_gb` limits a rank;
without it the limit is the GPU's own. Beside the table, `max_seq.json` in a folder under `outputs/max_seq` has every trial."""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner import app, environment, plan
from runner.config import folders, overrides, resolve
from runner.config.experiment import Experiment
from runner.config.values import InvalidConfig, UnsupportedHere, shown
from runner.launch.worlds import Pool
from runner.measure import duration
from runner.measure.memory_model import is_known, needed_bytes
from runner.output import commands, results, terminal
from runner.record.fields import RankMemory
from runner.record.result import Result

PRECISION = 0.02  # the search ends when the shortest length that does not fit is so near the longest that does
TOKENS = 128  # of a rank: lengths are multiples of it times the world size
MOST_TOKENS = (1 << 31) - 1
SHORTER = 0.85  # of a length that does not fit: the next, while none is known that fits
TRIALS = 5  # of a search, about
COLUMNS = ("setting", "limit", "predicted", "longest", "off by", "peak", "trials", "reason")
WORDS = ("setting", "reason")


@dataclass
class Row:
    """A setting and what was found for it; lengths in tokens, sizes in bytes."""

    setting: str
    status: str = "ok"
    reason: str | None = None
    kernel: str | None = None
    limit: int | None = None
    predicted: int | None = None  # length; None for an external package, and for what is chosen anew for each length
    longest: int | None = None
    error: float | None = None  # predicted / longest - 1
    measured_peak: int | None = None  # at the longest length
    experiment: dict[str, Any] | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Of the table."""
        lengths = ["" if n is None else f"{n:,}" for n in (self.predicted, self.longest)]
        limit, peak = (terminal.gib(n) if n else "" for n in (self.limit, self.measured_peak))
        off = "" if self.error is None else f"{self.error:+.1%}"
        return [self.setting, limit, *lengths, off, peak, str(len(self.trials) or ""), self.reason or ""]


def longest(held: Callable[[int], int | None], limit: int, guess: int, unit: int) -> int:
    """The largest multiple of `unit` that fits, within PRECISION of one that does not; 0 if not even `unit` does. held: the
    bytes that a length takes, nearly proportional to it, or None where it does not fit. guess: a length to begin with."""
    most = MOST_TOKENS // unit
    low, high, n = 0, most + 1, max(1, guess // unit)
    while high - low > max(1, int(PRECISION * low)):
        size = held(n * unit)
        if size is not None:
            low, n = n, int(n * limit / size)
        else:
            high, n = n, 0 if low else int(n * SHORTER)
        least = low + max(1, int(PRECISION * low))
        if high > most:
            n = min(max(n, least), most)
        elif not least <= n < high:
            n = (low + high) // 2
    return low * unit


class Search:
    """The search for one setting, in worlds of `pool`."""

    def __init__(self, pool: Pool, cfg: DictConfig, row: Row, log: Path):
        self.pool, self.cfg, self.row, self.log = pool, cfg, row, log
        self.gpus = resolve.usable_gpus(cfg)
        self.unit = TOKENS * self._experiment(TOKENS).world_size
        self.small = self._experiment(self.unit)
        self.unlimited = replace(self.small, launch=replace(self.small.launch, memory_limit_gb=None))

    def _experiment(self, tokens: int) -> Experiment:
        """A single step, which nothing is compared with."""
        self.cfg.seq_len = tokens
        spec = resolve.experiment(self.cfg, self.gpus, seed=0)
        timing = replace(spec.timing, method="warmup", warmup_runs=0, warmup_ms=0.0, settle_ms=0.0, timing_runs=1)
        check = replace(spec.check, enabled=False)
        return replace(spec, timing=timing, check=check, phases=False, energy=False, baseline="none")

    def run(self) -> None:
        """Fills the row. Raises InvalidConfig and UnsupportedHere."""
        row, gib = self.row, self.small.launch.memory_limit_gb
        if self.small.device == "cpu" and gib is None:
            raise InvalidConfig(
                "launch.memory_limit_gb=null: a CPU's memory is other programs', too; give GiB, such as 0.25"
            )
        plan.check_here(self.small, self.cfg, self.gpus)
        first = self._step(self.unlimited)
        row.kernel = first.chosen.kernel if first.chosen else None
        row.limit = int(gib * 2**30) if gib is not None else min(rank.free or 0 for rank in _ranks(first))
        most = min(row.limit // TOKENS, MOST_TOKENS // self.unit)  # a byte a token, at least
        predicted = self.unit * bisect_right(range(1, most + 1), row.limit, key=self._needed)
        begin = self._experiment(max(predicted, self.unit))
        duration.check_cpu(begin, TRIALS * duration.iteration_s(begin)[0], "a smaller launch.memory_limit_gb")
        row.longest = longest(self._held, row.limit, predicted, self.unit)
        row.experiment = self._experiment(row.longest).plain() if row.longest else None
        if is_known(self.small):
            row.predicted, row.error = predicted, predicted / row.longest - 1 if row.longest else None

    def _needed(self, units: int) -> int:
        return needed_bytes(self._experiment(units * self.unit), str(self.row.kernel))

    def _held(self, tokens: int) -> int | None:
        """The bytes that a step of so many tokens takes on the fullest rank; None if it does not fit."""
        self._step(self.unlimited)  # takes what a process takes once
        started = time.monotonic()
        step = self._step(self._experiment(tokens))
        ranks = _ranks(step)
        trial = {"seq_len": tokens, "fits": False, "seconds": time.monotonic() - started, "status": step.status}
        trial |= {"reason": step.reason, "memory": step.memory and asdict(step.memory)}
        self.row.trials.append(trial)
        if step.status != "ok":
            return None
        # the allocator's limit leaves symmetric memory out
        held = max((rank.peak_reserved or rank.peak_resident or 0) + rank.symmetric for rank in ranks)
        if self.small.launch.memory_limit_gb is not None and held > int(self.row.limit or 0):
            return None
        trial["fits"], self.row.measured_peak = True, max(rank.peak for rank in ranks)
        return held

    def _step(self, spec: Experiment) -> Result:
        """The result of the job, `oom` where it does not fit."""
        tokens, world = spec.workload.seq_len, app.world_of(spec)
        result = Result.begun(self.log.parent, "", "", {}).anew(experiment=spec.plain())
        if not terminal.out.is_terminal:
            terminal.err.print(f"{self.row.setting}: {tokens:,} tokens", soft_wrap=True)
        outcome = self.pool.call(world, "runner.job:run", {"result": result}, spec.launch.timeout_s, self.log)
        if outcome.status == "oom":
            return result.anew(status="oom", reason=outcome.reason)
        if outcome.status == "ok":
            result, _ = outcome.result
        if result.memory is None:
            error = InvalidConfig if outcome.status == "invalid" else UnsupportedHere
            raise error(f"seq_len={tokens}: {outcome.status}: {outcome.reason or result.reason}")
        return result


def _ranks(step: Result) -> list[RankMemory]:
    return step.memory.by_rank if step.memory else []


def search(jobs: Sequence[tuple[str, ...]], pool: Pool, folder: Path) -> list[Row]:
    """A row for each run of a sweep, named by what differs between them."""
    rows, swept = [], plan.swept(jobs)
    for job in jobs:
        rows.append(row := Row(" ".join(text for text in job if text in swept or len(jobs) == 1)))
        try:
            Search(pool, overrides.composed(job), row, folder / "run.log").run()
        except (InvalidConfig, UnsupportedHere) as error:
            row.status, row.reason = plan.refusal(error), str(error)
    return rows


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = commands.parser("runner.max_seq", __doc__)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE")
    arguments = parser.parse_args(arguments).overrides
    jobs = overrides.jobs(arguments)
    fixed = "seq_len=", "seqlens=[", "kv_lengths=["
    if given := [text for text in arguments if text.lstrip("+").startswith(fixed)]:
        raise InvalidConfig(f"{shown(given[0])}: is what is looked for; leave it out")
    output = overrides.composed(jobs[0]).output
    started = time.monotonic()
    with results.writing(Path(output)), Pool() as pool:
        folder = folders.create(Path(output) / "max_seq", folders.now())
        rows = search(jobs, pool, folder)
        surroundings = environment.host() | environment.period(started)
        about = {"schema_version": 1, "overrides": arguments, "precision": PRECISION, "environment": surroundings}
        text = json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1, default=str)
        results.write_text(folder / "max_seq.json", text + "\n")
    same = " ".join(text for text in arguments if not text.startswith("output="))
    cells = [row.cells() for row in rows]
    terminal.print_rows(f"Longest sequences: {same}", COLUMNS, cells, WORDS, WORDS, ("limit", "trials"))
    terminal.out.print(f"Result: {folder}", soft_wrap=True)
    return 0 if any(row.longest for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
