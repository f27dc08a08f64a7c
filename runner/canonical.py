"""`python -m runner.canonical`: the same questions on any machine, within ten minutes: which local kernel and which variant is the
fastest, a window, documents, a decode, a model's layer. They are those of conf/canonical.yaml.

Leaves `canonical.json`, to send, `report.html`, and every run's own folder. A question for which no time is left is recorded as not asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner import environment
from runner.config import folders
from runner.output import commands, terminal
from runner.output.results import write_text
from runner.report import runs
from runner.report.fair import tied
from runner.report.runs import Run

NAME = "canonical.json"
LEAST_S = 20.0  # of a question; a world starts in less
CLOSING_S = 40.0  # a program that is told to end ends its worlds in less; the page takes the rest
MACHINE = (
    "platform",
    "python",
    "cpu",
    "cores",
    "memory_bytes",
    "packages",
    "git",
)  # of the environment; no name of a host
CPU_RANKS = 2


def plan() -> dict[str, Any]:
    """The file of questions."""
    text = (resources.files("runner.conf") / "canonical.yaml").read_text()
    found: Any = OmegaConf.to_container(OmegaConf.create(text))
    return found


def command(question: Mapping[str, Any], common: Sequence[str], gpus: int, folder: Path) -> list[str]:
    """The overrides of a question's sweep."""
    device = "cuda" if gpus else "cpu"
    ranks = gpus or CPU_RANKS
    lengths = [f"{tokens * ranks}" for tokens in question.get("per_rank", {}).get(device, [])]
    return [
        "-m", f"hardware={device}", *common, *question["ask"], *question[device],
        *([f"seq_len={','.join(lengths)}"] if lengths else []), f"hydra.sweep.dir={folder}",
    ]  # fmt: skip


def ask(overrides: Sequence[str], seconds: float) -> str | None:
    """Runs a sweep for at most so long. Returns why it was ended, or None."""
    program = subprocess.Popen([sys.executable, "-m", "runner", *overrides])
    try:
        program.wait(seconds)
        return None
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s, as the time was up"
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)
            try:
                program.wait(CLOSING_S - 5)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def settings(run: Run) -> dict[str, Any]:
    keys = (
        "attention",
        "options",
        "kernel",
        "transport",
        "world_size",
        "batch",
        "seq_len",
        "heads",
        "head_dim",
        "mask",
        "dtype",
    )
    return {key: getattr(run, key) for key in keys} | {"model": run.result.asked.model}


def times(run: Run) -> dict[str, Any]:
    """ms by pass: the median with its spread."""
    kept = ("n", "median", "p10", "p90", "ci95")
    return {which: {key: getattr(found, key) for key in kept} for which, found in run.passes.items()} if run.ok else {}


def fastest(found: Sequence[Run], subject: str) -> list[dict[str, Any]]:
    """For each length and pass the fastest, with those that are even with it."""
    answers = []
    for length in dict.fromkeys(run.seq_len for run in found if run.ok):
        here = [run for run in found if run.ok and run.seq_len == length]
        for which in dict.fromkeys(which for run in here for which in run.passes):
            best, *others = tied([run for run in here if which in run.passes], which)
            even = [getattr(run, subject) for run in others]
            answers.append(
                {
                    "seq_len": length, "pass": which, "fastest": getattr(best, subject), "ms": best.passes[which].median,
                    "even": even,
                }
            )  # fmt: skip
    return answers


def answered(question: Mapping[str, Any], folder: Path, why: str | None) -> dict[str, Any]:
    """A question's answers, by the results in its folder."""
    about = {key: question[key] for key in ("name", "asks", "subject")}
    try:
        found = runs.read([folder])
    except ValueError as error:
        return {**about, "status": "not answered", "why": why or str(error), "answers": [], "runs": []}
    each = [
        {"settings": settings(run), "status": run.status, "reason": run.result.reason, "ms": times(run)}
        for run in found
    ]
    answers = fastest(found, question["subject"])
    status = "not answered" if not answers else "partly answered" if why else "answered"
    return {**about, "status": status, "why": why, "answers": answers, "runs": each}


