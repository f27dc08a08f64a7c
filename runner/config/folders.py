"""Output folders: a new one for each invocation, tested for writing before the first run. A sweep's is locked."""

from __future__ import annotations

import fcntl
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from runner.config.values import CannotWrite, InvalidConfig, Refused, shown

if TYPE_CHECKING:
    from runner.ab import Ab

PLAN = "multirun.yaml"  # what Hydra writes into a sweep's folder
_stamps: dict[str, str] = {}  # by the folder that they stand in
_making = False
_locks: list[int] = []  # descriptors that lock the sweep's folder


def now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def stamp(parent: str) -> str:
    """The resolver `${stamp:PARENT}`: a new folder in `parent` that is named by the time, the same during the whole command; only
    its name before `begin(making=True)`."""
    if parent not in _stamps:
        _stamps[parent] = create(Path(parent), now()).name if _making else now()
    return _stamps[parent]


def begin(making: bool = False) -> None:
    """Forget and unlock the folders of an earlier command in this process: the next one gets a folder of its own. making: whether it
    does runs, and its folders are made."""
    global _making
    _making = making
    _stamps.clear()
    while _locks:
        os.close(_locks.pop())


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
    _locks.append(os.open(folder / PLAN, os.O_RDWR | os.O_CREAT, 0o666))
    try:
        fcntl.flock(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reason = "another sweep is writing there; wait for its end, or give another folder"
        raise Refused(f"hydra.sweep.dir={shown(str(folder))}: {reason}") from None


def resumed(arguments: Sequence[str]) -> list[str]:
    """The overrides, with those of the sweep that `resume=FOLDER` names and goes on in. Raises InvalidConfig."""
    texts = [text for text in arguments if text.startswith("resume=") and text not in ("resume=true", "resume=false")]
    if not texts:
        return list(arguments)
    folder = texts[-1].removeprefix("resume=")
    path = Path(folder) / PLAN
    if not path.is_file() or not path.stat().st_size:
        reason = f"no {PLAN} there; give the folder of a sweep, or resume=true with the sweep's overrides"
        raise InvalidConfig(f"resume={shown(folder)}: {reason}")
    given = OmegaConf.select(OmegaConf.load(path), "hydra.overrides")
    earlier = [*given.hydra, *given.task]
    both = [
        text for text in (*earlier, *arguments) if not text.startswith(("resume=", "hydra.sweep.dir=", "hydra.mode="))
    ]
    return [*both, "resume=true", f"hydra.sweep.dir={quoted(folder)}"]


def quoted(folder: str | Path) -> str:
    """A folder as a value of Hydra's overrides."""
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def again(folder: Path, arguments: Sequence[str], compared: Ab | None) -> str:
    """What follows the command's name to go on with a sweep. compared: with `ab=`, which a sweep's folder does not know."""
    if compared is None:
        return shlex.join([f"resume={folder}"])
    others = [
        text for text in arguments if not text.startswith((f"{compared.key}=", "order=", "resume=", "hydra.sweep.dir="))
    ]
    return shlex.join([compared.text, *others, "resume=true", f"hydra.sweep.dir={quoted(folder)}"])


def output(arguments: Sequence[str]) -> Path:
    """The output folder that the overrides name, else the default."""
    given = [text.partition("=")[2] for text in arguments if text.startswith("output=")]
    return Path(next((text for text in given if text and "${" not in text), "outputs"))


def require_writable(folder: Path) -> None:
    """Raises CannotWrite when nothing can be written under `folder`."""
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
        raise CannotWrite(
            f"output={shown(str(folder))}: cannot write to {shown(str(existing))} ({error.strerror}); give another folder "
            "with output=DIR"
        ) from None
