"""The seed of a sweep's inputs, which all its runs share: a file in the sweep's folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from runner.output import reader
from runner.reading import read_text

SEEDS = 1 << 31
NAME = "seed"  # of the file


@lru_cache
def fresh() -> int:
    """One for all runs of an invocation, so that every variant gets the same inputs."""
    return secrets.randbelow(SEEDS)


def known(folder: Path) -> int:
    """The seed of a sweep's folder: the recorded one, else that of its earlier runs, else a fresh one."""
    recorded = _recorded(folder)
    return next(_drawn(folder), fresh()) if recorded is None else recorded


def of_folder(folder: Path) -> int:
    """As `known`, and recorded in the folder. So a sweep that is resumed, or done by several programs, has the same
    inputs for all runs."""
    seed = known(folder)
    if _recorded(folder) is not None:
        return seed
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{NAME}.{os.getpid()}"
    try:
        scratch.write_text(f"{seed}\n")
        _publish(scratch, folder / NAME)
    finally:
        scratch.unlink(missing_ok=True)
    first = _recorded(folder)
    return seed if first is None else first


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
        seed = int(read_text(folder / NAME, 100))
        return seed if 0 <= seed < SEEDS else None
    return None


def _drawn(folder: Path) -> Iterator[int]:
    """The seeds of a folder's runs whose configuration has none."""
    for result in reader.read_results(folder, below=False)[0]:
        if result.experiment and result.experiment.seed is not None and result.config.get("seed") is None:
            yield result.experiment.seed
