"""`python -m runner`: compose, launch, check, time and record. Slow imports come after the handler of Ctrl-C is set."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.ab import Ab

CANONICAL = "+experiment=canonical"  # several sweeps, which are a command of their own
CLOSING_S = 30.0  # ending the worlds takes less


class Stops:
    """Ctrl-C and SIGTERM: the first one unwinds the program. More of them are ignored while worlds are ended, which
    takes seconds."""

    def __init__(self) -> None:
        self.ignored_until = 0.0
        self.exit_status: int | None = None  # the program's, once a signal came
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)

    def hold(self) -> None:
        self.ignored_until = time.monotonic() + CLOSING_S

    def __call__(self, signum: int, _: Any) -> None:
        if time.monotonic() < self.ignored_until:
            return
        self.hold()
        self.exit_status = 128 + signum
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        from runner.config.values import Terminated

        raise Terminated


def _interrupted_at_once(*_: Any) -> None:
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(130)  # an exception could be lost within an import


def refuse(reason: str, arguments: list[str]) -> int:
    """Record, but with dry_run=true, and print why the command line cannot work; nothing was started. Returns the exit
    status."""
    import hashlib

    from runner import environment
    from runner.config import folders
    from runner.config.values import shown
    from runner.output import results

    if "dry_run=true" in arguments:
        print(f"invalid: {reason}", file=sys.stderr)
        return 2
    output = str(folders.output(arguments))
    key = hashlib.sha256(" ".join(arguments).encode(errors="surrogateescape")).hexdigest()[:8]
    try:
        folder = folders.create(Path(output) / "invalid", f"{folders.now()}_{key}")
        value = results.result(
            status="invalid", reason=reason, key=key, name=folder.name, config={"overrides": arguments},
            environment=environment.host() | environment.period(time.monotonic()),
        )  # fmt: skip
        results.write_result(folder, value)
    except (OSError, ValueError) as error:  # ValueError: no path can be that
        cause = f"cannot write there ({getattr(error, 'strerror', None) or error})"
        print(f"error: output={shown(output)}: {cause}; give another with output=DIR", file=sys.stderr)
    print(f"invalid: {reason}", file=sys.stderr)
    return 2


def exit_status(statuses: list[str], until_limit: bool = False) -> int:
    """1 when a run failed, where out of memory is no failure with `until_limit`; else 0 when a run is ok or there was none,
    2 when all are invalid, and 1 when none could be done here."""
    failures = {"incorrect", "crash", "timeout"} | ({"oom"} if not until_limit else set())
    if "ok" in statuses or not statuses:
        return 1 if failures.intersection(statuses) else 0
    return 2 if set(statuses) == {"invalid"} else 1


class Output:
    """Standard output whose reader may leave, as in `| head -1`: the runs go on and later output is dropped. `error` is
    another reason for that, such as a full disk."""

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
        """Drop later output, and the stream's buffer."""
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
    except KeyboardInterrupt:  # a second one, after CLOSING_S
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else it could interrupt the interpreter's exit


def version() -> str:
    from importlib import metadata

    try:
        return f"attention-runner {metadata.version('attention-runner')}"
    except metadata.PackageNotFoundError:
        return "attention-runner, not installed"


