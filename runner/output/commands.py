"""What report, compare and pack share: their argument parser, and errors as one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m module`, whose --help begins with `about`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def exit_status(command: Callable[[], int], os_error: int = 1) -> int:
    """The command's exit status: 2 where it raises ValueError and `os_error` for OSError, with the error as a line on
    stderr."""
    try:
        return command()
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: could not be read or written ({error.strerror})", file=sys.stderr)
        return os_error
