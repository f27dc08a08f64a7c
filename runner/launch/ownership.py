"""A world's folder belongs to its program by a file lock, so that the folders of killed programs can be recognised and
removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
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
    when it ends, whatever its process id. Folders that another kernel locked, on a shared file system, stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _opened_lock(folder) as descriptor:  # locked, or removed meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(descriptor, 100) == BOOT_ID.read_bytes():
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened_lock(folder: Path) -> Iterator[int]:
    """The descriptor of a world's lock. Anyone may put anything into a shared temporary folder, so all but a regular
    file in a folder of this user, without symbolic links, raises OSError, and opening waits for nothing."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe waits for its other end
    with contextlib.ExitStack() as opened:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
        opened.callback(os.close, here)
        lock = os.open(OWNED, os.O_RDWR | flags, dir_fd=here)
        opened.callback(os.close, lock)
        if not stat.S_ISREG(os.fstat(lock).st_mode) or {os.fstat(x).st_uid for x in (here, lock)} != {os.geteuid()}:
            raise PermissionError(errno.EPERM, "not a world's folder of this user", str(folder))
        yield lock