COMMANDS = ("--help", "--hydra-help", "--version", "--cfg", "--info", "--run", "--multirun", "--shell-completion")
FLAGS = (*COMMANDS, "--resolve", "--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun")
SHORT = {"-h": "--help", "-c": "--cfg", "-i": "--info", "-r": "--run", "-m": "--multirun", "-sc": "--shell-completion",
         "-p": "--package", "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}  # fmt: skip


def _misread(flags: list[str]) -> str | None:
    """Why Hydra would refuse these flags, or None."""
    names = [SHORT.get(flag, flag).partition("=")[0] for flag in flags if flag.startswith("-")]
    for name, flag in zip(names, (flag for flag in flags if flag.startswith("-")), strict=True):
        if name not in FLAGS:
            key = flag.lstrip("-").partition("=")[0]
            return (
                f"{flag}: not a flag; a key is written {key}=VALUE, and python -m runner --hydra-help lists the flags"
            )
    if len({*names}.intersection(COMMANDS[3:])) > 1:
        return f"{' '.join(flags)}: several commands; give one of {', '.join(COMMANDS[3:])}"
    if "--resolve" in names and not {"--cfg", "--help"} & {*names}:
        return "--resolve: is for --cfg; write --cfg job --resolve"
    return None


def _main() -> int:
    """The program for itself, or as one of those that torchrun, srun or mpirun started."""
    from runner.config import place
    from runner.config.values import InvalidConfig

    try:
        found = place.from_environment()
    except InvalidConfig as error:
        print(f"invalid: {error}", file=sys.stderr)
        return 2
    return _program() if found is None else _joined(found)


def _joined(found: Any) -> int:
    """The program as one of several processes."""
    from runner.config import place
    from runner.launch import parents, processes

    try:
        if found.launcher == "torchrun":  # which puts this process into a session of its own
            processes.die_with_parent()
        if not found.is_head:
            return _follow(found)
        place.join(found)
        head = parents.Head(found)
    except parents.Unusable as error:
        print(f"invalid: {error}", file=sys.stderr)
        return 2
    status = 1
    try:
        status = _program(head)
        return status
    finally:
        head.end(status)


def _follow(found: Any) -> int:
    from runner.config.values import Terminated
    from runner.launch.parents import follow

    stops = Stops()
    try:
        return follow(found)
    except (KeyboardInterrupt, Terminated):
        return stops.exit_status or 1


def _program(head: Any = None) -> int:
    from runner import ab
    from runner.config import folders, overrides, resolve
    from runner.config.values import InvalidConfig, Refused, message

    flags, given = overrides.split(sys.argv[1:])
    if "--version" in flags:
        print(version())
        return 0
    completes = any(flag in ("-sc", "--shell-completion") for flag in flags)
    if CANONICAL in given and not completes:
        from runner import canonical

        return canonical.main([text for text in sys.argv[1:] if text not in (CANONICAL, "-m", "--multirun")])
    # the name in Hydra's help; a shell completes the installed command
    installed = completes or sys.argv[0].endswith("attention-runner")
    sys.argv[0] = "attention-runner" if installed else "python -m runner"
    resolve.register()
    try:
        arguments, compared = ab.expand(folders.resumed(given))
    except InvalidConfig as error:
        return refuse(message(error), given)
    goes_on = any(text.startswith("hydra.sweep.dir=") for text in arguments) and "resume=true" in arguments
    if (compared is not None or goes_on) and not {"-m", "--multirun"} & {*flags}:
        flags.append("-m")
    multirun = any(f in ("-m", "--multirun") for f in flags)
    try:
        reason = _misread(flags) or (None if completes else overrides.problem(arguments, multirun))
        if reason is not None:
            return refuse(message(ValueError(reason)), arguments)
        if "dry_run=true" in arguments:
            return _dry_run(arguments, multirun)
    except Refused as error:
        return refuse(message(error), arguments)
    # Hydra's parser wants all flags together
    sys.argv[1:] = flags + (arguments if completes else overrides.for_each_run(arguments))
    return _run(arguments, head, compared, making=not flags or multirun)


def _dry_run(arguments: list[str], multirun: bool) -> int:
    from runner import plan
    from runner.config import overrides
    from runner.config.values import message

    try:
        plan.dry_run(arguments, multirun or overrides.is_sweep(arguments))
    except Exception as error:
        return refuse(message(error), arguments)
    return 0


def _run(arguments: list[str], head: Any, compared: Ab | None, making: bool) -> int:
    """Run Hydra's program; an error or a signal is one line. head: to the other processes of a launched world. compared:
    the runs that `ab=` compares. making: whether runs are done, not only shown. Returns the exit status."""
    import warnings

    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    traced = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors instead of printing them
    from runner import app, launched
    from runner.config import folders
    from runner.config.values import CannotWrite, Refused, Terminated, message, shown
    from runner.output import display, results

    app.begin()
    app.tally.compared = (compared.key,) if compared else ()
    app.pool.head = head
    stops = Stops()
    # Hydra only warns of a searchpath that does not exist
    warnings.filterwarnings("error", "provider=hydra.searchpath", UserWarning)
    try:
        if making:
            folders.require_writable(folders.output(arguments))
        folders.begin(making)
        elsewhere = launched.chosen(arguments) in launched.PLUGINS
        task = launched.execute if elsewhere else app.execute
        hydra.main(version_base="1.3", config_path="pkg://runner.conf", config_name="config")(task)()
        if app.tally.error is not None:
            raise app.tally.error
    except (KeyboardInterrupt, Terminated, Exception) as error:
        if stops.exit_status is not None:  # even where unwinding raised another error
            how = "interrupted" if stops.exit_status == 128 + signal.SIGINT else "terminated"
            display.err.print(f"{how}; what was finished is recorded")
            for folder in app.tally.folders:
                again = folders.again(folder, arguments, compared)
                display.err.print(f"{sys.argv[0]} {again} goes on", soft_wrap=True, markup=False)
            return stops.exit_status
        if isinstance(error, CannotWrite):
            print(f"error: {error}", file=sys.stderr)
            return 1
        if isinstance(error, UserWarning):
            return refuse(f"{message(error)} Give a folder that exists, or pkg://PACKAGE", arguments)
        if traced:
            raise
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            where = error.filename or next(iter(app.tally.folders), folders.output(arguments))
            print(f"error: {results.cannot_write(shown(str(where)), error)}", file=sys.stderr)
            return 1
        if isinstance(error, (HydraException, OmegaConfBaseException, Refused)) or not app.tally.broken:
            return refuse(message(error), arguments)
        raise
    finally:
        stops.hold()
        app.pool.close()
        for folder in app.tally.folders:
            _sum_up(folder, compared, stops.exit_status is None)
    return exit_status(app.tally.statuses, app.tally.until_limit)


def _sum_up(folder: Path, compared: Ab | None, whole: bool) -> None:
    """Print the table of a sweep and, of a `whole` one, where its page is and what was compared."""
    from runner.output import display, summary
    from runner.report import page

    display.sweep_table(summary.sweep_rows(folder))
    display.out.print(f"Sweep: {folder}", soft_wrap=True)
    for line in [page.at_end_of_sweep(folder), *(compared.verdicts(folder) if compared else [])] if whole else []:
        display.out.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
