"""The tables that describe runs one by one: what was measured, what failed, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from runner.config.values import Refusal
from runner.measure.statistics import OVERHEAD
from runner.output.columns import COLUMNS, Column
from runner.output.table import Table
from runner.output.terminal import flop
from runner.record.fields import digits
from runner.report.labels import labels, varying_options
from runner.report.runs import FACTS, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import NOISY, counted, differing, fact

TIMED = ("forward_ms", "backward_ms", "optimizer_ms", "total_ms")
NUMBERS = ("world_size", "batch", "seq_len", "q_len", "heads", "head_dim", "dtype", "gpu")
LEFT = {title for key, title in FACTS.items() if key not in NUMBERS}
RATIO = "training / inference"  # of their times
OF_MODELS = ("tokens_per_s", "parameters", "first_loss", "loss")
MODELS = (
    "peak memory a rank",
    "parameters",
    "tokens/s",
    "first loss",
    "last loss",
    RATIO,
)  # columns of `--table models`

Columns = dict[str, list[str]]  # cells by title


def rate_title(runs: Sequence[Run]) -> str:
    return "TFLOP/s a GPU" if any(run.gpu for run in runs) else "TFLOP/s a rank"


def runs_table(runs: Sequence[Run]) -> Table:
    """A row for each run: the facts in which the runs differ, and what was measured. Columns without a text are left
    out."""
    marks = "".join(gain.mark for gain in scaling(runs).values())
    return Table.of(_facts(runs) | _measured(runs), LEFT | {"status"}, _notes(runs, marks))


def models_table(runs: Sequence[Run]) -> Table:
    """What a model takes and learns: a row for each of its runs."""
    runs = [run for run in runs if run.result.model or run.model]
    if not runs:
        raise Refusal("--table models: none of these runs is of a model; use --table runs")
    measured = {title: cells for title, cells in _measured(runs).items() if title in MODELS}
    return Table.of(_facts(runs) | measured, LEFT | {"status"}, failures(runs))


def _facts(runs: Sequence[Run]) -> Columns:
    """The facts in which the runs differ, the status of those that are not ok, and the rounds of unfinished ones."""
    varying = varying_options(runs)
    columns = {FACTS[key]: [fact(run, key, varying) for run in runs] for key in differing(runs)}
    columns["status"] = ["" if run.ok else run.status for run in runs]
    return columns | {"rounds": [run.result.timing.rounds.text or "" if run.result.timing else "" for run in runs]}


def _measured(runs: Sequence[Run]) -> Columns:
    """The measured columns of the page's table, those of models, and what is known beside other runs."""
    against, trained = scaling(runs), _training_ratios(runs)
    models, masked = any(run.result.model for run in runs), any(run.sparsity for run in runs)

    def text(column: Column, run: Run) -> str:
        gain, times = against.get(run), run.passes.get(column.key.removesuffix("_ms"))
        if gain and column.key in ("speedup", "efficiency"):
            return f"{column.format.format(getattr(gain, column.key))}{gain.mark}"
        # one sample is the mean of many calls and has no spread
        return (
            f"{digits(times.median, times.noisy)} ({times.spread})" if times and times.n > 1 else column.text(run.row)
        )

    columns = {}
    for column in COLUMNS:
        if column.page and (column.page.shown or (models and column.key in OF_MODELS)):
            title = rate_title(runs) if column.key == "tflops_per_device" else column.page.title
            columns[title + " (IQR)" * (column.key in TIMED)] = [text(column, run) if run.ok else "" for run in runs]
    if masked:
        columns["sparsity"] = ["" if run.sparsity is None else f"{run.sparsity:.1%}" for run in runs]
        columns["FLOPs"] = [flop(run.row["flops"]) if run.ok else "" for run in runs]
    return columns | {RATIO: [f"{trained[run]:.2f}" if run in trained else "" for run in runs]}


def _training_ratios(runs: Sequence[Run]) -> dict[Run, float]:
    """The time of a model's training step over that of its inference, where both are among the runs."""
    named = labels(runs)
    work = {run: (named[run], *(getattr(run, key) for key in WORKLOAD if key != "mode")) for run in runs}
    inference = {work[run]: ms for run in runs if run.mode == "inference" and (ms := run.ms("total"))}
    trainings = [run for run in runs if run.mode == "training" and work[run] in inference]
    return {run: ms / inference[work[run]] for run in trainings if (ms := run.ms("total"))}


