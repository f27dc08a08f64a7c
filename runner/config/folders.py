"""Output folders: a new one for each invocation, tested for writing before the first run. A sweep's is locked."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runner.config.values import Refused, shown

_stamps: dict[str, str] = {}  # by the folder that they stand in
_locks: list[int] = []  # descriptors that lock the sweep's folder


def now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def stamp(parent: str) -> str:
    """The resolver `${stamp:PARENT}`: the time as the name of a folder in `parent`, the same during the whole program.
    `claim` makes the folder."""
    return _stamps.setdefault(parent, now())


def begin() -> None:
    """Forget and unlock the folders of an earlier invocation in this process: the next one gets a folder of its own."""
    _stamps.clear()
    while _locks:
        os.close(_locks.pop())


def claim() -> None:
    """Make the folders that `stamp` was asked for. Raises OSError."""
    for parent, name in _stamps.items():
        _stamps[parent] = create(Path(parent), name).name


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


def lock(folder: Path) -> None:
    """Keep other sweeps out of this sweep's folder until `begin` or the end of this program, by the file that Hydra writes there.
    Raises Refused where another one has it, OSError where nothing can be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    _locks.append(os.open(folder / "multirun.yaml", os.O_RDWR | os.O_CREAT, 0o666))
    try:
        fcntl.flock(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reason = "another sweep is writing there; wait for its end, or give another folder"
        raise Refused(f"hydra.sweep.dir={shown(str(folder))}: {reason}") from None


def require_writable(folder: Path) -> None:
    """Raises SystemExit with one line when nothing can be written under `folder`."""
    folder = existing = folder.absolute()
    try:
        while not existing.exists() and not existing.is_symlink():
            existing = existing.parent
        if existing.is_symlink() and not existing.exists():
            raise FileNotFoundError(2, f"a link to {existing.readlink()}, which is not there", str(existing))
        if not existing.is_dir():
            raise NotADirectoryError(20, "not a folder", str(existing))
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise SystemExit(
            f"error: output={shown(str(folder))}: cannot write to {shown(str(existing))} ({error.strerror}); give another folder "
            "with output=DIR"
        ) from None


class WritableFolder(Callback):
    """Make the output folder before Hydra does, which gives a traceback where it cannot be made, and which lets two
    programs that start in the same second share one."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not config.dry_run:
            _prepare(config.hydra.run)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not config.dry_run:
            _prepare(config.hydra.sweep)
            with suppress(OmegaConfBaseException, OSError):
                lock(Path(config.hydra.sweep.dir))


def _prepare(mode: DictConfig) -> None:
    with suppress(OmegaConfBaseException, OSError):  # Hydra makes the folder next and reports these errors
        require_writable(Path(mode.dir))
        claim()
