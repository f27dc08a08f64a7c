"""The output folder is tried before anything else happens in it, and every invocation gets one of its own."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runner.config.values import shown

_stamps: dict[str, str] = {}  # by the folder that they stand in


def now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def stamp(parent: str) -> str:
    """`${stamp:PARENT}`: the time as a folder's name in `parent`, the same through the whole program, and its own once
    `claim` has made it."""
    return _stamps.setdefault(parent, now())


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
    """Hydra would answer a folder that cannot be made with a traceback, and two programs of one second would share one."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with suppress(OmegaConfBaseException):  # what cannot be resolved is said where the folder is made
            _prepare(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with suppress(OmegaConfBaseException):
            _prepare(Path(config.hydra.sweep.dir))


def _prepare(folder: Path) -> None:
    require_writable(folder)
    with suppress(OSError):  # Hydra makes it next and says so
        claim()
