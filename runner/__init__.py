"""The program: composes, launches, checks, times and records attention experiments."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.api import InvalidConfig, close, load, multirun, run

__all__ = ["InvalidConfig", "close", "load", "multirun", "run"]

ROOT = str(Path(__file__).resolve().parent.parent)  # where this package lies, and `attention` beside it

# `attention` is a common name for a file. The one beside this package is meant, also where the working folder, which
# `python -m` searches first, has another.
sys.path.insert(0, ROOT)
try:
    import attention  # noqa: F401
finally:
    sys.path.remove(ROOT)


def __getattr__(name: str) -> Any:
    """The functions of `runner.api`, which is slow to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runner import api

    return getattr(api, name)
