"""What the runs of a sweep share: their number, and the seed of their inputs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from runner.config import overrides
from runner.config.values import InvalidConfig, Refused
from runner.output import reader

SEEDS = 1 << 31
SEED = "seed"  # the file of a sweep's folder that has it

_runs: int | None = None  # of this program's sweep, once it is known
_started = time.monotonic()


class Count(Callback):
    """Counts a sweep's runs before the first, and refuses too many: those of an experiment's file, too."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _runs
        texts = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        try:
            # as they were given: read one by one, an override with an interpolation in it would be resolved
            given = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            _runs = overrides.count([*texts, *given])  # type: ignore[misc, list-item]
        except InvalidConfig as error:
            raise Refused(str(error)) from None


def place(number: int) -> str:
    """Where a sweep is at its run of that number (from 0), and how long it has been going: `3 of 11, 24 s`."""
    of = f" of {_runs}" if _runs is not None else ""
    return f"{number + 1}{of}, {time.monotonic() - _started:.0f} s"


@lru_cache
def fresh_seed() -> int:
    """One for all runs of an invocation, so that every variant gets the same inputs."""
    return secrets.randbelow(SEEDS)


def seed_of(folder: Path) -> int:
    """The one seed of a sweep's folder: as it has recorded it, else as its earlier runs drew theirs, else a fresh one. So a
    sweep that goes on later, or in several programs, has the same inputs for all."""
    known = _recorded(folder)
    if known is not None:
        return known
    seed = next(_drawn(folder), fresh_seed())
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
        seed = int((folder / SEED).read_text())
        return seed if 0 <= seed < SEEDS else None
    return None


def _drawn(folder: Path) -> Iterator[int]:
    """The seeds of a folder's runs for which none was given."""
    found, _ = reader.read_results(folder, below=False)
    for result in found:
        if result.experiment and result.experiment.seed is not None and result.config.get("seed") is None:
            yield result.experiment.seed
