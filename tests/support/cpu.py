"""CPU seconds of this process, of the children that it has waited for and of those that live, theirs included."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_tree, _children("self")))


def _children(pid: str) -> list[str]:
    try:
        return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    except OSError:
        return []  # it has ended meanwhile


def _tree(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(_tree, _children(pid)))
