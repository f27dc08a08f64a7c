"""A result: the run makes it, its file holds it, and every reader gets it. `Result.of` checks the JSON of a result.json; all other
modules read its fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from runner import environment
from runner.record import fields
from runner.record.fields import PassTimes
from runner.record.parsing import NewerSchema, parsed, shown, what_parses

SCHEMA_VERSION = 3  # the newest that can be read; older ones can be, too
LONGEST_NAME = 255  # of a file
LATEST = 1e11  # Unix time
MEASURED = ("timing", "metrics", "baseline", "memory", "energy", "phases", "comm", "profile", "model")
SMALLEST, LARGEST = 1e-60, 1e60  # of measured numbers: their products and ratios are finite and not 0
STATUSES = ("ok", "invalid", "unsupported", "incorrect", "oom", "timeout", "crash")
KEPT = ("schema_version", "key", "name", "config", "experiment", "chosen", "environment", "folder")  # by `Result.anew`
BESIDE = ("folder",)  # fields of a result that its file does not have
NEEDED = (
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "seq_len",
    "causal",
    "window",
    "dtype",
    "world_size",
)  # of experiments
SIZES = (*NEEDED[:5], "world_size", "v_head_dim", "q_len", "prefix", "window", "kv_lengths", "seqlens")
CONFIGURED = ("attention", "model", "config", "mask_as_given", "replay")  # what an experiment does not say


class Asked(fields.Part):
    """The work that a run was to do, and how: from its experiment or, of a refused run without one, from its
    configuration, where a value of another type is None here. `kernel` and `transport` are as configured, which may be
    auto."""

    attention: str | None
    model: str | None  # None: attention alone
    config: str | None
    options: dict[str, Any]  # of the variant, without those that are None
    kernel: str | None
    transport: str | None
    timing: fields.Method
    world_size: int | None
    device: str | None
    batch: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None  # None: head_dim
    scale: float | None  # None: head_dim ** -0.5
    softcap: float | None  # None: none
    sinks: bool | None
    seq_len: int | None
    q_len: int | None
    kv_lengths: Any  # of a decode: a list of lengths, or how they are drawn
    prefix: int | None
    named_mask: fields.NamedMask | None
    mask_as_given: fields.NamedMask | None  # without what follows from the length
    causal: bool | None
    window: tuple[int, int] | None
    seqlens: Any  # a list of lengths, or how they are drawn
    dtype: str | None
    mode: str | None
    seed: int | None
    replay: str | None  # none, graphs or auto; of earlier versions launches, or not known

    @staticmethod
    def by(result: Result) -> Asked:
        """Raises ValueError for an experiment that no run has."""
        config, named = result.config, ("attention", "model", "kernel", "transport", "dtype", "mask")
        groups = {key: dict(result.group(key)) for key in named}
        flat = config | {key: group.pop("name", None) for key, group in groups.items()}
        model = None if flat["model"] == "none" else flat["model"]
        flat |= {"device": None, "options": groups["attention"], "model": model}
        mask = {"name": flat["mask"], "parameters": groups["mask"]} if flat["mask"] not in (None, "none") else None
        flat |= {"named_mask": mask, "mask_as_given": mask}
        if config.get("world_size") == "auto" and (ranks := re.search(r"_w(\d+)_", result.name)):
            flat["world_size"] = int(ranks[1])  # the name has the number that auto stands for
        values = what_parses(Asked, flat)
        if result.experiment is not None:
            work = parsed(dict[str, Any], result.experiment.get("workload"), "experiment.workload")
            given = {key: x for key, x in (result.experiment | work).items() if key not in CONFIGURED}
            spec = vars(parsed(Asked, given, "experiment"))
            _check_sizes(spec)
            values |= {key: x for key, x in spec.items() if key not in CONFIGURED} | {
                "kernel": values["kernel"] or spec["kernel"],
                "transport": values["transport"] or spec["transport"],
                "mode": spec["mode"] or values["mode"],
            }
        values["options"] = {key: value for key, value in values["options"].items() if value is not None}
        for key in ("seqlens", "kv_lengths"):
            lengths = values[key]
            listed = isinstance(lengths, list) and all(isinstance(n, int) for n in lengths)
            values[key] = lengths if listed or isinstance(lengths, str) else None
        if values["replay"] is None:  # of earlier versions
            values["replay"] = {"True": "graphs", "auto": "auto"}.get(str(config.get("graphs")))
        return Asked(**values)


@dataclass
class Tables:
    """What a run measured beside its result, each a file of its folder. samples: by rank, the ms of each iteration by pass.
    phases, kernels: rows. traces: the names of the files that the ranks wrote."""

    samples: Sequence[dict[str, list[float]]] = ()
    phases: Sequence[dict[str, Any]] = ()
    kernels: Sequence[dict[str, Any]] = ()
    traces: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `folder` is the run's; that of a packed run need not exist."""

    schema_version: int
    key: str
    name: str
    status: str
    reason: str | None = None
    failure: fields.Failure | None = None
    config: dict[str, Any]
    experiment: dict[str, Any] | None  # `Experiment.plain`
    chosen: fields.Chosen | None = None
    environment: fields.Environment
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
    folder: Path = Path()

    @staticmethod
    def begun(folder: Path, key: str, name: str, config: dict[str, Any]) -> Result:
        """The result of a run that begins on this machine."""
        here = parsed(fields.Environment, environment.host())
        about: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "status": "ok", "experiment": None}
        return Result(key=key, name=name, config=config, environment=here, folder=folder, **about)

    def anew(self, **changes: Any) -> Result:
        """The run with these fields, and without what was measured."""
        return Result(**{name: getattr(self, name) for name in KEPT} | {"status": "ok"} | changes)

    @staticmethod
    def of(value: Any, folder: Path | None = None) -> Result:
        """The result of a run's or a file's JSON. Raises ValueError, which names the field, for JSON that is no result, has a
        newer schema, or, in the schema of this version, a field that it lacks."""
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, is {shown(value)}")
        version = value.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerSchema(f"schema_version {version} is newer than {SCHEMA_VERSION}, which this program reads")
        recorded = {key: x for key, x in value.items() if key not in BESIDE}
        result: Result = parsed(Result, recorded, strict=version == SCHEMA_VERSION)
        result = replace(result, folder=folder or Path(result.name))
        for fault in _faults(result, recorded):
            raise ValueError(fault)
        return result

    @cached_property
    def asked(self) -> Asked:
        """Raises ValueError for an experiment that no run has."""
        return Asked.by(self)

    def plain(self) -> dict[str, Any]:
        """As its file holds it."""
        return {key: value for key, value in asdict(self).items() if key not in BESIDE}

    @property
    def timed(self) -> bool:
        """Whether the run is ok and has times; a run whose ranks shared a GPU has none."""
        return self.status == "ok" and self.timing is not None

    @property
    def unfinished(self) -> bool:
        """Whether rounds of it are still to do."""
        return self.status == "ok" and self.timing is not None and self.timing.rounds.text is not None

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
        recorded, keys = self.environment.ceilings, ("matmul_tflops", "copy_gb_s", "link_gb_s")
        rates = {key: rate for key in keys if SMALLEST <= (rate := getattr(recorded, key) or 0.0) <= LARGEST}
        return rates if {*keys[:2]} <= rates.keys() else {}

    @property
    def gain(self) -> tuple[float, float] | None:
        """Speedup and efficiency of the last pass against dense attention, or for several ranks against one device."""
        last = list(self.passes)[-1] if self.passes else ""
        if self.baseline is None or last not in self.baseline.speedup:
            return None
        if self.baseline.kind != "dense" and (self.asked.world_size or 0) < 2:
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
        return self.asked.replay == "auto" and self.chosen is not None and self.chosen.graphs

    def group(self, key: str) -> dict[str, Any]:
        """A group of the configuration; empty where it has none, or another value under that name."""
        group = self.config.get(key)
        return group if isinstance(group, dict) else {}


