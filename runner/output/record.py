"""A recorded run as typed values. `Result.of` is the one place where a result's JSON is checked; `read_results` reads a
folder of them, packed (`runner/pack.py`) or a folder a run, and names the files that are no results."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2  # the newest that is read; older ones are, too
STATUSES = ("ok", "invalid", "unsupported", "incorrect", "oom", "timeout", "crash")
RESULT, PACKED = "result.json", "results.parquet"


@dataclass(frozen=True, kw_only=True)
class Workload:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    causal: bool
    window: tuple[int, int]
    dtype: str
    q_len: int | None = None
    seqlens: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run was asked to be timed."""

    method: str | None = None
    layers: int = 1
    autograd_thread: bool = False
    new_packs: bool = False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    workload: Workload
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int
    device: str
    kernel: str
    transport: str
    timing: Method
    mode: str | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What `auto` took, or the settings of options that were best. `variant` and what follows it only with attention=auto."""

    kernel: str
    transport: str
    note: str | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    settings_ms: dict[str, float] = field(default_factory=dict)  # the fastest first
    settings_left_out: dict[str, str] = field(default_factory=dict)
    variant: str | None = None
    graphs: bool = False
    why: str | None = None
    basis: str | None = None


@dataclass(frozen=True, kw_only=True)
class Git:
    commit: str | None = None
    dirty: bool | None = None  # None: unknown


@dataclass(frozen=True, kw_only=True)
class Range:
    min: float
    median: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a GPU (`device` is its UUID), or a node's CPU, did while timing."""

    device: str
    samples: int
    sm_mhz: Range | None = None
    power_w: Range | None = None
    temperature_c: Range | None = None
    throttle_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class During:
    by_device: list[Sampled] = field(default_factory=list)
    unavailable: str | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    started_at: float = 0.0  # Unix time
    argv: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    host: str | None = None
    machine_id: str | None = None
    platform: str | None = None
    python: str | None = None
    cpu: str | None = None
    cores: int | None = None
    packages: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    git: Git | None = None
    gpus_before: list[dict[str, Any]] = field(default_factory=list)
    during: During = field(default_factory=During)
    gpu: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    cudnn: int | None = None

    @property
    def uuids(self) -> list[str]:
        """Of the GPUs that the ranks were on; of results before there were any, none."""
        return [gpu.device for gpu in self.during.by_device if gpu.device != "cpu"]

    @property
    def git_plain(self) -> dict[str, Any] | None:
        return vars(self.git) if self.git else None


@dataclass(frozen=True, kw_only=True)
class TensorError:
    rel_l2: float | None = None
    max_abs: float | None = None
    local_rel_l2: float | None = None
    ratio_to_local: float | None = None
    worst_row: float | None = None  # in units of the row's scale


@dataclass(frozen=True, kw_only=True)
class LseError:
    checked: bool | None = None
    why: str | None = None  # not


@dataclass(frozen=True, kw_only=True)
class TimedCheck:
    """Of what the timed iterations left."""

    passed: bool | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Correctness:
    passed: bool | None = None
    tensors: dict[str, TensorError] = field(default_factory=dict)
    lse: LseError = field(default_factory=LseError)
    timed: TimedCheck = field(default_factory=TimedCheck)
    reference: str | None = None
    checked_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """The summary of a pass's samples, ms."""

    n: int
    median: float
    iqr_over_median: float
    noisy: bool
    trend: bool = False  # samples rose or fell while they were taken
    p10: float | None = None
    p90: float | None = None
    ci95: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class DoBench:
    ours_ms: float
    do_bench_ms: float


@dataclass(frozen=True, kw_only=True)
class Counted:
    memory_read_bytes: float | None = None
    l2_read_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    passes: dict[str, Counted] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """In how many rounds the samples were taken, and are to be."""

    done: int = 1
    of: int = 1

    @property
    def unfinished(self) -> str | None:
        return f"round {self.done} of {self.of}" if self.done < self.of else None


@dataclass(frozen=True, kw_only=True)
class Timing:
    passes: dict[str, PassTimes]
    back_to_back_ms: float | None = None
    no_ci95: str | None = None
    overhead_ms: float = 0.0  # what an empty region measures
    overhead_share: float = 0.0  # that over the shortest pass
    overhead_high: bool = False
    do_bench: dict[str, DoBench] = field(default_factory=dict)
    counters: Counters | None = None
    rounds: Rounds = field(default_factory=Rounds)  # null in results of earlier versions


