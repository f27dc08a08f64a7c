"""`python -m runner +experiment=canonical`: the same questions on any machine, within ten minutes: which local kernel and which variant
is the fastest, a window, documents, a decode, a model's layer. They are those of conf/canonical.yaml.

Leaves `canonical.json`, to send, `report.html`, and every run's own folder. A question for which no time is left is recorded as not asked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner import environment
from runner.config import folders
from runner.config.values import Refusal
from runner.output import commands, terminal
from runner.output.results import finite, write_text
from runner.report import runs
from runner.report.fair import tied
from runner.report.runs import Run

COMMAND = ["python", "-m", "runner", "+experiment=canonical"]
NAME = "canonical.json"
SCHEMA = 2
LEAST_S = 20.0  # of a question; a world starts in less
CLOSING_S = 40.0  # a program that is told to end ends its worlds in less; the page takes the rest
# of the environment; no name of a host
MACHINE = ("platform", "python", "cpu", "cores", "memory_bytes", "packages", "git")
CPU_RANKS = 2


def plan() -> dict[str, Any]:
    """The file of questions."""
    text = (resources.files("runner.conf") / "canonical.yaml").read_text()
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    return values


def command(question: Mapping[str, Any], common: Sequence[str], gpus: int, folder: Path) -> list[str]:
    """The overrides of a question's sweep."""
    device = "cuda" if gpus else "cpu"
    lengths = [f"{tokens * (gpus or CPU_RANKS)}" for tokens in question.get("per_rank", {}).get(device, [])]
    return [
        "-m", f"hardware={device}", *common, *question["ask"], *question[device],
        *([f"seq_len={','.join(lengths)}"] if lengths else []), f"hydra.sweep.dir={folder}",
    ]  # fmt: skip


def ask(overrides: Sequence[str], seconds: float) -> str | None:
    """Runs a sweep for at most so long. Returns why it was ended, or None."""
    with subprocess.Popen([sys.executable, "-m", "runner", *overrides]) as program:
        try:
            program.wait(seconds)
            return None
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s, as the time was up"
        finally:
            program.terminate()
            with suppress(subprocess.TimeoutExpired):
                program.wait(CLOSING_S - 5)
            program.kill()


def fastest(results: Sequence[Run], subject: str) -> list[dict[str, Any]]:
    """For each length and pass the fastest run's subject, and those of runs that are even with it."""
    answers = []
    timed = [(run.seq_len, which, run) for run in results if run.ok for which in run.passes]
    for length, which in dict.fromkeys((length, which) for length, which, _ in timed):
        alike = [run for *key, run in timed if key == [length, which]]
        best, *others = tied(alike, which)
        even = [getattr(run, subject) for run in others]
        name, ms = getattr(best, subject), best.passes[which].median
        answers.append({"seq_len": length, "pass": which, "fastest": name, "ms": ms, "even": even})
    return answers


def answer(question: Mapping[str, Any], plan: Mapping[str, Any], folder: Path, stop: float) -> dict[str, Any]:
    """What a question's sweep found, or why it was not asked. stop: by `time.monotonic`, when it must have ended."""
    gpus, left = environment.gpu_count(), stop - time.monotonic()
    record = {key: question[key] for key in ("name", "asks", "subject")} | {"answers": [], "runs": []}
    if question["ranks"] > (gpus or CPU_RANKS):
        why: str | None = f"needs {question['ranks']} GPUs, this machine has {gpus}"
        return record | {"status": "not asked", "why": why}
    if left < LEAST_S / 2:  # the one before it may end late
        return record | {"status": "not asked", "why": "no time was left"}
    overrides = command(question, plan["all"], gpus, folder)
    record["command"] = [*COMMAND[:3], *overrides[:-1]]  # the folder of the sweep is no part of the question
    terminal.out.print(f"\n[bold]{question['asks']}[/]")
    why = ask(overrides, left)
    try:
        results = runs.read([folder])
    except Refusal as error:
        return record | {"status": "not answered", "why": why or str(error)}
    answers = fastest(results, question["subject"])
    status = "not answered" if not answers else "partly answered" if why else "answered"
    return record | {"status": status, "why": why, "answers": answers, "runs": [run.row for run in results]}


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    from runner.report import command as report

    given = plan()
    names = [question["name"] for question in given["questions"]]
    parser = commands.parser("runner +experiment=canonical", __doc__)
    parser.add_argument("--out", type=Path, help="a new folder (default: outputs/canonical-<time>)")
    parser.add_argument("--budget-s", type=float, default=given["budget_s"], help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some of the questions")
    options = parser.parse_args(arguments)
    least = CLOSING_S + LEAST_S * len(options.only) + 1
    if not options.budget_s >= least:
        raise Refusal(
            f"--budget-s {options.budget_s:g}: too little for {', '.join(options.only)}: at least {least:g} s; give more, or fewer "
            "questions with --only"
        )
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise Refusal(f"--out {options.out}: is not empty; give a new folder")
    folder = options.out or folders.create(Path("outputs"), f"canonical-{folders.now()}")
    started = time.monotonic()
    stop = started + options.budget_s - CLOSING_S
    questions = [question for question in given["questions"] if question["name"] in options.only]
    answers = []
    for number, question in enumerate(questions, 1):
        later = LEAST_S * (len(questions) - number)  # stays for the questions after it
        answers.append(answer(question, given, folder / question["name"], stop - later))
    gpus = [state.get("name") for state in environment.gpu_state()] if environment.gpu_count() else []
    machine = {key: environment.host()[key] for key in MACHINE} | {"gpus": gpus}
    period = environment.period(started)
    value = {"schema": SCHEMA, "budget_s": options.budget_s, **period, "machine": machine, "questions": answers}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / NAME, json.dumps(finite(value), indent=1) + "\n")
    show(answers)
    if any(record["runs"] for record in answers):
        report.main([str(folder)])
    terminal.out.print(f"To send: {folder / NAME}", soft_wrap=True)
    return 0 if any(record["answers"] for record in answers) else 1


def show(answers: Sequence[Mapping[str, Any]]) -> None:
    *titles, words = "question", "S", "pass", "fastest", "ms", "even with it, or why not"
    rows = []
    for record in answers:
        for best in record["answers"]:
            even = ", ".join(map(str, best["even"]))
            cells = f"{best['seq_len']:,}", best["pass"], str(best["fastest"]), f"{best['ms']:.4g}", even
            rows.append([record["name"], *cells])
        if not record["answers"]:
            reasons = dict.fromkeys(run["reason"] for run in record["runs"] if run["reason"])
            rows.append([record["name"], *[""] * 4, record["why"] or "; ".join(reasons)])
    terminal.print_rows("Answers", [*titles, words], rows, ("question", "pass", "fastest", words), (words,))


if __name__ == "__main__":
    sys.exit("error: python -m runner.canonical is gone; use python -m runner +experiment=canonical")
