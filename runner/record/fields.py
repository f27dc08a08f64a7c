"""The parts of a result, as in result.json and as the program holds them. Times are in ms, memory in bytes. A field that a run
may lack is None or empty. A new fact of a result is its field here, or in `record`, and the line that measures it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

from attention import masks
from attention.masks.mask import short
from runner.environment import commit_text

NOISY = 0.05  # IQR over median


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Part:
    """Every subclass is a frozen dataclass whose fields are given by name, and made by `parsing.parsed`."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class NamedMask(Part):
    name: str
    parameters: dict[str, Any]

    @property
    def text(self) -> str:
        """The mask with those parameters that differ from the defaults of its function; long lists are cut short."""
        made = getattr(masks, self.name, None)
        known = inspect.signature(made).parameters if made else {}
        shown = [
            f"{key}={short(_tuples(value))}"
            for key, value in self.parameters.items()
            if value is not None and (key not in known or known[key].default != value)
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Method(Part):
    """The settings of the timing: its method, and the forwards and backwards in a sample (`layers`)."""

    method: str | None
    layers: int = 1
    autograd_thread: bool = False
    new_packs: bool = False


class Chosen(Part):
    """What a run used where `auto` or `best` was asked for. `variant` and the fields after it are set only with
    attention=auto."""

    kernel: str
    transport: str
    note: str | None
    passed_over: dict[str, str] = field(default_factory=dict)
    settings_ms: dict[str, float] = field(default_factory=dict)  # the fastest first
    settings_left_out: dict[str, str] = field(default_factory=dict)
    variant: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    graphs: bool = False
    why: str | None = None
    tried_ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class Git(Part):
    commit: str | None
    dirty: bool | None  # None: unknown
    source: str | None


class Range(Part):
    min: float
    median: float | None
    max: float


class Sampled(Part):
    """A GPU (`device` is its UUID) or a node's CPU while it was timed."""

    device: str
    samples: int | None
    sm_mhz: Range | None
    memory_mhz: Range | None
    power_w: Range | None
    temperature_c: Range | None
    throttle_reasons: list[str]
    load: Range | None = None
    mhz: Range | None = None
    running: Range | None = None


class During(Part):
    by_device: list[Sampled]
    period_ms: float | None
    unavailable: str | None


class Ceilings(Part):
    """The rates measured on a machine."""

    matmul_tflops: float | None
    copy_gb_s: float | None
    link_gb_s: float | None = None
    measured_at: float | None
    source: str | None


class Environment(Part):
    started_at: float = 0.0  # Unix time
    seconds: float = 0.0
    argv: list[str]
    overrides: list[str]
    host: str | None
    machine_id: str | None
    boot_id: str | None
    platform: str | None
    python: str | None
    cpu: str | None
    cores: int | None
    memory_bytes: int | None
    packages: dict[str, Any]
    variables: dict[str, Any]
    git: Git | None
    topology: str | None
    gpus_before: list[dict[str, str]]  # the fields of nvidia-smi
    gpus_after: list[dict[str, str]]
    during: During
    ceilings: Ceilings
    estimate: dict[str, float]
    stage_seconds: dict[str, float]
    gpu: str | None
    gpu_uuid: str | None
    gpu_memory_bytes: int | None
    compute_capability: str | None
    multiprocessors: int | None
    torch: str | None
    threads: int | None
    cuda: str | None
    nccl: str | None
    cudnn: int | None

    @property
    def commit(self) -> str:
        """The commit in a few words."""
        return commit_text(vars(self.git) if self.git else None)


class TensorError(Part):
    rel_l2: float | None = None
    max_abs: float | None = None
    gain: float | None = None
    local_rel_l2: float | None = None
    local_worst_row: float | None = None
    ratio_to_local: float | None = None
    worst_row: float | None = None  # in units of the row's scale
    worst_row_at: dict[str, int] = field(default_factory=dict)


class LseError(TensorError):
    checked: bool | None = None
    why: str | None = None  # why it was not checked


class Timed(Part):
    """The outputs of the timed iterations against the checked ones: errors by output, or why there are none."""

    passed: bool | None = None
    why: str | None = None
    last: dict[str, Any] = field(default_factory=dict)
    negated: dict[str, Any] = field(default_factory=dict)
    new_pack: dict[str, Any] = field(default_factory=dict)


class Correctness(Part):
    passed: bool | None
    why: str | None
    tensors: dict[str, TensorError] = field(default_factory=dict)
    new_pack: dict[str, TensorError] = field(default_factory=dict)
    lse: LseError = LseError()
    timed: Timed = Timed()
    reference: str | None = None
    kernel: str | None = None
    checked_share: float = 1.0
    tolerance: dict[str, float] = field(default_factory=dict)


class Counters(Part):
    tool: str | None = None
    unavailable: str | None = None
    passes: dict[str, dict[str, Any]] = field(default_factory=dict)


class Turn(Part):
    """A round of a run: its samples, their medians by pass, and when it began."""

    samples: int
    median_ms: dict[str, float]
    warmup_iterations: int | None
    warmup_settled: bool | None
    back_to_back_ms: float | None
    started_at: float | None
    during: During


class Rounds(Part):
    """The samples of runs that take turns are taken in several rounds."""

    done: int = 1
    of: int = 1
    drift: dict[str, float] = field(default_factory=dict)
    by_round: list[Turn] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        """Which rounds there are, for a run that lacks some."""
        return f"{self.done} of {self.of}" if self.done < self.of else None


class PassTimes(Part):
    """The summary of a pass's samples, ms, as in result.json. Results of earlier versions may lack what has a default."""

    n: int
    median: float
    iqr_over_median: float
    noisy: bool
    trend: bool = False  # samples rose or fell while they were taken (`trend`)
    p10: float | None = None
    p90: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    ci95: tuple[float, float] | None = None  # of the median, by order statistics
    outliers: int | None = None  # beyond 1.5 IQR of the quartiles (Tukey)

    @property
    def text(self) -> str:
        """The median in ms, with `!` where it is noisy."""
        return f"{digits(self.median, self.noisy)}{'!' if self.noisy else ''}"

    @property
    def spread(self) -> str:
        """IQR / median, with `!` where it is noisy and `~` where there is a trend; empty for one sample."""
        return f"{self.iqr:.1%}{'!' if self.noisy else ''}{'~' if self.trend else ''}" if self.iqr is not None else ""

    @property
    def iqr(self) -> float | None:
        """IQR / median; None for one sample."""
        return self.iqr_over_median if self.n > 1 else None


def digits(value: float, noisy: bool = False) -> str:
    """A time or rate with four digits, or with the two that noise leaves; at most three after the point, and all those before
    it."""
    places = (1 if noisy else 3) - (math.floor(math.log10(value)) if value else 0)
    return f"{value:.{min(3, max(0, places))}f}"


class Timing(Part):
    passes: dict[str, PassTimes]
    by_rank: list[dict[str, PassTimes]]
    unit: str = "ms"
    method: str = ""
    flush_l2: bool | None
    layers: int = 1
    new_packs: bool = False
    warmup_iterations: int | None = None
    warmup_settled: bool | None = None
    back_to_back_ms: float | None = None
    precision_met: bool | None = None
    no_ci95: str | None
    overhead_ms: float = 0.0  # the time measured for an empty region
    overhead_share: float = 0.0  # of the shortest pass
    overhead_high: bool = False
    counters: Counters | None = None
    rounds: Rounds = Rounds()


class PassMetrics(Part):
    tflops_per_device: float
    tokens_per_s: float | None = None
    received_gb_s: float | None = None
    limit_ms: float | None = None
    limited_by: str | None = None
    sol: float | None = None  # the limit's time over the measured time
    no_sol: str | None = None  # why there is no sol
    mfu: float | None = None  # of a model: its FLOP/s over the rate of a matrix product
    memory_bytes: int | None = None  # the fewest that a rank's kernels move, of the rank with most
    bytes_received_by_rank: list[dict[str, int]] | None = None  # None for an external package

    @property
    def received(self) -> int | None:
        """Bytes of the rank that receives most."""
        by_rank = self.bytes_received_by_rank
        return max(sum(parts.values()) for parts in by_rank) if by_rank else None


class Metrics(Part):
    passes: dict[str, PassMetrics]
    tokens: int | None
    flops_forward_by_rank: list[int]
    matmul_tflops: float | None = None
    kv_bytes_read_by_rank: list[int] = field(default_factory=list)
    flops: dict[str, int]  # of all ranks, by pass
    dense_flops: dict[str, int]  # of dense attention in the mask's direction
    connections: int | None  # (query, key) pairs of a head and batch element
    density: float | None  # of all queries times all keys
    sparsity_ratio: float | None  # the share that the mask removes from dense attention in its direction
    mask_build_ms: float | None = None  # to build the mask and cut it for a rank; None for masks that are not cut

    @property
    def kv_read_bytes(self) -> int | None:
        """Of a grouping, by the model: those of the rank that reads most."""
        return max(self.kv_bytes_read_by_rank, default=0) or None


class Model(Part):
    """loss_curve: the loss of every training step, from the first one on."""

    name: str
    text: str | None
    parameters: int
    matrix_parameters: int | None
    parameter_bytes: int
    loss_curve: list[float]

    @property
    def first_loss(self) -> float | None:
        return self.loss_curve[0] if self.loss_curve else None

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return self.loss_curve[-1] if self.loss_curve else None


class RankMemory(Part):
    """`peak_allocated` and `peak_reserved` are those of a GPU, `peak_resident` that of a process on a CPU."""

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_resident: int | None = None
    free: int | None = None  # what PyTorch could still have after the run
    symmetric: int = 0
    graphs: int = 0
    inputs: int = 0

    @property
    def peak(self) -> int:
        held = self.peak_allocated if self.peak_allocated is not None else self.peak_resident or 0
        return held + self.symmetric + self.graphs


class Memory(Part):
    by_rank: list[RankMemory]


class Energy(Part):
    """Of an iteration, over all GPUs; None where their counters could not be read, with the reason."""

    watts_by_rank: list[float] = field(default_factory=list)
    seconds: float | None = None
    calls: int | None = None
    joules: float | None = None
    joules_per_token: float | None = None
    tflops_per_watt: float | None = None
    unavailable: str | None = None


class Baseline(Part):
    """The same work on one device, or dense attention on all: its times, and this run's speedup and efficiency against them, by
    pass. The efficiency against dense attention is the speedup over the ratio of FLOPs."""

    kind: str = "single"  # or dense
    kernel: str | None = None
    samples: int | None = None
    passes: dict[str, float] = field(default_factory=dict)
    iqr_over_median: dict[str, float] = field(default_factory=dict)  # of the baseline's times
    speedup: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    extrapolated: bool = False
    measured_seq_len: int | None = None
    unsupported: str | None = None

    def noisy(self, which: str) -> bool:
        """Whether the baseline's times of a pass are noisy."""
        return self.iqr_over_median.get(which, 0.0) > NOISY


class Phase(Part):
    """ms: the mean of the middle half of the iterations, by length of the pass; the others are of all iterations."""

    ms: float | None  # the oldest results have a median only
    share: float | None
    median_ms: float | None = None
    mean_ms: float | None
    deviation_ms: float | None
    total_ms: float | None
    by_rank_ms: list[float]


class PassPhases(Part):
    exposed_communication_ms: float
    rank: int | None
    iterations: int | None
    total_ms: float = 0.0
    compute_ms: float = 0.0
    compute_share: float = 0.0
    communication_share: float = 0.0
    other_ms: float = 0.0
    other_share: float = 0.0
    compute_by_rank_ms: list[float]
    exposed_by_rank_ms: list[float]
    skew: float = 0.0
    phases: dict[str, Phase]


class Clocks(Part):
    """The clocks of the ranks' phases: how many, and how far apart they may be."""

    count: int
    error_ms: float


class Comm(Part):
    transport: str | None
    bytes_received_by_rank: list[dict[str, dict[str, int]]]
    clocks: Clocks | None  # older versions recorded none


class Failure(Part):
    """What a lost world left: the rank that failed first, its phase, and the end of its log."""

    rank: int | None
    phase: str | None
    log_tail: list[str]


class RankProfile(Part):
    """An iteration under the profiler."""

    stretch_ms: float | None
    compute_ms: float
    communication_ms: float
    overlapped_ms: float | None
    overlapped_share: float | None
    exposed_communication_ms: float
    idle_ms: float
    waits_known: bool | None
    runs: int | None
    kernels_left_out: int = 0  # only earlier versions counted them