def _notes(runs: Sequence[Run], marks: str) -> list[str]:
    timings = [run.result.timing for run in runs if run.result.timing]
    passes = [times for timing in timings for times in timing.passes.values()]
    overheads = [timing.overhead_share for timing in timings if timing.overhead_share > OVERHEAD]
    unfinished = sum(bool(timing.rounds.text) for timing in timings)
    trend = any(times.trend for times in passes)
    notes = {
        NOISY: any(times.noisy for times in passes) or "!" in marks,
        "`~`: the samples rose or fell while they were taken, by more than 2% between their halves.": trend,
        f"Timing itself takes above 1% of the shortest pass in {counted(len(overheads), 'run')}, "
        f"{max(overheads, default=0):.1%} at most.": overheads,
        f"{counted(unfinished, 'run')} without all rounds (`rounds`), so of fewer samples: the sweep was interrupted.": unfinished,
        "`*`: the single device's time is extrapolated by FLOPs from a shorter sequence that fits.": "*" in marks,
        "`†`: against the fastest of these runs on one device, of the same workload or of as many tokens a rank.": "†"
        in marks,
    }
    return [note for note, applies in notes.items() if applies] + failures(runs)


class Failure(NamedTuple):
    """A reason for which runs are not ok, and their names."""

    status: str
    reason: str
    names: list[str]


def failure_groups(runs: Sequence[Run]) -> list[Failure]:
    """The runs that are not ok, by status and reason."""
    named = labels(runs)
    groups: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if not run.ok:
            reason = " ".join((run.result.reason or "without a reason").split())
            groups.setdefault((run.status, reason), []).append(named[run] if run.attention else run.result.name)
    return [Failure(*group, names) for group, names in groups.items()]


def failures(runs: Sequence[Run]) -> list[str]:
    """A list with a line for each reason why runs are not ok; empty where all are."""
    lines = [
        f"- {status}, {', '.join(dict.fromkeys(names))} ({counted(len(names), 'run')}): {reason}"
        for status, reason, names in failure_groups(runs)
    ]
    return ["\n".join(lines)] if lines else []


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs were measured: a row for each fact, with all the values that it has."""
    places = [environment_facts(run) for run in runs]
    texts = {title: "; ".join(dict.fromkeys(str(of[title]) for of in places if of[title])) for title in places[0]}
    return Table(["", "of these runs"], [[title, text] for title, text in texts.items() if text], {"", "of these runs"})


def environment_facts(run: Run) -> dict[str, Any]:
    """Where a run was measured, by title; None for what is not known."""
    about = run.environment
    cudnn = about.cudnn
    return {
        "GPU": run.gpu,
        "GPUs of the machine": len(about.gpus_before),
        "driver": next((gpu.get("driver_version") for gpu in about.gpus_before), None),
        "torch": about.torch,
        "CUDA": about.cuda,
        "NCCL": about.nccl,
        "cuDNN": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "packages": _pairs(about.packages, " "),
        "Python": about.python,
        "CPU": f"{about.cpu}, {about.cores} cores" if about.cpu else None,
        # several machines may have one name; the hash is of one machine only
        "machine": " ".join(filter(None, [about.host, about.machine_id])),
        "GPU UUIDs": ", ".join({gpu.device: None for gpu in about.during.by_device if gpu.device != "cpu"}),
        "platform": about.platform,
        "variables": _pairs(about.variables, "="),
        "commit": about.commit.removeprefix("commit "),
        "command": f"python {' '.join(about.argv)}" if about.argv else None,
    }


def _pairs(values: dict[str, Any], sign: str) -> str:
    return ", ".join(f"{key}{sign}{value}" for key, value in values.items() if value)


def machine(runs: Sequence[Run]) -> str:
    """The machine and its libraries, in a line."""
    facts = dict(environment_table(runs).rows)
    gpus = facts.get("GPUs of the machine")
    device = f"{gpus} {facts['GPU']}" if gpus and "GPU" in facts else facts.get("CPU")
    libraries = [f"{name} {facts[name]}" for name in ("torch", "NCCL", "cuDNN") if name in facts]
    return ", ".join(filter(None, [device, *libraries]))
