"""`python -m runner`: compose, launch, check, time and record. All that takes long to import is imported where Ctrl-C
already has its answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Any

CLOSING_S = 30.0  # what was started is ended well within
LONGEST_MESSAGE = 1000  # characters, of another package's


class Stops:
    """Ctrl-C and SIGTERM: the first one unwinds the program; while what was started is being ended, which takes seconds,
    more of them change nothing."""

    def __init__(self) -> None:
        self.deaf_until = 0.0
        self.exit_status: int | None = None  # what the program ends with once one came
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)

    def hold(self) -> None:
        self.deaf_until = time.monotonic() + CLOSING_S

    def __call__(self, signum: int, _: Any) -> None:
        if time.monotonic() < self.deaf_until:
            return
        self.hold()
        self.exit_status = 128 + signum
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.exit_status)


def _interrupted_at_once(*_: Any) -> None:
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(130)  # an exception could be lost within an import


def refuse(reason: str, arguments: list[str]) -> int:
    """Record and say that the command line cannot work; nothing was started."""
    import hashlib
    from pathlib import Path

    from runner import environment
    from runner.config import folders
    from runner.config.values import shown
    from runner.output import results

    output = _output(arguments)
    key = hashlib.sha256(" ".join(arguments).encode(errors="surrogateescape")).hexdigest()[:8]
    try:
        folder = folders.create(Path(output) / "invalid", f"{folders.now()}_{key}")
        value = results.result(
            status="invalid", reason=reason, key=key, name=folder.name, config={"overrides": arguments},
            environment=environment.host() | environment.period(time.time()),
        )  # fmt: skip
        results.write_result(folder, value)
    except (OSError, ValueError) as error:  # ValueError: no path can be that
        why = getattr(error, "strerror", None) or error
        print(
            f"error: output={shown(output)}: cannot write there ({why}); give another with output=DIR", file=sys.stderr
        )
    print(f"invalid: {reason}", file=sys.stderr)
    return 2


def _output(arguments: list[str]) -> str:
    """The folder that the overrides name; where none of them can be one, the default."""
    given = [a.partition("=")[2] for a in arguments if a.startswith("output=")]
    return next((text for text in given if text and "${" not in text), "outputs")


def message(error: BaseException) -> str:
    """In one line; that of its cause where it has none of its own, as Hydra's while it composes."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_MESSAGE])


def exit_status(statuses: list[str]) -> int:
    """0 when a run is ok, or there was none: a sweep goes on after failures. 2 when all are invalid, else 1."""
    if "ok" in statuses or not statuses:
        return 0
    return 2 if set(statuses) == {"invalid"} else 1


class Output:
    """Standard output that may end before the program does, as `| head -1` has it: what comes after is dropped, and the runs
    go on. `error` is why, where it is not the reader's own choice: a full disk, say."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Any) -> None:
        try:
            call()
        except BrokenPipeError:
            self._drop()
        except OSError as error:
            self.error = error
            print(f"error: standard output: {error.strerror}; the results are in their folders", file=sys.stderr)
            self._drop()

    def _drop(self) -> None:
        """What is still to be written, the stream's buffer included, goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
        self.stream.flush()


def main() -> int:
    """The program; its exit status."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupted_at_once)
    sys.stdout = output = Output(sys.stdout)  # type: ignore[assignment]
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working folder was removed; change to one that is there", file=sys.stderr)
        return 1
    try:
        status = _main()
        output.flush()
        return status or (1 if output.error else 0)
    except KeyboardInterrupt:  # another one, after an end that took too long
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter's own end would die of it


def version() -> str:
    from importlib import metadata

    try:
        return f"attention-runner {metadata.version('attention-runner')}"
    except metadata.PackageNotFoundError:
        return "attention-runner, not installed"


def _misread(flags: list[str]) -> str | None:
    """Why Hydra would not take these flags, or None."""
    import argparse

    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def error(message: str) -> None:
        raise argparse.ArgumentError(None, message)

    parser.error = error  # type: ignore[method-assign, assignment]
    try:
        given = parser.parse_args([f for f in flags if f not in ("-h", "--help", "--version")])
    except argparse.ArgumentError as wrong:
        return f"{wrong}; python -m runner --hydra-help lists the flags"
    commands = (given.run, given.multirun, given.cfg, given.info, given.shell_completion)
    if sum(map(bool, commands)) > 1:
        return (
            f"{' '.join(flags)}: several commands; give one of --run, --multirun, --cfg, --info and --shell-completion"
        )
    if given.resolve and not given.cfg and not given.help:
        return "--resolve: is for --cfg; write --cfg job --resolve"
    return None


def _main() -> int:
    from runner.config import overrides, resolve

    flags, arguments = overrides.split(sys.argv[1:])
    if "--version" in flags:
        print(version())
        return 0
    completes = any(flag in ("-sc", "--shell-completion") for flag in flags)
    # as usage has it; what a shell completes is the installed command
    installed = completes or sys.argv[0].endswith("attention-runner")
    sys.argv[0] = "attention-runner" if installed else "python -m runner"
    resolve.register()
    # Hydra's parser wants all flags together; here they may stand anywhere
    sys.argv[1:] = flags + arguments
    multirun = any(f in ("-m", "--multirun") for f in flags)
    reason = _misread(flags) or (None if completes else overrides.problem(arguments, multirun))
    if reason is not None:
        return refuse(message(ValueError(reason)), arguments)
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    """Hydra's program, its errors and signals turned into one line each."""
    import warnings

    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    traced = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and not as Hydra prints them
    from runner import app, interleave
    from runner.config.values import Refused, shown
    from runner.output import display, summary

    interleave.register()
    stops = Stops()
    # Hydra only warns of a folder that it does not find
    warnings.filterwarnings("error", "provider=hydra.searchpath", UserWarning)
    try:
        hydra.main(version_base="1.3", config_path="pkg://runner.conf", config_name="config")(app.execute)()
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        if stops.exit_status is not None:  # also where unwinding raised something else, as OmegaConf's flags may
            how = "interrupted" if stops.exit_status == 128 + signal.SIGINT else "terminated"
            display.err.print(f"{how}; what was finished is recorded")
            return stops.exit_status
        if isinstance(error, Refused):
            return refuse(message(error), arguments)
        if isinstance(error, UserWarning):
            return refuse(f"{message(error)} Give a folder that exists, or pkg://PACKAGE", arguments)
        if traced or isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            where = error.filename or next(iter(app.sweeps), _output(arguments))
            print(f"error: {app.cannot_write(shown(str(where)), error)}", file=sys.stderr)
            return 1
        if isinstance(error, (HydraException, OmegaConfBaseException)) or not _from((app.execute, app.further), error):
            return refuse(message(error), arguments)
        raise
    finally:
        stops.hold()
        app.pool.close()
        for folder in app.sweeps:
            display.sweep_table(summary.sweep_rows(folder))
            display.out.print(f"Sweep: {folder}", soft_wrap=True)
    return exit_status(app.statuses)


def _from(functions: Collection[Any], error: BaseException) -> bool:
    """Whether an error came out of one of our functions; else it is Hydra's, with what it was given as `hydra.*`."""
    codes = {function.__code__ for function in functions}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in codes:
            return True
        at = at.tb_next
    return False


if __name__ == "__main__":
    sys.exit(main())