@dataclass(frozen=True, kw_only=True)
class PassMetrics:
    tflops_per_device: float
    tokens_per_s: float | None = None
    limit_ms: float | None = None
    limited_by: str | None = None
    sol: float | None = None
    no_sol: str | None = None  # why there is none


@dataclass(frozen=True, kw_only=True)
class Metrics:
    passes: dict[str, PassMetrics]
    kv_bytes_read_by_rank: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes. `peak_allocated` and `peak_reserved` are of a GPU, `peak_resident` is of a process on a CPU."""

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_resident: int | None = None
    symmetric: int = 0
    graphs: int = 0
    inputs: int = 0

    @property
    def peak(self) -> int:
        held = self.peak_allocated if self.peak_allocated is not None else self.peak_resident or 0
        return held + self.symmetric + self.graphs


@dataclass(frozen=True, kw_only=True)
class Memory:
    by_rank: list[RankMemory]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One device's times (ms) and what these ranks are against it, by pass."""

    passes: dict[str, float] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    extrapolated: bool = False
    measured_seq_len: int | None = None
    unsupported: str | None = None


@dataclass(frozen=True, kw_only=True)
class Phase:
    ms: float | None = None  # results before 1578d8e have a median only
    share: float | None = None
    by_rank_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PassPhases:
    exposed_communication_ms: float
    rank: int | None = None
    total_ms: float = 0.0
    compute_share: float = 0.0
    communication_share: float = 0.0
    other_ms: float = 0.0
    other_share: float = 0.0
    skew: float = 0.0
    phases: dict[str, Phase] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """An iteration under the profiler, ms."""

    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    idle_ms: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. What readers use is typed; `plain` is the JSON as it was recorded, with every other field. `folder` is the
    run's, which a packed run has in name only."""

    schema_version: int
    key: str
    name: str
    status: str
    reason: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    experiment: Experiment | None = None
    chosen: Chosen | None = None
    environment: Environment = field(default_factory=Environment)
    correctness: Correctness | None = None
    timing: Timing | None = None
    metrics: Metrics | None = None
    baseline: Baseline | None = None
    memory: Memory | None = None
    phases: dict[str, PassPhases] = field(default_factory=dict)
    profile: list[RankProfile] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict, repr=False)
    folder: Path = field(default_factory=Path)

    @staticmethod
    def of(value: Any, folder: Path | None = None) -> Result:
        """Raises ValueError, which names the field, for what is no result or of a newer schema."""
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, is {_shown(value)}")
        version = value.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(f"schema_version {version} is newer than {SCHEMA_VERSION}, which this program reads")
        found: Result = _parsed(Result, {k: v for k, v in value.items() if k not in ("plain", "folder")}, "")
        _check(found)
        return dataclasses.replace(found, plain=value, folder=folder or Path(found.name))

    def group(self, key: str) -> dict[str, Any]:
        """A group of the configuration, empty where it has none; what was refused may hold anything there."""
        found = self.config.get(key)
        return found if isinstance(found, dict) else {}


def _check(result: Result) -> None:
    """What a result's fields must be to each other. Raises ValueError."""
    if result.status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, is {_shown(result.status)}")
    if result.status == "ok" and result.timing is None and not result.reason:
        raise ValueError("status is ok and timing is null, without a reason")
    if result.timing is None:
        return
    for name, needed in (("metrics", result.metrics), ("memory", result.memory), ("experiment", result.experiment)):
        if needed is None:
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


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


