"""`python -m runner.max_seq attention=ring config=llama3_8b launch.memory_limit_gb=16`: the longest sequence that fits in memory,
predicted by the memory model and then found by forwards (and backwards) that really run, and how far the prediction was. Several
values of a key, such as `attention=ring,zigzag mode=forward,forward_backward`, are a row each. `launch.memory_limit_gb` limits a rank;
without it the limit is the GPU's own. Beside the table, `max_seq.json` in a folder under `outputs/max_seq` has every trial."""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from runner import app, environment
from runner.config import folders, overrides, resolve
from runner.config.experiment import Experiment
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.launch.outcome import Outcome
from runner.launch.pool import Pool
from runner.measure.memory_model import is_known, needed_bytes
from runner.output import results, terminal
from runner.peers import missing

PRECISION = 0.02  # the search ends when the shortest length that does not fit is so near the longest that does
TOKENS = 128  # of a rank: lengths are multiples of it times the world size
MOST_TOKENS = (1 << 31) - 1
SHORTER = 0.85  # of a length that does not fit: the next, while none is known that fits
FAILED = ("timeout", "crash", "invalid", "unsupported")


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
    predicted_peak: int | None = None  # at the longest length
    measured_peak: int | None = None
    experiment: dict[str, Any] | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)


def longest(held: Callable[[int], int | None], limit: int, guess: int, unit: int) -> int:
    """The largest multiple of `unit` that fits, within PRECISION of one that does not; 0 if not even `unit` does. held: the
    bytes that a length takes, nearly proportional to it, or None where it does not fit. guess: a length to begin with."""
    most = MOST_TOKENS // unit
    low, high, n = 0, most + 1, max(1, guess // unit)
    while high - low > max(1, int(PRECISION * low)):
        found = held(n * unit)
        if found is not None:
            low, n = n, int(n * limit / found)
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
        first = self._experiment(TOKENS)
        self.unit = TOKENS * first.world_size
        self.small = self._experiment(self.unit)
        self._check(first)

    def _experiment(self, tokens: int) -> Experiment:
        self.cfg.seq_len = tokens
        return resolve.experiment(self.cfg, self.gpus, seed=0)

    def _check(self, spec: Experiment) -> None:
        if spec.device == "cpu" and spec.launch.memory_limit_gb is None:
            raise InvalidConfig(
                "launch.memory_limit_gb=null: a CPU's memory is other programs', too; give GiB, such as 0.25"
            )
        if spec.chosen and (reason := missing(spec.chosen, spec.device)):
            raise UnsupportedHere(reason)

    def run(self) -> None:
        row, limit = self.row, self.small.launch.memory_limit_gb
        row.kernel, free = self._call("facts", self.small, small=self.small.plain()).result
        row.limit = free if limit is None else int(limit * 2**30)
        most = min(
            row.limit // (self.unit // self.small.world_size), MOST_TOKENS // self.unit
        )  # a byte a token, at least
        predicted = self.unit * bisect_right(range(1, most + 1), row.limit, key=self._needed)
        known = is_known(self.small)
        row.predicted = predicted if known else None
        row.longest = longest(self._held, row.limit, predicted, self.unit)
        if row.longest:
            row.experiment = self._experiment(row.longest).plain()
            row.predicted_peak = self._needed(row.longest // self.unit) if known else None
            row.error = predicted / row.longest - 1 if known else None

    def _needed(self, units: int) -> int:
        return needed_bytes(self._experiment(units * self.unit), str(self.row.kernel))

    def _held(self, tokens: int) -> int | None:
        """The bytes that a step of so many tokens takes on the fullest rank; None if it does not fit."""
        spec, started = self._experiment(tokens), time.monotonic()
        outcome = self._call("run", spec, experiment=spec.plain(), small=self.small.plain())
        trial: dict[str, Any] = {"seq_len": tokens, "status": outcome.status, "reason": outcome.reason, "fits": False}
        trial |= (outcome.result or {}) | {"seconds": time.monotonic() - started}
        self.row.trials.append(trial)
        if not trial["fits"]:
            return None
        self.row.measured_peak = max(by["needed"] for by in trial["memory"])
        return max(by["held"] for by in trial["memory"])

    def _call(self, name: str, spec: Experiment, **arguments: Any) -> Outcome:
        if not terminal.out.is_terminal:
            terminal.err.print(f"{self.row.setting}: {spec.workload.seq_len:,} tokens", soft_wrap=True)
        world, timeout = app.world_of(spec), spec.launch.timeout_s
        outcome = self.pool.call(world, f"runner.measure.one_step:{name}", arguments, timeout, self.log)
        if outcome.status in FAILED:
            error = InvalidConfig if outcome.status == "invalid" else UnsupportedHere
            raise error(f"seq_len={spec.workload.seq_len}: {outcome.status}: {outcome.reason}")
        return outcome


def settings(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Each combination of a sweep's values: what differs between them, and all its overrides."""
    parsed = OverridesParser.create().parse_overrides(arguments)
    swept = [[f"{o.key_or_group}={x}" for x in o.sweep_string_iterator()] for o in parsed if o.is_sweep_override()]
    same = [text for text, o in zip(arguments, parsed, strict=True) if not o.is_sweep_override()]
    return [(" ".join(each), [*same, *each]) for each in product(*swept)]


def table(rows: list[Row], same: str) -> Any:
    found = terminal.new_table(f"Longest sequences: {same}")
    for column in ("setting", "limit", "predicted", "longest", "off by", "model's peak", "peak", "trials", "reason"):
        found.add_column(column, justify="left" if column in ("setting", "reason") else "right")
    for row in rows:
        tokens = [f"{n:,}" if n is not None else "" for n in (row.predicted, row.longest)]
        sizes = [terminal.gib(n) if n else "" for n in (row.limit, row.predicted_peak, row.measured_peak)]
        off = "" if row.error is None else f"{row.error:+.1%}"
        found.add_row(row.setting, sizes[0], *tokens, off, *sizes[1:], f"{len(row.trials)}", row.reason or "")
    return found


def search(arguments: list[str], pool: Pool, folder: Path) -> list[Row]:
    rows = []
    resolve.register()
    with initialize_config_module("runner.conf", version_base="1.3"):
        for setting, given in settings(arguments):
            rows.append(row := Row(setting))
            try:
                Search(pool, compose("config", overrides=given), row, folder / "run.log").run()
            except (InvalidConfig, UnsupportedHere) as error:
                row.status = "invalid" if isinstance(error, InvalidConfig) else "unsupported"
                row.reason = str(error)
    return rows


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    resolve.register()
    reason = overrides.problem(arguments)
    if reason is not None:
        print(f"invalid: {reason}", file=sys.stderr)
        return 2
    started, output = time.monotonic(), next((a[7:] for a in arguments if a.startswith("output=")), "outputs")
    with results.writing(Path(output)), Pool() as pool:
        folder = folders.create(Path(output) / "max_seq", folders.now())
        rows = search(arguments, pool, folder)
        surroundings = environment.host() | environment.period(started)
        about = {"schema_version": 1, "overrides": arguments, "precision": PRECISION, "environment": surroundings}
        text = json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1, default=str)
        results.write_text(folder / "max_seq.json", text + "\n")
    same = " ".join(text for text in arguments if not text.startswith("output="))
    terminal.show(table(rows, same), ("setting", "reason"), ("limit", "trials", "model's peak"))
    terminal.out.print(f"Result: {folder}", soft_wrap=True)
    return 0 if any(row.longest for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
