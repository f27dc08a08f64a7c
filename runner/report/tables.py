"""The tables that describe runs one by one: what was measured, what failed, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.measure.statistics import OVERHEAD
from runner.output.terminal import flop, gib
from runner.report.labels import labels, varying_options
from runner.report.runs import FACTS, PASSES, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import NOISY, Table, counted, differing, digits, fact

TIMED = (*PASSES[:2], "optimizer", PASSES[2])
LATE = 0.05  # the time back to back is shown where it differs from the total by more than this share
WORDS = (
    "model",
    "attention",
    "options",
    "features",
    "mask",
    "pack",
    "mode",
    "kernel",
    "transport",
    "graphs",
    "replay",
    "timing",
)
LEFT = {FACTS[key] for key in WORDS}


def rate_title(runs: Sequence[Run]) -> str:
    return "TFLOP/s a GPU" if any(run.gpu for run in runs) else "TFLOP/s a rank"


def runs_table(runs: Sequence[Run]) -> Table:
    """A row for each run: the facts in which the runs differ, and what was measured. Columns without a text are left
    out."""
    varying, against, trained = varying_options(runs), scaling(runs), _training_ratios(runs)
    columns: dict[str, Callable[[Run], str]] = {
        FACTS[key]: lambda run, key=key: fact(run, key, varying)  # type: ignore[misc]
        for key in differing(runs)
    }
    columns |= {
        "status": lambda run: "" if run.ok else run.status,
        "rounds": lambda run: run.result.timing.rounds.text or "" if run.result.timing else "",
        **{f"{which} ms (IQR)": lambda run, which=which: _median(run, which) for which in TIMED},  # type: ignore[misc]
    }
    timed = [(run.ms("total"), run.back_to_back) for run in runs]
    if any(total and back_to_back and abs(back_to_back - total) > LATE * total for total, back_to_back in timed):
        columns["back to back ms"] = lambda run: digits(run.back_to_back)
    if any(run.sparsity for run in runs):
        columns |= {"sparsity": _sparsity, "FLOPs": lambda run: flop(run.flops) if run.ok else ""}
    columns |= {
        rate_title(runs): _rate,
        "dense ms": lambda run: digits(next(reversed(run.dense_ms.values()), None)),
        "speedup": lambda run: f"{against[run].speedup:.2f}{against[run].mark}" if run in against else "",
        "efficiency": lambda run: f"{against[run].efficiency:.0%}{against[run].mark}" if run in against else "",
        "exposed comm. forward ms": lambda run: _exposed(run, "forward"),
        "exposed comm. backward ms": lambda run: _exposed(run, "backward"),
        "peak memory a rank": lambda run: gib(run.result.peak_bytes or 0) if run.ok else "",
        **MODEL,
        RATIO: lambda run: f"{trained[run]:.2f}" if run in trained else "",
        "forward ms against do_bench's": lambda run: _do_bench(run, "forward"),
        "backward ms against do_bench's": lambda run: _do_bench(run, "backward"),
    }
    filled = {title: cells for title, text in columns.items() if any(cells := [text(run) for run in runs])}
    rows = [list(row) for row in zip(*filled.values(), strict=True)]
    return Table(list(filled), rows, LEFT | {"status"}, _notes(runs, {found.mark for found in against.values()}))


def models_table(runs: Sequence[Run]) -> Table:
    """What a model takes and learns: a row for each of its runs."""
    of_models = [run for run in runs if run.result.model or run.model]
    if not of_models:
        raise ValueError("--table models: none of these runs is of a model; use --table runs")
    whole = runs_table(of_models)
    facts = [FACTS[key] for key in differing(of_models)]
    kept = [
        i for i, title in enumerate(whole.titles) if title in (*facts, "status", "peak memory a rank", *MODEL, RATIO)
    ]
    rows = [[row[i] for i in kept] for row in whole.rows]
    return Table([whole.titles[i] for i in kept], rows, whole.left, failures(of_models))


def _parameters(run: Run) -> str:
    return f"{run.result.model.parameters:,}" if run.result.model else ""


def _tokens_per_s(run: Run) -> str:
    metrics = run.result.last_metrics
    return f"{metrics.tokens_per_s:,.0f}" if run.result.model and metrics and run.ok else ""


def _loss(run: Run) -> str:
    curve = run.result.model.loss_curve if run.result.model else []
    return f"{curve[0]:.4f} to {curve[-1]:.4f} ({len(curve)} steps)" if curve else ""


def _training_ratios(runs: Sequence[Run]) -> dict[Run, float]:
    """The time of a model's training step over that of its inference, where both are among the runs."""
    named = labels(runs)
    work = {run: (named[run], *(getattr(run, key) for key in WORKLOAD if key != "mode")) for run in runs}
    inference = {work[run]: ms for run in runs if run.mode == "inference" and (ms := run.ms("total"))}
    trainings = [run for run in runs if run.mode == "training" and work[run] in inference]
    return {run: ms / inference[work[run]] for run in trainings if (ms := run.ms("total"))}


