"""`python -m runner`: compose, launch, check, time and record. Slow imports come after the handler of Ctrl-C is set."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

CANONICAL = "+experiment=canonical"  # several sweeps, which are a command of their own
CLOSING_S = 30.0  # ending the worlds takes less
# Hydra's flags, those with a value, and those for which nothing runs
VALUED = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--info", "-i",
    "--experimental-rerun",
)  # fmt: skip
MULTIRUN = ("-m", "--multirun")
COMPLETION = ("-sc", "--shell-completion")
SHOWING = ("-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", *COMPLETION)
FLAGS = (*VALUED, *MULTIRUN, *SHOWING, "-r", "--run", "--resolve", "--version")


class Stops:
    """Ctrl-C and SIGTERM: the first one unwinds the program. More of them are ignored while worlds are ended, which
    takes seconds."""

    def __init__(self) -> None:
        self.ignored_until = 0.0
        self.signal: int | None = None  # that came
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)

    def hold(self) -> None:
        self.ignored_until = time.monotonic() + CLOSING_S

    def __call__(self, signum: int, _: Any) -> None:
        if time.monotonic() < self.ignored_until:
            return
        self.hold()
        self.signal = signum
        raise KeyboardInterrupt


def exit_status(statuses: list[str], until_limit: bool = False) -> int:
    """1 when a run failed, where out of memory is no failure with `until_limit`; else 0 when a run is ok or there was none,
    2 when all are invalid, and 1 when none could be done here."""
    failures = {"incorrect", "crash", "timeout"} | ({"oom"} if not until_limit else set())
    if "ok" in statuses or not statuses:
        return 1 if failures.intersection(statuses) else 0
    return 2 if set(statuses) == {"invalid"} else 1


def _interrupted_at_once(*_: Any) -> None:
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(130)  # an exception could be lost within an import


def main() -> int:
    """The program; its exit status."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupted_at_once)
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working folder was removed; change to one that is there", file=sys.stderr)
        return 1
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.values import InvalidConfig
    from runner.output import commands

    try:
        return commands.exit_status(_main, refusals=(InvalidConfig, HydraException, OmegaConfBaseException))
    except KeyboardInterrupt:  # a second one, after CLOSING_S
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else it could interrupt the interpreter's exit


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags of a command line with their values, and its overrides. They may alternate. Raises InvalidConfig."""
    from runner.config.values import InvalidConfig, shown

    flags: list[str] = []
    texts: list[str] = []
    valued = False
    for argument in arguments:
        if not valued and argument.startswith("-") and argument.partition("=")[0] not in FLAGS:
            key = argument.lstrip("-").partition("=")[0]
            raise InvalidConfig(
                f"{shown(argument)}: not a flag; a key is written {shown(key)}=VALUE, and python -m runner --hydra-help lists "
                "the flags"
            )
        is_flag = valued or argument.startswith("-")
        valued = not valued and argument in VALUED
        (flags if is_flag else texts).append(argument)
    return flags, texts


def _main() -> int:
    """The program for itself, or as one of those that torchrun, srun or mpirun started."""
    from runner import environment
    from runner.config import place

    if CANONICAL in sys.argv and not {*COMPLETION} & {*sys.argv}:
        from runner import canonical

        return canonical.main([text for text in sys.argv[1:] if text not in (CANONICAL, *MULTIRUN)])
    flags, texts = split(sys.argv[1:])
    if "--version" in flags:
        print(f"attention-runner {environment.version('attention-runner') or 'is not installed'}")
        return 0
    found = place.from_environment()
    if found is not None and found.launcher == "torchrun":  # which puts this process into a session of its own
        from runner.launch import processes

        processes.die_with_parent()
    from runner import command

    stops = Stops()
    try:
        return command.one_of_several(found, lambda: _program(flags, texts, stops))
    except KeyboardInterrupt:
        return 128 + (stops.signal or signal.SIGINT)


def _program(flags: list[str], texts: list[str], stops: Stops) -> int:
    from runner import app, command, plan
    from runner.config import folders, overrides
    from runner.output import display

    # the name in Hydra's help; a shell completes the installed command
    installed = {*COMPLETION} & {*flags} or sys.argv[0].endswith("attention-runner")
    sys.argv[0] = "attention-runner" if installed else "python -m runner"
    arguments = command.expand(folders.resumed(texts))
    multirun = overrides.is_sweep(arguments) or bool({*MULTIRUN} & {*flags})
    if multirun and not {*MULTIRUN, *SHOWING} & {*flags}:
        flags.append("-m")
    if {*SHOWING} & {*flags}:
        if not installed:
            overrides.check(arguments, multirun)
        _hydra(command.execute, flags, arguments)
        return 0
    if "dry_run=true" in arguments:
        overrides.check(arguments, multirun)
        plan.dry_run(arguments, multirun)
        return 0
    try:
        with command.command(arguments, multirun) as (task, each):
            _hydra(task, flags, each)
    except BaseException:  # even where unwinding raised another error
        if stops.signal is None:
            raise
        how = "interrupted" if stops.signal == signal.SIGINT else "terminated"
        display.err.print(f"{how}; what was finished is recorded")
        for folder in app.tally.folders:
            again = shlex.join([f"resume={folder}"])
            display.err.print(f"{sys.argv[0]} {again} goes on", soft_wrap=True, markup=False)
        return 128 + stops.signal
    finally:
        stops.hold()
        app.pool.close()
        for folder in app.tally.folders:
            _sum_up(folder, stops.signal is None)
    return exit_status(app.tally.statuses, app.tally.until_limit)


def _sum_up(folder: Path, whole: bool) -> None:
    """Print the table of a sweep and, of a `whole` one, where its page is and what was compared."""
    from runner.command import verdicts
    from runner.output import display, summary
    from runner.report import page

    display.sweep_table(summary.sweep_rows(folder))
    display.out.print(f"Sweep: {folder}", soft_wrap=True)
    for line in [page.at_end_of_sweep(folder), *verdicts(folder)] if whole else []:
        display.out.print(line, soft_wrap=True, markup=False)


def _hydra(task: Any, flags: list[str], arguments: list[str]) -> None:
    """Run Hydra's program, whose parser wants all flags together."""
    import hydra

    from runner import app
    from runner.config.values import InvalidConfig, message

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors instead of printing them
    sys.argv[1:] = flags + arguments
    try:
        hydra.main(version_base="1.3", config_path="pkg://runner.conf", config_name="config")(task)()
    except ValueError as error:  # flags that do not go together
        if error is app.tally.error:
            raise
        raise InvalidConfig(message(error)) from None


if __name__ == "__main__":
    sys.exit(main())
