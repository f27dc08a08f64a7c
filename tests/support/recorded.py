"""Recorded results for tests, and the names that outputs/README.md gives to their fields."""

import json
import re
from dataclasses import asdict, fields
from itertools import count

from runner.measure import metrics
from runner.measure.statistics import of_ranks, summarize
from runner.output import results
from runner.record.fields import Timing
from runner.record.result import BESIDE, SCHEMA_VERSION, Result
from tests.support.composing import resolved
from tests.support.paths import ROOT

NUMBERS = count()  # of results
FIELDS = [field.name for field in fields(Result) if field.name not in (*BESIDE, "schema_version")]
# the names in outputs/README.md, and the prefixes of those such as comm_<what>
SPANS = re.findall(r"`([^`\n]+)`", (ROOT / "outputs" / "README.md").read_text())
NAMED = {name for span in SPANS for name in re.findall(r"[A-Za-z_]\w*", span)}
BEGUN = tuple({start for span in SPANS for start in re.findall(r"(\w+_)<", span)})
# fields with other keys below them: of the configuration, or names of packages, files and the like
OPEN = {
    "config", "experiment", "options", "variables", "packages", "stage_seconds", "estimates_ms", "tried_ms", "left_out",
    "gpus_before", "gpus_after", "passed_over", "settings_ms", "settings_left_out",
}  # fmt: skip


def plain(**values):
    """The JSON of a result with these fields, and null in the others."""
    return {"schema_version": SCHEMA_VERSION, **dict.fromkeys(FIELDS), **values}


def write(folder, value):
    """A run's file, as JSON of any kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(value))


def refused(name, status, reason):
    """A run that was not done."""
    return plain(status=status, reason=reason, key="0", name=name, config={"attention": {"name": "ring"}})


def measured(name, seq_len=1024):
    """A run that went well: 4 ms forward, 10 ms backward."""
    spec = resolved(f"seq_len={seq_len}")
    passes = {"forward": [4.0] * 10, "backward": [10.0] * 10, "total": [14.0] * 10}
    summaries = {which: summarize(ms) for which, ms in passes.items()}
    return plain(
        status="ok",
        key="0",
        name=name,
        config={"config": "default", "attention": {"name": spec.variant}},
        experiment=spec.plain(),
        chosen={"kernel": "sdpa_flash", "transport": "gloo"},
        correctness={"passed": True, "tensors": {"out": {"rel_l2": 2e-3}}},
        timing={"passes": {which: asdict(s) for which, s in summaries.items()}},
        metrics=asdict(metrics.compute(spec, {which: s.median for which, s in summaries.items()}, None)),
        memory={"by_rank": [{"peak_resident": 100}, {"peak_resident": 300}]},
        baseline={"speedup": {"total": 1.5}, "efficiency": {"total": 0.75}},
        phases={"forward": {"exposed_communication_ms": 0.25}},
    )


def unnamed(value):
    """The keys of a result, at any depth, that outputs/README.md does not name."""
    for entry in value if isinstance(value, list) else []:
        yield from unnamed(entry)
    for key, below in value.items() if isinstance(value, dict) else []:
        if not {*key.split()} <= NAMED and not key.startswith(BEGUN) and "." not in key:  # parameters' names have dots
            yield key
        if key not in OPEN:
            yield from unnamed(below)


def files(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


def timed(samples):
    """The timing of all ranks' samples, as a file has it."""
    return asdict(Timing(flush_l2=False, **of_ranks(samples, 0.0)))


def result(
    attention,
    ms,
    seq_len=32768,
    world_size=4,
    kernel="auto",
    options=(),
    status="ok",
    reason=None,
    chosen="flash4",
    started_at=1.0,
):
    """A run on GPUs whose forward takes `ms`, its backward twice that; not ok without `ms`. Refused, nothing of it was resolved."""
    work = {
        "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": seq_len, "causal": True, "window": [-1, -1],
        "dtype": "bf16",
    }  # fmt: skip
    config = {
        "attention": {"name": attention, **dict(options)}, "kernel": {"name": kernel}, "transport": {"name": "auto"},
        "dtype": {"name": "bf16"}, "timing": {"method": "warmup"}, "world_size": world_size, "mode": None,
    }  # fmt: skip
    value = plain(
        status=status,
        reason=reason,
        key="0",
        name=f"{attention}_w{world_size}_{next(NUMBERS)}",
        config=work | config,
        environment={"gpus_before": [{"name": "NVIDIA H200"}] * 4, "started_at": started_at},
    )
    if status == "unsupported":
        return value
    value["experiment"] = {
        "variant": attention, "options": dict(options), "workload": work, "world_size": world_size, "device": "cuda",
        "kernel": kernel, "transport": "auto", "timing": {"method": "warmup"}, "mode": "forward_backward",
    }  # fmt: skip
    if ms is None:
        return value
    passes = {"forward": ms, "backward": 2 * ms, "total": 3 * ms}
    spread = {"n": 20, "iqr_over_median": 0.01, "noisy": False}
    rate = 1e-6 * seq_len**2 / world_size
    return value | {
        "chosen": {"kernel": chosen, "transport": "nccl"},
        "timing": {
            "passes": {
                which: {**spread, "median": x, "p10": x, "p90": x, "ci95": [0.999 * x, 1.001 * x]}
                for which, x in passes.items()
            }
        },
        "metrics": {"passes": {which: {"tflops_per_device": rate / x} for which, x in passes.items()}},
        "memory": {"by_rank": [{"peak_allocated": 2**30, "symmetric": 2**29}] * world_size},
        "phases": {"forward": {"exposed_communication_ms": 0.125}},
    }


def written(folder, *values):
    for value in values:
        write(folder / value["name"], value)
    return folder


def phase_rows(world=2, iterations=3):
    """Rows of phases.csv. In a pass every rank computes, waits for keys that travel meanwhile, computes and merges; rank 0
    is the slowest, and iteration i takes i ms longer."""
    spans = [
        ("comm_kv", 1, 0.5, 10.0), ("comp_block", 0, 1.0, 7.0), ("wait_kv", 1, 7.0, 10.0), ("comp_block", 1, 10.0, 15.0),
    ]  # fmt: skip
    return [
        {"iteration": i, "rank": rank, "pass": which, "phase": phase, "step": step, "ms": stop - start}
        | {"start_ms": begin + start, "stop_ms": begin + stop}
        for rank in range(world)
        for i in range(iterations)
        for which, begin in (("forward", 100.0 * i), ("backward", 100.0 * i + 50))
        for end in [20.0 + i - rank]
        for phase, step, start, stop in [("pass", -1, 0.0, end), *spans, ("comp_merge", 1, 15.0, end - 1)]
    ]


def with_phases(folder, value, columns=results.COLUMNS["phases"]):
    """A result with its table of phases."""
    written(folder, value)
    results.write_csv(folder / value["name"] / "phases.csv", phase_rows(value["config"]["world_size"]), columns)
    return folder
