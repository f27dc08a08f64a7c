"""What all commands share: their argument parser, standard output whatever becomes of it, and errors as one line and an exit
status."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from omegaconf.errors import OmegaConfBaseException

from attention.errors import UnsupportedCall
from runner.config.schema import RunConf
from runner.config.values import CannotWrite, Refusal, message, shown


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, with what there is."""
        usage, flag = " ".join(self.format_usage().split()), re.search(r"unrecognized arguments: --([\w.]+)", message)
        is_key = flag is not None and flag[1].partition(".")[0] in RunConf.__dataclass_fields__
        way_out = f"write {flag[1]}=VALUE" if flag and is_key and "KEY=VALUE" in usage else usage
        self.exit(2, f"error: {shown(message)}; {way_out}\n")


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m module`, whose --help begins with `about`."""
    return Parser(prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_where(parser: argparse.ArgumentParser) -> None:
    """The conditions of `runner.report.runs.where`; given several times, all count."""
    about = "only runs of these values (a,b: a or b)"
    parser.add_argument("--where", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=about)


class Output:
    """Standard output whose reader may leave, as in `| head -1`: the command goes on and later output is dropped. `error` is
    another reason for that, such as a full disk."""

    def __init__(self, stream: Any):
        self.stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 (it was closed: `>&-`)
        self.error: OSError | None = None
        if hasattr(self.stream, "reconfigure"):
            self.stream.reconfigure(errors="replace")  # what the locale's encoding lacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = error
                print(f"error: standard output: {error.strerror}; the results are in their folders", file=sys.stderr)
            nowhere = os.open(os.devnull, os.O_WRONLY)  # later output and the stream's buffer
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()


def exit_status(command: Callable[[], int], os_error: int = 1) -> int:
    """The command's exit status: 2 where it refuses a value and `os_error` for OSError, with the error as a line on stderr;
    1 where its output could not be written. A defect keeps its traceback."""
    sys.stdout = output = Output(sys.stdout)  # type: ignore[assignment]
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        status = command()
        output.flush()
        return status or (1 if output.error else 0)
    except (Refusal, UnsupportedCall, OmegaConfBaseException, UnicodeDecodeError) as error:
        kind = "error" if type(error) in (Refusal, UnicodeDecodeError) else "invalid"
        print(f"{kind}: {message(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        about = f"{error.filename}: could not be read or written ({error.strerror})"
        print(f"error: {error if isinstance(error, CannotWrite) else about}", file=sys.stderr)
        return os_error
