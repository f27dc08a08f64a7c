"""The tables that describe runs one by one: what was measured, what failed, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from runner.measure.statistics import OVERHEAD, PassTimes
from runner.output.columns import TABLE
from runner.output.summary import add_gain_over_separate
from runner.output.terminal import flop, gib
from runner.report.labels import labels, varying_options
from runner.report.runs import FACTS, PASSES, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import NOISY, Table, counted, differing, digits, fact, of_columns

TIMED = (*PASSES[:2], "optimizer", PASSES[2])
LATE = 0.05  # the time back to back is shown where it differs from the total by more than this share
GROUPED = ("forward_ms", "total_ms", "kv_read_bytes", "kv_bytes_saved", "speedup_over_separate")
NUMBERS = ("world_size", "batch", "seq_len", "q_len", "heads", "head_dim", "dtype", "gpu")
LEFT = {title for key, title in FACTS.items() if key not in NUMBERS}


def rate_title(runs: Sequence[Run]) -> str:
    return "TFLOP/s a GPU" if any(run.gpu for run in runs) else "TFLOP/s a rank"


def runs_table(runs: Sequence[Run]) -> Table:
    """A row for each run: the facts in which the runs differ, and what was measured. Columns without a text are left
    out."""
    varying, against, trained = varying_options(runs), scaling(runs), _training_ratios(runs)
    columns = {FACTS[key]: [fact(run, key, varying) for run in runs] for key in differing(runs)}
    columns["status"] = ["" if run.ok else run.status for run in runs]
    columns["rounds"] = [run.result.timing.rounds.text or "" if run.result.timing else "" for run in runs]

    def add(title: str, text: Callable[[Run], str]) -> None:
        columns[title] = [text(run) if run.ok else "" for run in runs]

    for which in TIMED:
        add(f"{which} ms (IQR)", lambda run, which=which: _median(run.passes.get(which)))  # type: ignore[misc]
    timed = [(run.ms("total"), run.back_to_back) for run in runs]
    if any(total and back_to_back and abs(back_to_back - total) > LATE * total for total, back_to_back in timed):
        add("back to back ms", lambda run: digits(run.back_to_back))
    if any(run.sparsity for run in runs):
        add("sparsity", lambda run: "" if run.row["sparsity_ratio"] is None else f"{run.sparsity:.1%}")
        add("FLOPs", lambda run: flop(run.flops))
    add(rate_title(runs), _rate)
    add("dense ms", lambda run: digits(next(reversed(run.dense_ms.values()), None)))
    add("speedup", lambda run: f"{against[run].speedup:.2f}{against[run].mark}" if run in against else "")
    add("efficiency", lambda run: f"{against[run].efficiency:.0%}{against[run].mark}" if run in against else "")
    for which in PASSES[:2]:
        add(f"exposed comm. {which} ms", lambda run, which=which: digits(run.exposed(which)))  # type: ignore[misc]
    add("peak memory a rank", lambda run: gib(run.result.peak_bytes or 0))
    for title, text in MODEL.items():
        add(title, text)
    add(RATIO, lambda run: f"{trained[run]:.2f}" if run in trained else "")
    for which in PASSES[:2]:
        add(f"{which} ms against do_bench's", lambda run, which=which: _do_bench(run, which))  # type: ignore[misc]
    return of_columns(columns, LEFT | {"status"}, _notes(runs, {gain.mark for gain in against.values()}))


def models_table(runs: Sequence[Run]) -> Table:
    """What a model takes and learns: a row for each of its runs."""
    of_models = [run for run in runs if run.result.model or run.model]
    if not of_models:
        raise ValueError("--table models: none of these runs is of a model; use --table runs")
    whole = runs_table(of_models)
    kept = [*(FACTS[key] for key in differing(of_models)), "status", "peak memory a rank", *MODEL, RATIO]
    columns = dict(zip(whole.titles, map(list, zip(*whole.rows, strict=True)), strict=True))
    return of_columns({title: columns[title] for title in columns if title in kept}, whole.left, failures(of_models))


def groupings_table(runs: Sequence[Run]) -> Table | None:
    """What each grouping takes beside separate calls that are otherwise the same: times, speedup, the model's bytes and the
    share of them that it saves. None where there is no such pair."""
    grouped = [run for run in runs if run.ok and "grouping" in run.options]
    rows = [dict(run.row) for run in grouped]
    add_gain_over_separate([run.result for run in grouped], rows)
    if (
        len(
            {
                run.options["grouping"]
                for run, row in zip(grouped, rows, strict=True)
                if row["kv_bytes_saved"] is not None
            }
        )
        < 2
    ):
        return None
    varying = varying_options(grouped)
    facts = {FACTS[key]: [fact(run, key, varying) for run in grouped] for key in differing(grouped)}
    measured = {column.title: [column.text(row) for row in rows] for column in TABLE if column.key in GROUPED}
    return of_columns(facts | measured, LEFT)


def _parameters(run: Run) -> str:
    return f"{run.result.model.parameters:,}" if run.result.model else ""


def _tokens_per_s(run: Run) -> str:
    metrics = run.result.last_metrics
    return f"{metrics.tokens_per_s:,.0f}" if run.result.model and metrics else ""


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


def _median(times: PassTimes | None) -> str:
    # one sample is the mean of many calls and has no spread
    return f"{digits(times.median)}{f' ({times.spread})' if times.n > 1 else ''}" if times else ""


def _rate(run: Run) -> str:
    return f"{run.tflops:.3g}" if run.tflops is not None and run.tflops < 0.1 else digits(run.tflops)


def _do_bench(run: Run, which: str) -> str:
    both = run.result.timing.do_bench.get(which) if run.result.timing else None
    return f"{digits(both.ours_ms)} against {digits(both.do_bench_ms)}" if both else ""


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
