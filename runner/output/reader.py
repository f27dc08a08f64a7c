"""Read recorded runs: `result.json` in a folder for each run, or a packed sweep (`runner/pack.py`). A file that is no
result is returned as a `UnreadableFile`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from runner.config.values import Refusal
from runner.reading import read_parquet, read_text
from runner.record.parsing import NewerSchema, decoded
from runner.record.result import Result

RESULT, PACKED = "result.json", "results.parquet"


@dataclass(frozen=True)
class UnreadableFile:
    """A file that could not be read as a result."""

    path: Path
    why: str
    newer: bool = False  # a result of a later version of this program

    def __str__(self) -> str:
        return f"{self.path}: left out: {self.why}"


def read_result(folder: Path) -> Result | UnreadableFile | None:
    """The result in a run's folder or, where it has none, in the packed sweep that the folder would lie in."""
    path = folder / RESULT
    if path.exists() or path.is_symlink():
        return _read(path, folder)
    packed = _packed(folder.parent / PACKED)
    if isinstance(packed, UnreadableFile):
        return packed
    text = packed.get(folder.name)
    return None if text is None else _read(folder.parent / PACKED, folder, text)


def read_results(folder: Path, below: bool = True) -> tuple[list[Result], list[UnreadableFile]]:
    """All results of a folder, which is that of a run, a sweep or a packed sweep, or (`below`) holds any of these. A
    run's own folder replaces a packed run of the same name."""
    read: list[Result | UnreadableFile] = []
    for path in sorted(folder.rglob(PACKED)) if below else [folder / PACKED]:
        packed = _packed(path)
        if isinstance(packed, UnreadableFile):
            read.append(packed)
        else:
            read += [_read(path, path.parent / name, text) for name, text in packed.items()]
    paths = folder.rglob(RESULT) if below else [*folder.glob(RESULT), *folder.glob(f"*/{RESULT}")]
    read += [_read(path, path.parent) for path in sorted(paths)]
    found = {one.folder.resolve(): one for one in read if isinstance(one, Result)}
    return [found[key] for key in sorted(found)], [one for one in read if isinstance(one, UnreadableFile)]


def stored(run: Result) -> dict[str, Any]:
    """The JSON of a run's file, which may have more than `run.plain` if an earlier version wrote it. Raises Refusal and
    OSError."""
    path = run.folder / RESULT
    if path.exists():
        return json.loads(read_text(path))  # type: ignore[no-any-return]
    packed = _packed(run.folder.parent / PACKED)
    if isinstance(packed, UnreadableFile):
        raise Refusal(str(packed))
    return json.loads(packed[run.name])  # type: ignore[no-any-return]


_reported: set[str] = set()


def report_problems(problems: Iterable[UnreadableFile]) -> None:
    """Print a line each on stderr, each only once in a process."""
    for text in map(str, problems):
        if text not in _reported:
            _reported.add(text)
            print(text, file=sys.stderr)


def _read(path: Path, folder: Path, text: str | None = None) -> Result | UnreadableFile:
    """The result in `text`, that of a run in the packed sweep `path`, or else in the file `path`."""
    try:
        return Result.of(decoded(read_text(path) if text is None else text), folder)
    except (OSError, ValueError, RecursionError) as error:
        why, newer = " ".join(str(error).split()), isinstance(error, NewerSchema)
        return UnreadableFile(path, why if text is None else f"run {folder.name}: {why}", newer)


def _packed(path: Path) -> dict[str, str] | UnreadableFile:
    """The JSON of each run in a packed sweep, by the run's name; empty where there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _packed_at(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _packed_at(path: Path, modified: int, size: int) -> dict[str, str] | UnreadableFile:
    import pyarrow as pa

    try:
        table = read_parquet(path, ["name", "result"]).cast(pa.schema({"name": pa.string(), "result": pa.string()}))
        return dict(zip(table["name"].to_pylist(), table["result"].to_pylist(), strict=True))
    except (OSError, ValueError, pa.ArrowException, KeyError) as error:
        return UnreadableFile(path, f"is no packed sweep ({' '.join(str(error).split())[:100]})")
