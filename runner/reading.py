"""Files that others may have made: only regular ones up to a size are read. A FIFO would hang, a device fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BYTES = 64 << 20  # of a text
MOST_TABLE_BYTES, MOST_ROWS = 1 << 30, 10_000_000  # of a table


def read_regular(path: Path, most: int = MOST_BYTES, follow: bool = True, end: bool = False) -> bytes:
    """The file's content; with `end` its last `most` bytes. follow: whether the path may be a link. Raises OSError, also for
    what is no regular file or is larger than `most`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if end:
            file.seek(max(0, about.st_size - most))
        elif about.st_size > most:
            raise OSError(errno.EFBIG, f"{about.st_size:,} bytes, of which at most {most:,} are read", str(path))
        return file.read(most)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Raises OSError, and ValueError for what is not UTF-8."""
    return read_regular(path, most).decode()


def read_yaml(path: Path) -> Any:
    """Of a file of this package."""
    import yaml

    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Raises OSError, and ValueError for what is no parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = read_regular(path, MOST_TABLE_BYTES)
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        if file.metadata.num_rows <= MOST_ROWS:
            return file.read(columns)
    except pa.ArrowException as error:
        raise ValueError(" ".join(str(error).split())) from None
    rows = f"{file.metadata.num_rows:,} rows, of which at most {MOST_ROWS:,} are read"
    raise OSError(errno.EFBIG, rows, str(path))
