"""What the runs of a sweep share: their number, the seed of their inputs, and the lengths that failed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from runner.config import overrides
from runner.config.resolve import series
from runner.config.values import InvalidConfig, Refused
from runner.output import reader
from runner.reading import read_text
from runner.tally import Tally

SEEDS = 1 << 31
SEED = "seed"  # its file in a sweep's folder
LIMITS = ("oom", "timeout", "crash")  # statuses that end a series of lengths

tally = Tally()  # of this program's sweep
_failed: dict[str, tuple[int, str]] = {}  # the shortest length that failed and how, by series


def begin() -> None:
    """Forget an earlier sweep of this process. The seed stays: all runs of a process have the same inputs."""
    global tally
    tally = Tally()
    _failed.clear()


class Count(Callback):
    """Count a sweep's runs, those of an experiment's file included, before the first starts; too many are refused."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        texts = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        try:
            # unresolved: iterating would resolve interpolations
            given = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            tally.runs = overrides.count([*texts, *given])  # type: ignore[misc, list-item]
            tally.until_limit = config.until_limit
        except InvalidConfig as error:
            raise Refused(str(error)) from None


def note_failure(cfg: DictConfig, status: str, reason: str | None) -> None:
    """Remembers the length of a run that failed, for `beyond_limit`."""
    if status not in LIMITS or cfg.seq_len is None:
        return
    key, length = series(cfg), cfg.seq_len
    if key not in _failed or length < _failed[key][0]:
        _failed[key] = length, f"{status}: {reason}"


def beyond_limit(cfg: DictConfig) -> str | None:
    """With `until_limit`, why a run is not started: a shorter one that differs in its length alone failed."""
    found = _failed.get(series(cfg)) if cfg.until_limit and cfg.seq_len is not None else None
    if found is None or cfg.seq_len <= found[0]:
        return None
    length, how = found
    return f"seq_len={cfg.seq_len}: not run, as seq_len={length} ended as {how}; until_limit=false runs it"


@lru_cache
def fresh_seed() -> int:
    """One for all runs of an invocation, so that every variant gets the same inputs."""
    return secrets.randbelow(SEEDS)


def known_seed(folder: Path) -> int:
    """The seed of a sweep's folder: the recorded one, else that of its earlier runs, else a fresh one."""
    known = _recorded(folder)
    return next(_drawn(folder), fresh_seed()) if known is None else known


def seed_of(folder: Path) -> int:
    """As `known_seed`, and recorded in the folder. So a sweep that is resumed, or done by several programs, has the same
    inputs for all runs."""
    seed = known_seed(folder)
    if _recorded(folder) is not None:
        return seed
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{SEED}.{os.getpid()}"
    try:
        scratch.write_text(f"{seed}\n")
        _publish(scratch, folder / SEED)
    finally:
        scratch.unlink(missing_ok=True)
    found = _recorded(folder)
    return seed if found is None else found


def _publish(written: Path, path: Path) -> None:
    """Give a finished file the name `path`, unless another program was first."""
    try:
        os.link(written, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: the first of two programs at once may lose here
        if not path.exists():
            written.replace(path)


def _recorded(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        seed = int(read_text(folder / SEED, 100))
        return seed if 0 <= seed < SEEDS else None
    return None


def _drawn(folder: Path) -> Iterator[int]:
    """The seeds of a folder's runs whose configuration has none."""
    for result in reader.read_results(folder, below=False)[0]:
        if result.experiment and result.experiment.seed is not None and result.config.get("seed") is None:
            yield result.experiment.seed
