"""The parts of a result, as in the JSON of result.json.

Times are in ms, memory in bytes. A field that a run may lack is None or empty. The JSON has more fields; these are the ones that the
summary, the reports and the comparison read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.environment import commit_text


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
    """The settings of the timing: its method, and the forwards and backwards in a sample (`layers`)."""

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
    """What a run used where `auto` or `best` was asked for. `variant` and the fields after it are set only with
    attention=auto."""

    kernel: str
    transport: str
    note: str | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    settings_ms: dict[str, float] = field(default_factory=dict)  # the fastest first
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
    max: float


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A GPU (`device` is its UUID) or a node's CPU while it was timed."""

    device: str
    sm_mhz: Range | None = None
    throttle_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class During:
    by_device: list[Sampled] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str | None = None
    uuid: str | None = None
    driver_version: str | None = None


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
    gpus_before: list[Gpu] = field(default_factory=list)
    during: During = field(default_factory=During)
    gpu: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    cudnn: int | None = None

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of the GPUs that the ranks ran on; older results do not have them."""
        return [gpu.device for gpu in self.during.by_device if gpu.device != "cpu"]

    @property
    def commit(self) -> str:
        """The commit in a few words."""
        return commit_text(vars(self.git) if self.git else None)


@dataclass(frozen=True, kw_only=True)
class TensorError:
    rel_l2: float | None = None
    max_abs: float | None = None
    local_rel_l2: float | None = None
    ratio_to_local: float | None = None
    worst_row: float | None = None  # in units of the row's scale


@dataclass(frozen=True, kw_only=True)
class Check:
    checked: bool | None = None  # of the LSE
    passed: bool | None = None  # of the outputs that the last timed iteration left
    why: str | None = None  # why it was not checked


@dataclass(frozen=True, kw_only=True)
class Correctness:
    passed: bool | None = None
    tensors: dict[str, TensorError] = field(default_factory=dict)
    lse: Check = field(default_factory=Check)
    timed: Check = field(default_factory=Check)
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

    @property
    def spread(self) -> str:
        """IQR / median, with `!` where it is noisy and `~` where there is a trend."""
        return f"{self.iqr_over_median:.1%}{'!' if self.noisy else ''}{'~' if self.trend else ''}"


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
    """The samples of runs that take turns are taken in several rounds."""

    done: int = 1
    of: int = 1

    @property
    def text(self) -> str | None:
        """Which rounds there are, for a run that lacks some."""
        return f"{self.done} of {self.of}" if self.done < self.of else None

    @property
    def unfinished(self) -> str | None:
        return f"round {self.text}" if self.text else None


@dataclass(frozen=True, kw_only=True)
class Timing:
    passes: dict[str, PassTimes]
    back_to_back_ms: float | None = None
    no_ci95: str | None = None
    overhead_ms: float = 0.0  # the time measured for an empty region
    overhead_share: float = 0.0  # of the shortest pass
    overhead_high: bool = False
    do_bench: dict[str, DoBench] = field(default_factory=dict)
    counters: Counters | None = None
    rounds: Rounds = field(default_factory=Rounds)


@dataclass(frozen=True, kw_only=True)
class PassMetrics:
    tflops_per_device: float
    tokens_per_s: float | None = None
    limited_by: str | None = None
    sol: float | None = None  # the limit's time over the measured time
    no_sol: str | None = None  # why there is no sol


@dataclass(frozen=True, kw_only=True)
class Metrics:
    passes: dict[str, PassMetrics]
    kv_bytes_read_by_rank: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """`peak_allocated` and `peak_reserved` are those of a GPU, `peak_resident` that of a process on a CPU."""

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
    """The same work on one device: its times, and this run's speedup and efficiency against them, by pass."""

    passes: dict[str, float] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    extrapolated: bool = False
    measured_seq_len: int | None = None
    unsupported: str | None = None


@dataclass(frozen=True, kw_only=True)
class Phase:
    ms: float | None = None  # the oldest results have a median only
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
    """An iteration under the profiler."""

    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    idle_ms: float
