"""Compose, launch, check, time and record an attention experiment.

  python -m runner                                           a small real run on this machine
  python -m runner attention=ring config=large               any group's choice, any key
  python -m runner -m attention=ring,zigzag seq_len=8192,16384 world_size=2,4
  python -m runner +experiment=NAME
  python -m runner ab=kernel:sdpa_flash,math                 two values of one key, in turns, and a verdict

Groups (group=choice)
  attention, model, kernel, transport, mask, timing, config, dtype, hardware, tracker, and +experiment
Keys (key=value)
  batch heads kv_heads head_dim seq_len causal window   the workload; config=NAME sets them all
  mask=NAME mask.PARAMETER=value   python -m runner.catalog mask lists them; causal and window hold beside it
  model=NAME model.OPTION=value   a whole model around the attention: python -m runner.catalog model
  seqlens (a list, real, or random with seqlens_mean and seqlens_std) of a packed batch, q_len of a decode
  world_size (auto or a number), seed, mode (forward or forward_backward; of a model training or inference), baseline (single, dense or none)
  timing.*, check.*, launch.*, phases, output, resume, dry_run, order, deterministic, agreement, replay
  launch.share_gpu=true: all ranks on the first GPU, checked and not timed, where there are fewer GPUs than ranks

Every key with its default and meaning: python -m runner.catalog key
Every choice, and what works here: python -m runner.catalog"""

# Slow imports come after main() is there to answer Ctrl-C.

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

CANONICAL = "+experiment=canonical"  # several sweeps, which are a command of their own
stopped: list[int] = []  # the signal that ends the program


def _stop(number: int, _: Any) -> None:
    """The first Ctrl-C, SIGTERM or SIGHUP (the terminal was closed) unwinds the program. Later ones are ignored: ending the worlds takes
    seconds."""
    if not stopped:
        stopped.append(number)
        raise KeyboardInterrupt


def main() -> int:
    """The program; its exit status."""
    try:
        os.getcwd()
        from runner.output import commands

        return commands.exit_status(_main)
    except FileNotFoundError:
        print("error: the working folder was removed; change to one that is there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{'' if stopped else '; nothing was started'}", file=sys.stderr)
        return 128 + (stopped or [signal.SIGINT])[0]


def parser() -> argparse.ArgumentParser:
    from runner import environment
    from runner.output import commands

    parser = commands.parser("runner", __doc__)
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

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as Ctrl-C is in the background of a script
            signal.signal(number, _stop)
    if CANONICAL in sys.argv:
        return canonical.main([text for text in sys.argv[1:] if text not in (CANONICAL, "-m")])
    options = parser().parse_intermixed_args()
    return command.one_of_several(lambda: _program(options))


def _program(options: argparse.Namespace) -> int:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from runner import app, command, plan
    from runner.config import folders, overrides
    from runner.config.values import Refusal, redacted

    if options.shell_completion:
        sys.argv[0] = "attention-runner"  # the installed command
        with initialize_config_module("runner.conf", version_base="1.3"):
            try:
                GlobalHydra.instance().hydra.shell_completion("config", options.overrides)  # type: ignore[union-attr]
            except ValueError as error:
                raise Refusal(f"-sc: {error}; give install=bash, install=fish or install=zsh") from None
        return 0
    arguments = command.expand(folders.resumed(options.overrides))
    multirun = options.multirun or command.is_sweep(arguments)
    if options.cfg:
        print(redacted(OmegaConf.to_yaml(overrides.composed(overrides.jobs(arguments, multirun)[0]))))
        return 0
    if "dry_run=true" in arguments:
        plan.dry_run(arguments, multirun)
        return 0
    try:
        command.perform(arguments, multirun)
    except BaseException:  # even where unwinding raised another error
        if not stopped:
            raise
        print(f"{signal.Signals(stopped[0]).name}: stopped; what was finished is recorded", file=sys.stderr)
        return 128 + stopped[0]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it could also interrupt the interpreter's exit
        app.pool.close()
        for folder in app.tally.folders:
            command.sum_up(folder, not stopped)
    return app.tally.exit_status()


if __name__ == "__main__":
    sys.exit(main())
