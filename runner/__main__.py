"""`python -m runner`: compose, launch, check, time and record. All that takes long to import is imported where Ctrl-C
already has its answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

CLOSING_S = 30.0  # what was started is ended well within


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

    from runner import environment, folders, results

    output = _output(arguments)
    key = hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:8]
    try:
        folder = folders.create(Path(output) / "invalid", f"{folders.now()}_{key}")
        value = results.result(
            status="invalid", reason=reason, key=key, name=folder.name, config={"overrides": arguments},
            environment=environment.host() | environment.period(time.time()),
        )  # fmt: skip
        results.write_result(folder, value)
    except OSError as error:
        print(
            f"error: output={output}: cannot write there ({error.strerror}); give another with output=DIR",
            file=sys.stderr,
        )
    print(f"invalid: {reason}", file=sys.stderr)
    return 2


def _output(arguments: list[str]) -> str:
    return next((a.partition("=")[2] for a in arguments if a.startswith("output=")), "outputs")


def message(error: BaseException) -> str:
    """In one line; that of its cause where it has none of its own, as Hydra's while it composes."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def exit_status(statuses: list[str]) -> int:
    """0 when a run is ok, or there was none: a sweep goes on after failures. 2 when all are invalid, else 1."""
    if "ok" in statuses or not statuses:
        return 0
    return 2 if set(statuses) == {"invalid"} else 1


def main() -> int:
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupted_at_once)
    try:
        return _main()
    except KeyboardInterrupt:  # another one, after an end that took too long
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter's own end would die of it


def _main() -> int:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner import overrides, schema

    schema.register()
    # Hydra's parser wants -m before or behind all overrides; here it may stand anywhere
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda a: a not in ("-m", "--multirun"))
    arguments = overrides.of(sys.argv[1:])
    reason = overrides.problem(arguments, multirun=sys.argv[1:2] in (["-m"], ["--multirun"]))
    if reason is not None:
        return refuse(reason, arguments)
    traced = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and not as Hydra prints them
    from runner import app, display, results

    stops = Stops()
    try:
        hydra.main(version_base="1.3", config_path="pkg://runner.conf", config_name="config")(app.execute)()
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        if stops.exit_status is not None:  # also where unwinding raised something else, as OmegaConf's flags may
            how = "interrupted" if stops.exit_status == 128 + signal.SIGINT else "terminated"
            display.err.print(f"{how}; what was finished is recorded")
            return stops.exit_status
        if traced or isinstance(error, SystemExit):
            raise
        if isinstance(error, (HydraException, OmegaConfBaseException)):
            return refuse(message(error), arguments)
        if isinstance(error, OSError):
            where = error.filename or next(iter(app.sweeps), _output(arguments))
            print(f"error: {app.no_room(where, error)}", file=sys.stderr)
            return 1
        raise
    finally:
        stops.hold()
        app.pool.close()
        for folder in app.sweeps:
            display.sweep_table(results.sweep_rows(folder))
            display.out.print(f"Sweep: {folder}", soft_wrap=True)
    return exit_status(app.statuses)


if __name__ == "__main__":
    sys.exit(main())
