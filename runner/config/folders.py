"""Output folders: a new one for each command, tested for writing before the first run. A sweep's is locked."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import yaml

from runner.config import overrides
from runner.config.values import InvalidConfig, redacted, shown
from runner.reading import read_text

PLAN = "multirun.yaml"  # the file of a sweep's folder with its overrides, in the form in which Hydra writes them
SWEEP = "hydra.sweep.dir="
SEED = "seed"  # the file of a sweep's folder with the seed of its inputs, which all its runs share
SEEDS = 1 << 31


def now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def create(parent: Path, name: str) -> Path:
    """A new folder of that name; with -2, -3 and so on where another program had it first. Raises OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of this sweep's folder, by its file PLAN. Raises InvalidConfig where another one has it, OSError
    where nothing can be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / PLAN, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another sweep is writing there; wait for its end, or give another folder"
            raise InvalidConfig(f"{SWEEP}{shown(str(folder))}: {reason}") from None
        yield
    finally:
        os.close(lock)


@lru_cache
def fresh_seed() -> int:
    """One for all runs of this process, so that every variant gets the same inputs."""
    return secrets.randbelow(SEEDS)


def seed(folder: Path | None) -> int:
    """The seed that is recorded in a sweep's folder, else a fresh one."""
    with suppress(OSError, ValueError, TypeError):
        recorded = int(read_text(folder / SEED, 100))  # type: ignore[operator]
        if 0 <= recorded < SEEDS:
            return recorded
    return fresh_seed()


def record(folder: Path, arguments: Sequence[str]) -> None:
    """Write the seed, so that all runs of a sweep have the same inputs, also if it is resumed or done by several programs, and the
    sweep's overrides, without secrets. A resumed sweep keeps its own: what is given beside them is for this time."""
    (folder / SEED).write_text(f"{seed(folder)}\n")
    with suppress(Exception):  # the file may hold anything
        earlier = _recorded(folder)
        if earlier and "resume=true" in arguments and redacted(_own(arguments))[: len(earlier)] == earlier:
            return
    (folder / PLAN).write_text(yaml.safe_dump({"hydra": {"overrides": {"hydra": [], "task": redacted([*arguments])}}}))


def _recorded(folder: Path) -> list[str]:
    """The overrides of the sweep in this folder."""
    found = yaml.safe_load(read_text(folder / PLAN))["hydra"]["overrides"]
    return _own([*found["hydra"], *found["task"]])


def _own(arguments: Sequence[str]) -> list[str]:
    """The overrides that say what a sweep does, not where and whether anew."""
    return [text for text in arguments if not text.startswith(("resume=", SWEEP, "hydra.mode="))]


def sweep_folder(arguments: Sequence[str]) -> Path | None:
    """The folder that the overrides give to a sweep."""
    given = [overrides.parse(text).value() for text in arguments if text.startswith(SWEEP)]
    return Path(str(given[-1])) if given else None


def resumed(arguments: Sequence[str]) -> list[str]:
    """The overrides, with those of the sweep that `resume=FOLDER` names and goes on in. Raises InvalidConfig."""
    given = [text.removeprefix("resume=") for text in arguments if text.startswith("resume=")]
    if not given or given[-1] == "false":
        return list(arguments)
    if given[-1] == "true":
        if sweep_folder(arguments) is None:
            raise InvalidConfig(
                "resume=true: goes on with a sweep whose folder must be given; write resume=FOLDER, or "
                f"resume=true {SWEEP}FOLDER and the sweep's own overrides"
            )
        return list(arguments)
    try:
        both = [*_recorded(Path(given[-1])), *_own(arguments)]
    except Exception:  # the file may hold anything
        reason = f"no {PLAN} of a sweep there; give the folder of a sweep, or resume=true with the sweep's overrides"
        raise InvalidConfig(f"resume={shown(given[-1])}: {reason}") from None
    return [*both, "resume=true", f"{SWEEP}{quoted(given[-1])}"]


def quoted(folder: str | Path) -> str:
    """A folder as a value of Hydra's overrides."""
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