def _faults(result: Result, recorded: dict[str, Any]) -> Iterator[str]:
    """The rules between the fields of a result that it breaks."""
    started, timing, metrics, baseline = result.environment.started_at, result.timing, result.metrics, result.baseline
    assert result.asked  # can be read
    if result.status not in STATUSES:
        yield f"status must be one of {', '.join(STATUSES)}, is {shown(result.status)}"
    if result.status == "ok" and timing is None and not result.reason:
        yield "status is ok and timing is null, without a reason"
    for what, name in {"name": result.name, **result.artifacts}.items():
        if not name or len(name.encode()) > LONGEST_NAME or Path(name).name != name:
            yield f"{what} must be the name of a file, is {shown(name)}"
    if not 0 <= started <= LATEST:
        yield f"environment.started_at must be a Unix time, is {shown(started)}"
    for name in MEASURED:  # a run's own NaN and infinities are null in its file
        for number in _numbers(recorded.get(name)):
            if number and math.isfinite(number) and not SMALLEST <= abs(number) <= LARGEST:
                yield f"{name}: a number must be 0 or from {SMALLEST:g} to {LARGEST:g} in size, is {shown(number)}"
    if timing is None:
        return
    if metrics is None or result.experiment is None:
        yield f"timing is there and {'experiment' if metrics else 'metrics'} is null"
    elif lacking := {"forward", *timing.passes} - (timing.passes.keys() & metrics.passes.keys()):
        yield f"timing.passes and metrics.passes must have {', '.join(sorted(lacking))}"
    if result.memory is None or not result.memory.by_rank:
        yield "timing is there and memory.by_rank has no rank"
    if baseline is not None and baseline.speedup.keys() != baseline.efficiency.keys():
        yield "baseline.speedup and baseline.efficiency must be of the same passes"
    if baseline is not None and min([0.0, *baseline.passes.values(), *baseline.speedup.values()]) < 0:
        yield "baseline.passes and baseline.speedup must not be below 0"
    for which, times in timing.passes.items():
        if not (times.n > 0 and times.median > 0):
            yield f"timing.passes.{which} must have samples and a median above 0"
        if times.ci95 is not None and times.ci95[0] > times.ci95[1]:
            yield f"timing.passes.{which}.ci95 must be from less to more, is {shown(times.ci95)}"


def _check_sizes(spec: dict[str, Any]) -> None:
    """Raises ValueError for an experiment that lacks a size of its work, or has one that no run has."""
    for name in NEEDED:
        if spec[name] is None:
            raise ValueError(f"experiment: {name} is missing")
    for name in SIZES:
        size, least = spec[name], -1 if name == "window" else 1
        for one in size if isinstance(size, (list, tuple)) else [least if size is None else size]:
            if not (isinstance(one, int) and least <= one < 1 << 31):
                raise ValueError(f"experiment: {name} must be a size, is {shown(size)}")


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a JSON value."""
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _numbers(below)
    if isinstance(value, (int, float)):
        yield value
