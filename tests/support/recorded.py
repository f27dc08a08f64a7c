"""Recorded results for tests, and the names that outputs/README.md gives to their fields."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from runner.measure import metrics
from runner.measure.statistics import summarize
from runner.output import results
from runner.record.result import BESIDE, SCHEMA_VERSION, Result
from tests.support.composing import resolved

ROOT = Path(__file__).parents[2]
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


def plain(**values: Any) -> dict:
    """The JSON of a result with these fields, and null in the others."""
    return {"schema_version": SCHEMA_VERSION, **dict.fromkeys(FIELDS), **values}


def write(folder: Path, value: dict) -> None:
    """A run's file, as JSON of any kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(value))


def refused(name: str, status: str, reason: str) -> dict:
    """A run that was not done."""
    return plain(status=status, reason=reason, key="0", name=name, config={"attention": {"name": "ring"}})


def measured(name: str, seq_len: int = 1024) -> dict:
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
        metrics=metrics.compute(spec, {which: s.median for which, s in summaries.items()}, None),
        memory={"by_rank": [{"peak_resident": 100}, {"peak_resident": 300}]},
        baseline={"speedup": {"total": 1.5}, "efficiency": {"total": 0.75}},
        phases={"forward": {"exposed_communication_ms": 0.25}},
    )


def unnamed(value) -> Iterator[str]:
    """The keys of a result, at any depth, that outputs/README.md does not name."""
    for entry in value if isinstance(value, list) else []:
        yield from unnamed(entry)
    for key, below in value.items() if isinstance(value, dict) else []:
        if not {*key.split()} <= NAMED and not key.startswith(BEGUN) and "." not in key:  # parameters' names have dots
            yield key
        if key not in OPEN:
            yield from unnamed(below)


def files(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def pass_times(ms: float) -> dict:
    ends = {"p10": ms, "p90": ms, "ci95": [0.999 * ms, 1.001 * ms]}
    return {"n": 20, "median": ms, "iqr_over_median": 0.01, "noisy": False, **ends}


def result(attention: str, ms: float | None, **changes) -> dict:
    """A run of 32768 tokens on 4 ranks whose forward takes `ms`, its backward twice that; not ok without `ms`."""
    asked = {"seq_len": 32768, "world_size": 4, "kernel": "auto", "options": {}, "head_dim": 128, "started_at": 1.0}
    asked |= {"status": "ok", "reason": None, "chosen": "flash4", "baseline": None, "back_to_back_ms": None, **changes}
    work = {
        "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": asked["head_dim"], "seq_len": asked["seq_len"],
        "causal": True, "window": [-1, -1], "dtype": "bf16",
    }  # fmt: skip
    value = plain(
        status=asked["status"],
        reason=asked["reason"],
        key="0",
        name=f"{attention}_w{asked['world_size']}_{abs(hash(str((attention, ms, sorted(changes.items(), key=str)))))}",
        config={
            **work, "attention": {"name": attention, **asked["options"]}, "kernel": {"name": asked["kernel"]},
            "transport": {"name": "auto"}, "dtype": {"name": "bf16"}, "timing": {"method": "warmup"},
            "world_size": asked["world_size"], "mode": None,
        },
        environment={"gpus_before": [{"name": "NVIDIA H200"}] * 4, "started_at": asked["started_at"]},
    )  # fmt: skip
    if asked["status"] == "unsupported":
        return value  # refused before anything was started
    value["experiment"] = {
        "variant": attention, "options": asked["options"], "workload": work, "world_size": asked["world_size"],
        "device": "cuda", "kernel": asked["kernel"], "transport": "auto", "timing": {"method": "warmup"},
        "mode": "forward_backward",
    }  # fmt: skip
    if ms is None:
        return value
    passes = {"forward": ms, "backward": 2 * ms, "total": 3 * ms}
    rate = 1e-6 * asked["seq_len"] ** 2 / asked["world_size"]
    return value | {
        "chosen": {"kernel": asked["chosen"], "transport": "nccl"},
        "timing": {
            "passes": {which: pass_times(x) for which, x in passes.items()},
            "back_to_back_ms": asked["back_to_back_ms"],
        },
        "metrics": {"passes": {which: {"tflops_per_device": rate / x} for which, x in passes.items()}},
        "memory": {"by_rank": [{"peak_allocated": 2**30, "symmetric": 2**29}] * asked["world_size"]},
        "baseline": asked["baseline"],
        "phases": {"forward": {"exposed_communication_ms": 0.125}},
    }


def written(folder: Path, *values: dict) -> Path:
    for value in values:
        write(folder / value["name"], value)
    return folder


def phase_rows(world: int = 2, iterations: int = 3, starts: bool = True) -> list[dict]:
    """Rows of phases.csv. In a pass every rank computes, waits for keys that travel meanwhile, computes and merges; rank 0
    is the slowest, and iteration i takes i ms longer. Without starts, as older versions wrote them."""
    rows = []
    for rank in range(world):
        for i in range(iterations):
            for which, begin in (("forward", 100.0 * i), ("backward", 100.0 * i + 50)):
                end = 20.0 + i - rank
                spans = [
                    ("pass", -1, 0.0, end), ("comm_kv", 1, 0.5, 10.0), ("comp_block", 0, 1.0, 7.0), ("wait_kv", 1, 7.0, 10.0),
                    ("comp_block", 1, 10.0, 15.0), ("comp_merge", 1, 15.0, end - 1),
                ]  # fmt: skip
                for phase, step, start, stop in spans:
                    row = {
                        "iteration": i,
                        "rank": rank,
                        "pass": which,
                        "phase": phase,
                        "step": step,
                        "ms": stop - start,
                    }
                    rows.append(row | ({"start_ms": begin + start, "stop_ms": begin + stop} if starts else {}))
    return rows


def kernel_rows(world: int = 2) -> list[dict]:
    """Rows of kernel_times.csv: in a pass of 30 ms, which each rank begins 1 ms after the one before it, communication lies
    half upon compute."""
    spans = [
        ("pass", "pass", 0.0, 30.0),
        ("void flash<64, 64>(int)", "compute", 0.0, 10.0),
        ("ncclDevKernel_SendRecv", "communication", 5.0, 15.0),
        ("void flash<64, 64>(int)", "compute", 15.0, 30.0),
    ]
    return [
        {"rank": rank, "pass": which, "kernel": name, "kind": kind}
        | {"start_ms": begin + rank + start, "stop_ms": begin + rank + stop}
        for rank in range(world)
        for which, begin in (("forward", 0.0), ("backward", 50.0))
        for name, kind, start, stop in spans
    ]


def with_kernels(folder: Path, value: dict) -> Path:
    """A result with its table of kernels' times."""
    times = {"compute_ms": 1.0, "communication_ms": 1.0, "exposed_communication_ms": 1.0, "idle_ms": 1.0}
    value["profile"] = [{**times, "kernels_left_out": 2}] * value["config"]["world_size"]
    value["artifacts"] = {"kernel_times": "kernel_times.csv"}
    written(folder, value)
    rows = kernel_rows(value["config"]["world_size"])
    results.write_csv(folder / value["name"] / "kernel_times.csv", rows, results.KERNEL_TIME_COLUMNS)
    return folder


def with_phases(folder: Path, value: dict, **how: Any) -> Path:
    """A result with its table of phases."""
    written(folder, value)
    columns = results.PHASE_COLUMNS if how.get("starts", True) else results.PHASE_COLUMNS[:6]
    results.write_csv(folder / value["name"] / "phases.csv", phase_rows(value["config"]["world_size"], **how), columns)
    return folder