RATIO = "training / inference"  # of their times
MODEL = {"parameters": _parameters, "tokens/s": _tokens_per_s, "loss": _loss}  # of runs of a model


def _median(run: Run, which: str) -> str:
    found = run.passes.get(which)
    if not run.ok or not found:
        return ""
    # one sample is the mean of many calls and has no spread
    return digits(found.median) if found.n == 1 else f"{digits(found.median)} ({found.spread})"


def _rate(run: Run) -> str:
    return f"{run.tflops:.3g}" if run.tflops is not None and run.tflops < 0.1 else digits(run.tflops)


def _sparsity(run: Run) -> str:
    known = run.ok and run.result.metrics and run.result.metrics.sparsity_ratio is not None
    return f"{run.sparsity:.1%}" if known else ""


def _exposed(run: Run, which: str) -> str:
    phases = run.result.phases.get(which)
    return digits(phases.exposed_communication_ms) if phases and run.ok and (run.world_size or 0) > 1 else ""


def _do_bench(run: Run, which: str) -> str:
    found = run.result.timing.do_bench.get(which) if run.result.timing else None
    return f"{digits(found.ours_ms)} against {digits(found.do_bench_ms)}" if found else ""


def _notes(runs: Sequence[Run], marks: set[str]) -> list[str]:
    timings = [run.result.timing for run in runs if run.result.timing]
    passes = [times for timing in timings for times in timing.passes.values()]
    overheads = [timing.overhead_share for timing in timings if timing.overhead_share > OVERHEAD]
    unfinished = sum(bool(timing.rounds.unfinished) for timing in timings)
    notes = {
        NOISY: any(times.noisy for times in passes),
        "`~`: the samples rose or fell while they were taken, by more than 2% between their halves.": any(
            times.trend for times in passes
        ),
        f"Timing itself takes above 1% of the shortest pass in {counted(len(overheads), 'run')}, "
        f"{max(overheads, default=0):.1%} at most.": overheads,
        f"{counted(unfinished, 'run')} without all rounds (`rounds`), so of fewer samples: the sweep was interrupted.": unfinished,
        "`*`: the single device's time is extrapolated by FLOPs from a shorter sequence that fits.": "*" in marks,
        "`†`: against the fastest of these runs on one device, of the same workload or of as many tokens a rank.": "†"
        in marks,
    }
    return [note for note, applies in notes.items() if applies] + failures(runs)


@dataclass(frozen=True)
class Failure:
    """A reason for which runs are not ok, and their names."""

    status: str
    reason: str
    names: list[str]


def failure_groups(runs: Sequence[Run]) -> list[Failure]:
    """The runs that are not ok, by status and reason."""
    named = labels(runs)
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if not run.ok:
            reason = " ".join((run.result.reason or "without a reason").split())
            found.setdefault((run.status, reason), []).append(named[run] if run.attention else run.result.name)
    return [Failure(status, reason, names) for (status, reason), names in found.items()]


def failures(runs: Sequence[Run]) -> list[str]:
    """A list with a line for each reason why runs are not ok; empty where all are."""
    lines = [
        f"- {found.status}, {', '.join(dict.fromkeys(found.names))} ({counted(len(found.names), 'run')}): {found.reason}"
        for found in failure_groups(runs)
    ]
    return ["\n".join(lines)] if lines else []


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs were measured: a row for each fact, with all the values that it has."""
    facts = [environment_facts(run) for run in runs]
    values = {
        title: "; ".join(dict.fromkeys(str(found[title]) for found in facts if found[title])) for title in facts[0]
    }
    rows = [[title, text] for title, text in values.items() if text]
    return Table(["", "of these runs"], rows, {"", "of these runs"})


def environment_facts(run: Run) -> dict[str, Any]:
    """Where a run was measured, by title; None for what is not known."""
    about = run.environment
    cudnn = about.cudnn
    return {
        "GPU": run.gpu,
        "GPUs of the machine": len(about.gpus_before),
        "driver": next((gpu.driver_version for gpu in about.gpus_before), None),
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


def _pairs(found: dict[str, Any], sign: str) -> str:
    return ", ".join(f"{key}{sign}{value}" for key, value in found.items() if value)


def machine(runs: Sequence[Run]) -> str:
    """The machine and its libraries, in a line."""
    found = dict(environment_table(runs).rows)
    gpus = found.get("GPUs of the machine")
    device = f"{gpus} {found['GPU']}" if gpus and "GPU" in found else found.get("CPU")
    libraries = [f"{name} {found[name]}" for name in ("torch", "NCCL", "cuDNN") if name in found]
    return ", ".join(filter(None, [device, *libraries]))
