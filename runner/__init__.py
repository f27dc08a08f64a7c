"""The program: composes, launches, checks, times and records attention experiments."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)  # where this package lies, and `attention` beside it

# `attention` is a common name for a file. The one beside this package is meant, also where the working folder, which
# `python -m` searches first, has another.
sys.path.insert(0, ROOT)
try:
    import attention  # noqa: F401
finally:
    sys.path.remove(ROOT)
