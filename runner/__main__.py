"""Compose, launch, check, time and record an attention experiment.

  python -m runner                                           a small real run on this machine
  python -m runner attention=ring config=large               any group's choice, any key
  python -m runner -m attention=ring,zigzag seq_len=8192,16384 world_size=2,4
  python -m runner +experiment=NAME
  python -m runner ab=kernel:sdpa_flash,math                 two values of one key, in turns, and a verdict

Keys (key=value)
  batch heads kv_heads head_dim seq_len causal window   the workload; config=NAME sets them all
  mask=NAME mask.PARAMETER=value   python -m runner.catalog mask lists them; causal and window hold beside it
  model=NAME model.OPTION=value   a whole model around the attention: python -m runner.catalog model
  seqlens (a list, real, or random with seqlens_mean and seqlens_std) of a packed batch, q_len of a decode
  world_size (auto or a number), seed, mode (forward or forward_backward; of a model training or inference), baseline (single, dense or none)
  timing.*, check.*, launch.*, phases, output, resume, dry_run, order, deterministic, agreement, replay
  launch.share_gpu=true: all ranks on the first GPU, checked and not timed, where there are fewer GPUs than ranks

Every key with its default and meaning: python -m runner.catalog key
Every choice, and what works here: python -m runner.catalog

Groups (group=choice)"""

# Slow imports come after the handler of Ctrl-C is set.

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

CANONICAL = "+experiment=canonical"  # several sweeps, which are a command of their own
stopped: list[int] = []  # the signal that ends the program


def _at_once(number: int, _: Any) -> None:
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(128 + number)  # an exception could be lost within an import


def _stop(number: int, _: Any) -> None:
    """The first Ctrl-C or SIGTERM unwinds the program. Later ones are ignored: ending the worlds takes seconds."""
    if not stopped:
        stopped.append(number)
        raise KeyboardInterrupt


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as Ctrl-C is in the background of a script
            signal.signal(number, handler)


def main() -> int:
    """The program; its exit status."""
    _on_signals(_at_once)
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working folder was removed; change to one that is there", file=sys.stderr)
        return 1
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner.output import commands

    return commands.exit_status(_main, refusals=(ValueError, HydraException, OmegaConfBaseException))


def parser() -> argparse.ArgumentParser:
    from runner import environment
    from runner.config.overrides import LEFT_OUT
    from runner.config.schema import groups
    from runner.output import commands

    listed = "\n".join(f"  {name}: {', '.join(choices)}" for name, choices in groups().items() if name not in LEFT_OUT)
    parser = commands.parser("runner", f"{__doc__}\n{listed}")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE")
    add("-m", "--multirun", action="store_true", help="a sweep: every combination of comma-separated values")
    add("-c", "--cfg", choices=["job"], help="print the configuration of the first run; nothing is started")
    add("-sc", "--shell-completion", action="store_true", help="tab completion: -sc install=bash, zsh or fish")
    version = environment.version("attention-runner") or "is not installed"
    add("--version", action="version", version=f"attention-runner {version}")
    return parser


def _main() -> int:
    """The program for itself, or as one of those that torchrun, srun or mpirun started."""
    from runner import canonical, command
    from runner.config import place
    from runner.launch import processes

    if CANONICAL in sys.argv:
        return canonical.main([text for text in sys.argv[1:] if text not in (CANONICAL, "-m")])
    options = parser().parse_intermixed_args()
    found = place.from_environment()
    if found is not None and found.launcher == "torchrun":  # which puts this process into a session of its own
        processes.die_with_parent()
    _on_signals(_stop)
    try:
        return command.one_of_several(found, lambda: _program(options))
    except KeyboardInterrupt:
        return 128 + stopped[0]


def _program(options: argparse.Namespace) -> int:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from runner import app, command, plan
    from runner.config import folders, overrides
    from runner.output import display

    if options.shell_completion:
        sys.argv[0] = "attention-runner"  # the installed command
        with initialize_config_module("runner.conf", version_base="1.3"):
            hydra: Any = GlobalHydra.instance().hydra
            hydra.shell_completion("config", options.overrides)
        return 0
    arguments = command.expand(folders.resumed(options.overrides))
    multirun = options.multirun or overrides.is_sweep(arguments)
    if options.cfg:
        print(OmegaConf.to_yaml(overrides.composed(overrides.jobs(arguments, multirun)[0])), end="")
        return 0
    if "dry_run=true" in arguments:
        plan.dry_run(arguments, multirun)
        return 0
    try:
        command.perform(arguments, multirun)
    except BaseException:  # even where unwinding raised another error
        if not stopped:
            raise
        how = "interrupted" if stopped[0] == signal.SIGINT else "terminated"
        display.err.print(f"{how}; what was finished is recorded")
        for folder in app.tally.folders:
            again = shlex.join([f"resume={folder}"])
            display.err.print(f"python -m runner {again} goes on", soft_wrap=True, markup=False)
        return 128 + stopped[0]
    finally:
        _on_signals(signal.SIG_IGN)
        app.pool.close()
        for folder in app.tally.folders:
            _sum_up(folder)
    return app.tally.exit_status()


def _sum_up(folder: Path) -> None:
    """Print the table of a sweep and, of one that was not stopped, where its page is and what was compared."""
    from runner.command import verdicts
    from runner.output import display, summary
    from runner.report import page

    display.sweep_table(summary.sweep_rows(folder))
    display.out.print(f"Sweep: {folder}", soft_wrap=True)
    for line in [page.at_end_of_sweep(folder), *verdicts(folder)] if not stopped else []:
        display.out.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