NAMED = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _parsed(kind: Any, value: Any, at: str) -> Any:
    """A value of JSON as the type `kind`; `at` is its place. Fields that a dataclass lacks are left aside, and null is a
    field's default. Raises ValueError."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _parsed(next(x for x in inner if x is not type(None)), value, at)
    if dataclasses.is_dataclass(kind):
        return _object(kind, _required(dict, value, at, "an object"), at)
    if origin is dict:
        found = _required(dict, value, at, "an object")
        return {
            key: _parsed(inner[1], x, f"{at}.{key}") for key, x in found.items() if x is not None or inner[1] is Any
        }
    if origin in (list, tuple):
        found = _required((list, tuple), value, at, "a list")
        if origin is tuple and len(found) != len(inner):
            raise ValueError(f"{at} must have {len(inner)} values, is {_shown(value)}")
        return origin(_parsed(inner[0], x, f"{at}[{i}]") for i, x in enumerate(found))
    right = isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)
    if not right:
        raise ValueError(f"{at} must be {NAMED[kind]}, is {_shown(value)}")
    return value


def _required(kind: Any, value: Any, at: str, said: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{at} must be {said}, is {_shown(value)}")
    return value


def _object(kind: Any, value: dict[str, Any], at: str) -> Any:
    found = {}
    for name, (hint, required) in _fields(kind).items():
        if value.get(name) is not None:
            found[name] = _parsed(hint, value[name], f"{at}.{name}".lstrip("."))
        elif required:
            raise ValueError(f"{f'{at}.{name}'.lstrip('.')} is missing")
    return kind(**found)


@lru_cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """A dataclass's fields: their types, and whether they must be there."""
    hints, none = typing.get_type_hints(kind), dataclasses.MISSING
    return {f.name: (hints[f.name], f.default is none and f.default_factory is none) for f in dataclasses.fields(kind)}


@dataclass(frozen=True)
class Problem:
    """A file that is no result that could be read."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: left out: {self.why}"


def read_result(folder: Path) -> Result | Problem | None:
    """A run's result from its own folder, or from the pack of the sweep that the folder would lie in; None where there is
    none."""
    path = folder / RESULT
    if path.exists() or path.is_symlink():
        return _read(path, lambda: path.read_text(), folder)
    packed = _packed(folder.parent / PACKED)
    if isinstance(packed, Problem):
        return packed
    text = packed.get(folder.name)
    return None if text is None else _read(folder.parent / PACKED, lambda: text, folder)


def read_results(folder: Path, below: bool = True) -> tuple[list[Result], list[Problem]]:
    """The results of a folder that is a run's, a sweep's, a pack's, or (`below`) one that holds any of these; and the files
    that are left out. A run's own folder goes before a packed run of the same name."""
    found: dict[Path, Result] = {}
    problems: list[Problem] = []

    def take(read: Result | Problem) -> None:
        if isinstance(read, Result):
            found[read.folder.resolve()] = read
        else:
            problems.append(read)

    for pack in sorted(folder.rglob(PACKED)) if below else [folder / PACKED]:
        packed = _packed(pack)
        if isinstance(packed, Problem):
            take(packed)
            continue
        for name, text in packed.items():
            take(_read(pack, lambda text=text: text, pack.parent / name, name))  # type: ignore[misc]
    paths = folder.rglob(RESULT) if below else [*folder.glob(RESULT), *folder.glob(f"*/{RESULT}")]
    for path in sorted(paths):
        take(_read(path, lambda path=path: path.read_text(), path.parent))  # type: ignore[misc]
    return [found[key] for key in sorted(found)], problems


def _read(path: Path, text: Callable[[], str], folder: Path, run: str = "") -> Result | Problem:
    try:
        return Result.of(json.loads(text()), folder)
    except RecursionError:
        why = "nested too deep"
    except json.JSONDecodeError as error:
        why = f"is no JSON ({error})" if path.name == PACKED or path.stat().st_size else "is empty"
    except UnicodeDecodeError:
        why = "is no text"
    except OSError as error:
        why = f"could not be read ({error.strerror})"
    except ValueError as error:
        why = str(error)
    return Problem(path, f"run {run}: {why}" if run else why)


def _packed(path: Path) -> dict[str, str] | Problem:
    """Each run's JSON in a pack by the run's name; nothing where there is no pack."""
    try:
        stamp = path.stat()
    except OSError:
        return {}
    return _packed_at(path, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=4)
def _packed_at(path: Path, modified: int, size: int) -> dict[str, str] | Problem:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["name", "result"])
        return dict(zip(table["name"].to_pylist(), table["result"].to_pylist(), strict=True))
    except (OSError, pa.ArrowException, KeyError) as error:
        return Problem(path, f"is no pack of results ({' '.join(str(error).split())[:100]})")


def packed_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON of each run in a folder's pack, by name. Raises ValueError for a file that is no pack."""
    packed = _packed(folder / PACKED)
    if isinstance(packed, Problem):
        raise ValueError(str(packed))
    return {name: json.loads(text) for name, text in packed.items()}


_named: set[str] = set()


def name_problems(problems: Iterable[Problem]) -> None:
    """A line each on stderr, once in a program."""
    for problem in problems:
        if str(problem) not in _named:
            _named.add(str(problem))
            print(problem, file=sys.stderr)
