"""The parts of a result, as in result.json, whose other fields no module reads. Times are in ms, memory in bytes. A
field that a run may lack is None or empty."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, dataclass_transform

from attention import masks
from attention.masks.mask import short
from runner.environment import commit_text
from runner.measure.statistics import PassTimes


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Part:
    """Every subclass is a frozen dataclass whose fields are given by name."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class NamedMask(Part):
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)

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


class Workload(Part):
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
    named_mask: NamedMask | None = None
    v_head_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_lengths: list[int] | None = None
    prefix: int | None = None


class Method(Part):
    """The settings of the timing: its method, and the forwards and backwards in a sample (`layers`)."""

    method: str | None = None
    layers: int = 1
    autograd_thread: bool = False
    new_packs: bool = False


class Experiment(Part):
    workload: Workload
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int
    device: str
    kernel: str
    transport: str
    timing: Method
    mode: str | None = None
    seed: int | None = None


class Chosen(Part):
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


class Git(Part):
    commit: str | None = None
    dirty: bool | None = None  # None: unknown


class Range(Part):
    min: float
    max: float


class Sampled(Part):
    """A GPU (`device` is its UUID) or a node's CPU while it was timed."""

    device: str
    sm_mhz: Range | None = None
    throttle_reasons: list[str] = field(default_factory=list)


class During(Part):
    by_device: list[Sampled] = field(default_factory=list)


class Gpu(Part):
    name: str | None = None
    uuid: str | None = None
    driver_version: str | None = None


class Environment(Part):
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
    def commit(self) -> str:
        """The commit in a few words."""
        return commit_text(vars(self.git) if self.git else None)


class TensorError(Part):
    rel_l2: float | None = None
    max_abs: float | None = None
    local_rel_l2: float | None = None
    ratio_to_local: float | None = None
    worst_row: float | None = None  # in units of the row's scale


class Check(Part):
    checked: bool | None = None  # of the LSE
    passed: bool | None = None  # of the outputs that the last timed iteration left
    why: str | None = None  # why it was not checked


class Correctness(Part):
    passed: bool | None = None
    tensors: dict[str, TensorError] = field(default_factory=dict)
    lse: Check = field(default_factory=Check)
    timed: Check = field(default_factory=Check)
    reference: str | None = None
    checked_share: float = 1.0


class DoBench(Part):
    ours_ms: float
    do_bench_ms: float


class Counted(Part):
    memory_read_bytes: float | None = None
    l2_read_bytes: float | None = None


class Counters(Part):
    passes: dict[str, Counted] = field(default_factory=dict)


class Rounds(Part):
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


class Timing(Part):
    passes: dict[str, PassTimes]
    method: str = ""
    warmup_iterations: int | None = None
    back_to_back_ms: float | None = None
    no_ci95: str | None = None
    overhead_ms: float = 0.0  # the time measured for an empty region
    overhead_share: float = 0.0  # of the shortest pass
    overhead_high: bool = False
    do_bench: dict[str, DoBench] = field(default_factory=dict)
    counters: Counters | None = None
    rounds: Rounds = field(default_factory=Rounds)


class PassMetrics(Part):
    tflops_per_device: float
    tokens_per_s: float | None = None
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
        return max(sum(found.values()) for found in by_rank) if by_rank else None


class Metrics(Part):
    passes: dict[str, PassMetrics]
    kv_bytes_read_by_rank: list[int] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)  # of all ranks, by pass
    dense_flops: dict[str, int] = field(default_factory=dict)  # of dense attention in the mask's direction
    connections: int | None = None  # (query, key) pairs of a head and batch element
    density: float | None = None  # of all queries times all keys
    sparsity_ratio: float | None = None  # the share that the mask removes from dense attention in its direction
    mask_build_ms: float | None = None  # to build the mask and cut it for a rank; None for masks that are not cut

    @property
    def kv_read_bytes(self) -> int | None:
        """Of a grouping, by the model: those of the rank that reads most."""
        return max(self.kv_bytes_read_by_rank, default=0) or None


class Model(Part):
    """loss_curve: the loss of every training step, from the first one on."""

    name: str
    parameters: int
    parameter_bytes: int
    loss_curve: list[float] = field(default_factory=list)

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
    joules: float | None = None
    joules_per_token: float | None = None
    tflops_per_watt: float | None = None
    unavailable: str | None = None


class Baseline(Part):
    """The same work on one device, or dense attention on all: its times, and this run's speedup and efficiency against them, by
    pass. The efficiency against dense attention is the speedup over the ratio of FLOPs."""

    kind: str = "single"  # or dense

    passes: dict[str, float] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    extrapolated: bool = False
    measured_seq_len: int | None = None
    unsupported: str | None = None


class Phase(Part):
    """ms: the mean of the middle half of the iterations, by length of the pass; the others are of all iterations."""

    ms: float | None = None  # the oldest results have a median only
    share: float | None = None
    mean_ms: float | None = None
    deviation_ms: float | None = None
    total_ms: float | None = None
    by_rank_ms: list[float] = field(default_factory=list)


class PassPhases(Part):
    exposed_communication_ms: float
    rank: int | None = None
    iterations: int | None = None
    total_ms: float = 0.0
    compute_ms: float = 0.0
    compute_share: float = 0.0
    communication_share: float = 0.0
    other_ms: float = 0.0
    other_share: float = 0.0
    skew: float = 0.0
    phases: dict[str, Phase] = field(default_factory=dict)


class Clocks(Part):
    """The clocks of the ranks' phases: how many, and how far apart they may be."""

    count: int
    error_ms: float


class Comm(Part):
    clocks: Clocks | None = None  # older versions recorded none


class Failure(Part):
    """What a lost world left: the end of the log of the rank that failed first."""

    log_tail: list[str] = field(default_factory=list)


class RankProfile(Part):
    """An iteration under the profiler."""

    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    idle_ms: float
    kernels_left_out: int = 0  # of kernel_times.csv