def not_asked(question: Mapping[str, Any], why: str) -> dict[str, Any]:
    about = {key: question[key] for key in ("name", "asks", "subject")}
    return {**about, "status": "not asked", "why": why, "answers": [], "runs": []}


def machine(gpus: int) -> dict[str, Any]:
    """What the answers depend on."""
    found = {key: environment.host()[key] for key in MACHINE}
    return found | {"gpus": [state.get("name") for state in environment.gpu_state()] if gpus else []}


def asked(questions: Sequence[Mapping[str, Any]], common: Sequence[str], folder: Path, budget_s: float) -> list[Any]:
    """The answers to the questions, in their order, until the time is up."""
    gpus = environment.gpu_count()
    stop = time.monotonic() + budget_s - CLOSING_S
    found = []
    for question in questions:
        left = stop - time.monotonic()
        here = folder / question["name"]
        if question["ranks"] > (gpus or CPU_RANKS):
            found.append(not_asked(question, f"needs {question['ranks']} GPUs, this machine has {gpus}"))
        elif left < LEAST_S:
            found.append(not_asked(question, f"no time was left of {budget_s:g} s"))
        else:
            overrides = command(question, common, gpus, here)
            terminal.out.print(f"\n[bold]{question['asks']}[/]")
            why = ask(overrides, left)
            # the folder of the sweep is no part of the question
            found.append(answered(question, here, why) | {"command": ["python", "-m", "runner", *overrides[:-1]]})
    return found


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    from runner.report import command as report

    given = plan()
    names = [question["name"] for question in given["questions"]]
    parser = commands.parser("runner.canonical", __doc__)
    parser.add_argument("--out", type=Path, help="a new folder (default: outputs/canonical-<time>)")
    parser.add_argument("--budget-s", type=float, default=given["budget_s"], help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some of the questions")
    options = parser.parse_args(arguments)
    least = CLOSING_S + LEAST_S + 1
    if not options.budget_s >= least:
        raise ValueError(
            f"--budget-s {options.budget_s:g}: must be at least {least:g}; leave it out for {given['budget_s']:g}"
        )
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"--out {options.out}: is not empty; give a new folder")
    folder = options.out or folders.create(Path("outputs"), f"canonical-{folders.now()}")
    started = time.monotonic()
    questions = [question for question in given["questions"] if question["name"] in options.only]
    found = asked(questions, given["all"], folder, options.budget_s)
    gpus = environment.gpu_count()
    value = {
        "schema": given["schema"], "budget_s": options.budget_s, **environment.period(started), "machine": machine(gpus),
        "questions": found,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / NAME, json.dumps(value, indent=1) + "\n")
    show(found)
    if any(question["runs"] for question in found):
        report.main([str(folder)])
    terminal.out.print(f"To send: {folder / NAME}", soft_wrap=True)
    return 0 if any(question["answers"] for question in found) else 1


def show(found: Sequence[Mapping[str, Any]]) -> None:
    table = terminal.new_table("Answers")
    for title in ("question", "S", "pass", "fastest", "ms", "even with it, or why not"):
        table.add_column(title, justify="right" if title in ("S", "ms") else "left")
    for question in found:
        for each in question["answers"]:
            cells = (each["pass"], str(each["fastest"]), f"{each['ms']:.4g}", ", ".join(map(str, each["even"])))
            table.add_row(question["name"], f"{each['seq_len']:,}", *cells)
        if not question["answers"]:
            reasons = dict.fromkeys(run["reason"] for run in question["runs"] if run["reason"])
            table.add_row(question["name"], "", "", "", "", question["why"] or "; ".join(reasons))
    terminal.show(table, words=("even with it, or why not",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
