"""A world's folder belongs to its program by a file lock, so that the folders of killed programs can be recognised and
removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX, OWNED = "attention-world-", "owned"  # names of a world's folder and of the locked file in it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_folder() -> tuple[Path, int]:
    """A new folder of a world, and the descriptor that holds its lock as long as this program lives."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    owned = os.open(folder / "locking", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # on a file system without locks the folder of a killed program stays
        fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(owned, BOOT_ID.read_bytes())
        (folder / "locking").rename(folder / OWNED)  # under this name the file is always locked
    return folder, owned


def remove_abandoned() -> None:
    """Remove the folders of worlds whose program was killed before it could do so. The kernel drops a program's locks
    when it ends, whatever its process id. Folders that another kernel locked, on a shared file system, stay. Anyone may put
    anything into a shared temporary folder: a lock is a regular file in a folder of this user, and opening it waits for nothing,
    as that of a pipe would."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:  # locked, or removed meanwhile
            kinds = [path.lstat() for path in (folder, folder / OWNED)]
            formats = [stat.S_IFMT(kind.st_mode) for kind in kinds]
            if {kind.st_uid for kind in kinds} != {os.geteuid()} or formats != [stat.S_IFDIR, stat.S_IFREG]:
                continue
            lock = os.open(folder / OWNED, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, 100) == BOOT_ID.read_bytes():
                shutil.rmtree(folder, ignore_errors=True)
