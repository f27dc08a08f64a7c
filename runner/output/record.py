"""A recorded run as typed values. `Result.of` checks the JSON of a result.json once; all other modules read its
fields."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.measure.statistics import PassTimes
from runner.output import fields
from runner.output.parsing import parsed, shown, what_parses

SCHEMA_VERSION = 2  # the newest that can be read; older ones can be, too
LONGEST_NAME = 255  # of a file
LATEST = 1e11  # Unix time
MEASURED = ("timing", "metrics", "baseline", "memory", "energy", "phases", "comm", "profile", "model")
SMALLEST, LARGEST = 1e-60, 1e60  # of measured numbers: their products and ratios are finite and not 0
STATUSES = ("ok", "invalid", "unsupported", "incorrect", "oom", "timeout", "crash")


class NewerSchema(ValueError):
    """A result that a later version of this program wrote."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The work that a run was to do, and how: from its experiment or, of a refused run without one, from its
    configuration, where a value of another type is None here. `kernel` and `transport` are as configured, which may be
    auto."""

    attention: str | None = None
    model: str | None = None  # None: attention alone
    config: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the variant, without those that are None
    kernel: str | None = None
    transport: str | None = None
    timing: fields.Method = field(default_factory=fields.Method)
    world_size: int | None = None
    device: str | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None  # None: head_dim
    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float | None = None  # None: none
    sinks: bool | None = None
    seq_len: int | None = None
    q_len: int | None = None
    kv_lengths: Any = None  # of a decode: a list of lengths, or how they are drawn
    prefix: int | None = None
    named_mask: fields.NamedMask | None = None
    mask_as_given: fields.NamedMask | None = None  # without what follows from the length
    causal: bool | None = None
    window: tuple[int, int] | None = None
    seqlens: Any = None  # a list of lengths, or how they are drawn
    dtype: str | None = None
    mode: str | None = None
    seed: int | None = None
    graphs: Any = False  # true, false or auto: of `replay` where there is one; the oldest results have neither
    replay: str | None = None

    @staticmethod
    def by(result: Result) -> Asked:
        config, variant, experiment = result.config, result.group("attention"), result.experiment
        flat = config | {
            key: result.group(key).get("name") for key in ("attention", "model", "kernel", "transport", "dtype")
        }
        flat["model"] = None if flat["model"] == "none" else flat["model"]
        flat |= {"timing": result.group("timing"), "device": None, "options": dict(variant)}
        flat["options"].pop("name", None)
        flat["named_mask"] = flat["mask_as_given"] = _named_mask(result.group("mask"))
        if config.get("world_size") == "auto" and (ranks := re.search(r"_w(\d+)_", result.name)):
            flat["world_size"] = int(ranks[1])  # the name has the number that auto stands for
        found = vars(what_parses(Asked, flat))
        if experiment is not None:
            found |= vars(experiment.workload) | {"mode": experiment.mode or found["mode"], "seed": experiment.seed}
            found |= {key: getattr(experiment, key) for key in ("options", "timing", "world_size", "device")}
            found |= {key: found[key] or getattr(experiment, key) for key in ("kernel", "transport")}
        found["options"] = {key: value for key, value in found["options"].items() if value is not None}
        found["seqlens"] = found["seqlens"] if isinstance(found["seqlens"], (str, list)) else None
        if found["replay"] is not None:
            found["graphs"] = {"graphs": True, "auto": "auto"}.get(found["replay"], False)
        found["graphs"] = found["graphs"] if isinstance(found["graphs"], (bool, str)) else False
        return Asked(**found)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `plain` is the whole JSON as recorded. `folder` is the run's; that of a packed run need not exist."""

    schema_version: int
    key: str
    name: str
    status: str
    reason: str | None = None
    failure: fields.Failure | None = None
    config: dict[str, Any] = field(default_factory=dict)
    experiment: fields.Experiment | None = None
    chosen: fields.Chosen | None = None
    environment: fields.Environment = field(default_factory=fields.Environment)
    correctness: fields.Correctness | None = None
    model: fields.Model | None = None
    timing: fields.Timing | None = None
    metrics: fields.Metrics | None = None
    baseline: fields.Baseline | None = None
    memory: fields.Memory | None = None
    energy: fields.Energy | None = None
    phases: dict[str, fields.PassPhases] = field(default_factory=dict)
    comm: fields.Comm | None = None
    profile: list[fields.RankProfile] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)  # files of the run's folder, by what they hold
    plain: dict[str, Any] = field(default_factory=dict, repr=False)
    folder: Path = field(default_factory=Path)

    @staticmethod
    def of(value: Any, folder: Path | None = None) -> Result:
        """Raises ValueError, which names the field, for JSON that is no result or has a newer schema."""
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, is {shown(value)}")
        version = value.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerSchema(f"schema_version {version} is newer than {SCHEMA_VERSION}, which this program reads")
        found: Result = parsed(Result, {k: v for k, v in value.items() if k not in ("plain", "folder")})
        for name in MEASURED:
            _check_numbers(value.get(name), name)
        _check(found)
        return dataclasses.replace(found, plain=value, folder=folder or Path(found.name))

    @cached_property
    def asked(self) -> Asked:
        return Asked.by(self)

    @property
    def timed(self) -> bool:
        """Whether the run is ok and has times; a run whose ranks shared a GPU has none."""
        return self.status == "ok" and self.timing is not None

    @property
    def passes(self) -> dict[str, PassTimes]:
        """The times by pass: forward and, where they were timed, backward and total."""
        return self.timing.passes if self.timing else {}

    @property
    def last_metrics(self) -> fields.PassMetrics | None:
        """The metrics of the last pass: of the total or, without a backward, of the forward."""
        return self.metrics.passes[list(self.passes)[-1]] if self.metrics and self.passes else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of the rank with most."""
        return max(rank.peak for rank in self.memory.by_rank) if self.memory and self.timing else None

    @property
    def ceilings(self) -> dict[str, float]:
        """The rates measured on this machine: `matmul_tflops`, `copy_gb_s` and, of several ranks, `link_gb_s`."""
        recorded = (self.plain.get("environment") or {}).get("ceilings")
        rates = {
            key: rate
            for key in ("matmul_tflops", "copy_gb_s", "link_gb_s")
            if isinstance(recorded, dict)
            and isinstance(rate := recorded.get(key), (int, float))
            and SMALLEST <= rate <= LARGEST
        }
        return rates if {"matmul_tflops", "copy_gb_s"} <= rates.keys() else {}

    @property
    def gain(self) -> tuple[float, float] | None:
        """Speedup and efficiency of the last pass against dense attention, or for several ranks against one device."""
        last = list(self.passes)[-1] if self.passes else ""
        several = self.experiment is not None and self.experiment.world_size > 1
        if self.baseline is None or last not in self.baseline.speedup:
            return None
        if self.baseline.kind != "dense" and not several:
            return None
        return self.baseline.speedup[last], self.baseline.efficiency[last]

    @property
    def taken(self) -> list[str]:
        """The variant and the options that attention=auto took; empty for other runs."""
        if self.chosen is None or self.chosen.variant is None:
            return []
        return [self.chosen.variant, *(f"{key}={value}" for key, value in self.asked.options.items())]

    @property
    def replay_taken(self) -> bool:
        """Whether replay=auto took CUDA graphs."""
        return self.asked.graphs == "auto" and self.chosen is not None and self.chosen.graphs

    def group(self, key: str) -> dict[str, Any]:
        """A group of the configuration; empty where it has none, or another value under that name."""
        found = self.config.get(key)
        return found if isinstance(found, dict) else {}


def _named_mask(group: dict[str, Any]) -> dict[str, Any] | None:
    """The mask by name of a configuration; None where it has none."""
    if group.get("name") in (None, "none"):
        return None
    return {"name": group["name"], "parameters": {key: x for key, x in group.items() if key != "name"}}


def _check(result: Result) -> None:
    """The rules between the fields of a result. Raises ValueError."""
    if result.status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, is {shown(result.status)}")
    if result.status == "ok" and result.timing is None and not result.reason:
        raise ValueError("status is ok and timing is null, without a reason")
    for what, name in {"name": result.name, **result.artifacts}.items():
        if not name or len(name.encode()) > LONGEST_NAME or Path(name).name != name:
            raise ValueError(f"{what} must be the name of a file, is {shown(name)}")
    if not 0 <= result.environment.started_at <= LATEST:
        raise ValueError(f"environment.started_at must be a Unix time, is {shown(result.environment.started_at)}")
    if result.experiment is not None:
        _check_sizes(result.experiment)
    if result.timing is None:
        return
    for name in ("metrics", "memory", "experiment"):
        if getattr(result, name) is None:
            raise ValueError(f"timing is there and {name} is null")
    assert result.metrics is not None and result.memory is not None
    if "forward" not in result.timing.passes:
        raise ValueError("timing.passes must have forward")
    if lacking := set(result.timing.passes) - set(result.metrics.passes):
        raise ValueError(f"metrics.passes must have {', '.join(sorted(lacking))}, which timing.passes has")
    if not result.memory.by_rank:
        raise ValueError("memory.by_rank must have a rank")
    baseline = result.baseline
    if baseline is not None and not set(baseline.speedup) == set(baseline.efficiency):
        raise ValueError("baseline.speedup and baseline.efficiency must be of the same passes")
    for which, times in result.timing.passes.items():
        if not (times.n > 0 and times.median > 0):
            raise ValueError(f"timing.passes.{which} must have samples and a median above 0")
        if times.ci95 is not None and times.ci95[0] > times.ci95[1]:
            raise ValueError(f"timing.passes.{which}.ci95 must be from less to more, is {shown(times.ci95)}")


def _check_sizes(experiment: fields.Experiment) -> None:
    """Raises ValueError for a size of the work that no run has."""
    for name, size in {**vars(experiment.workload), "world_size": experiment.world_size}.items():
        if name in ("causal", "sinks", "scale", "softcap"):
            continue
        least = -1 if name == "window" else 1
        for one in size if isinstance(size, (list, tuple)) else [size]:
            if isinstance(one, int) and not least <= one < 1 << 31:
                raise ValueError(f"experiment: {name} must be a size, is {shown(size)}")


def _check_numbers(value: Any, at: str) -> None:
    """Raises ValueError for a number beyond SMALLEST and LARGEST. A run's own NaN and infinities are null in its file."""
    if isinstance(value, dict):
        for key, x in value.items():
            _check_numbers(x, f"{at}.{key}")
    elif isinstance(value, list):
        for x in value:
            _check_numbers(x, at)
    elif isinstance(value, (int, float)) and value and math.isfinite(value) and not SMALLEST <= abs(value) <= LARGEST:
        raise ValueError(f"{at} must be 0 or from {SMALLEST:g} to {LARGEST:g} in size, is {shown(value)}")
