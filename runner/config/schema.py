"""What a configuration may hold, as Hydra checks it: every key with its type and default. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from runner.models import PRESETS

CONF = Path(__file__).parents[1] / "conf"
TIMING_METHODS = ("simple", "warmup", "adaptive", "cudagraph", "profiler")
MODELS = ("none", *PRESETS, "hf")
MODES = ("forward", "forward_backward")  # of attention alone
MODEL_MODES = ("training", "inference")
BASELINES = ("single", "dense", "none")
ORDERS = ("auto", "interleaved", "sequential")
HARDWARE = ("auto", "cpu", "cuda")

# what config=default stands for on each kind of hardware
DEFAULT_SIZES = {
    "cpu": {"batch": 2, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq_len": 1024},
    "cuda": {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 32768},
}
TIMING_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"warmup_runs": 1, "warmup_ms": 0.0, "settle_ms": 100.0, "timing_runs": 6},
    "cuda": {"warmup_runs": 3, "warmup_ms": 200.0, "settle_ms": 2000.0, "timing_runs": 20},
}


# keys that change nothing of what is measured, and so no run's key: they belong to the whole command
UNMEASURED = (
    "dry_run", "order", "output", "resume", "tracker", "until_limit", "launch.timeout_s", "launch.start_timeout_s",
)  # fmt: skip

# keys that a user may expect, and why there are none
LEFT_OUT = {
    "timing.do_bench": "was a comparison with triton.testing.do_bench; leave it out",
    "attention.memory_gb": "was an option of auto, which passes over a variant that runs out of memory; leave it out",
    "attention.trials": "was an option of auto, which now always times its variants; leave it out",
    "dropout": "not supported by any variant; leave it out",
    "feature": "is a switch of dilated attention; give attention.pattern_cache=true,false or attention.memory_pool=true,false, as +experiment=dilated_features does",
    "graphs": "is now replay; give replay=graphs for graphs=true, replay=none for false, replay=auto for auto",
    "hydra": "of Hydra's own keys only hydra.sweep.dir, hydra/launcher and hydra.launcher.* are used; leave it out, and give output=DIR for another folder",
    "topology": "is a key of python -m runner.predict; leave it out, or give it there",
}


@dataclass
class Named:
    name: str = "auto"


@dataclass
class Dtype:
    """A dtype with the tolerances of its results; conf/dtype/ describes each."""

    name: str = MISSING
    atol: float = MISSING
    gqa_atol: float = MISSING
    grad_atol: float = MISSING
    row: float = MISSING
    grad_row: float = MISSING
    gain: float = MISSING
    lse: float = MISSING
    rel_l2: float = MISSING
    grad_rel_l2: float = MISSING
    error_ratio: float | None = None


@dataclass
class TimingConf:
    """null: the value of the hardware in `TIMING_DEFAULTS`."""

    method: str = MISSING
    warmup_runs: int | None = None  # least iterations before the first sample
    warmup_ms: float | None = None  # least time before the first sample
    settle_ms: float | None = None  # most time after that, until samples neither rise nor fall
    timing_runs: int | None = None  # samples; 6 are the fewest that give an interval of the median
    layers: int = 1  # calls in a sample, one after another as in a model; reported is one layer's time
    new_packs: bool = False  # each sample has a new packed batch: the same lengths in another order
    flush_l2: bool = False  # overwrite the L2 cache before every sample
    autograd_thread: bool = False  # run the backward on autograd's own thread, which each call has to wake
    counters: bool = False  # also count by ncu the bytes that the kernels move; world_size=1 on CUDA
    precision: float = 0.01  # adaptive: half width of the median's 95% interval over the median
    time_cap_s: float = 60.0  # adaptive: the most time
    profile_runs: int = 3  # profiler: profiled iterations
    phase_runs: int | None = None  # iterations whose phases are recorded; null: those of 0.2 s, at most 15


@dataclass
class Check:
    enabled: bool = True  # whether results are checked at all
    max_tflop: float | None = None  # work of the reference above which a sample of heads is checked; null: by hardware


@dataclass
class Launch:
    fresh: bool = False  # a new world for this run
    timeout_s: float = 300.0  # a rank silent for so long hangs; a step that is expected to be long gets more
    start_timeout_s: float = 300.0  # of the start of a world
    memory_limit_gb: float | None = None  # per rank
    fault: str | None = None  # provoke one, to see what is recorded: RANK:PHASE:raise|kill|hang|oom
    nodes: int = 1  # of the world: torchrun's or srun's, not given
    endpoint: str | None = None  # of earlier results
    env: Any = None  # more environment variables of the ranks, {NAME:value,..} or null
    share_gpu: bool = False  # all ranks on the first GPU: correctness is checked, nothing is timed

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that the run sets for its ranks."""
        return {name: str(value) for name, value in (self.env or {}).items()}


@dataclass
class RunConf:
    attention: Any = MISSING
    model: Any = MISSING  # conf/model/; none: attention alone
    kernel: Named = field(default_factory=Named)
    transport: Named = field(default_factory=Named)
    hardware: Named = field(default_factory=Named)
    dtype: Dtype = field(default_factory=Dtype)
    timing: TimingConf = field(default_factory=TimingConf)
    check: Check = field(default_factory=Check)
    launch: Launch = field(default_factory=Launch)
    config: str = "default"  # the workload's name; sets the keys of the workload
    category: str = "default"
    batch: int | None = None  # null, here and below: by the hardware
    heads: int | None = None  # of the queries
    kv_heads: int | None = None  # null: as many as heads
    head_dim: int | None = None
    v_head_dim: int | None = None  # of the values and out; null: head_dim
    seq_len: int | None = None  # tokens of all ranks; ${per_rank:N}: N for each rank
    q_len: int | None = None  # queries of a decode, on every rank; null: 1 for a decode, else as many as keys
    kv_lengths: Any = None  # of a decode, keys of each batch element: [..], random, or null: seq_len for each
    prefix: int | None = None  # of a decode, tokens before every batch element's own keys, which all share
    seqlens: Any = None  # lengths of a packed batch: [..], random, real, or null: what the variant is made for
    seqlens_mean: int | None = None  # seqlens=random; null: an eighth of seq_len
    seqlens_std: int | None = None  # null: half of the mean
    seqlens_multiple: int | None = None  # seqlens=real: each length is a multiple of it; null: 1
    mask: Any = MISSING  # by name with its parameters: conf/mask/; causal and window hold beside it
    causal: bool = True  # no query sees a later key
    window: list[int] = field(default_factory=lambda: [-1, -1])  # keys to the left and right of a query; -1: unbounded
    chunk: int | None = None  # stands for mask=chunked mask.chunk=N; null: none
    scale: float | None = None  # of the scores; null: head_dim ** -0.5
    softcap: float | None = None  # c: scaled scores x become c tanh(x / c); null: none
    sinks: bool = False  # a learned logit a head in the softmax's denominator, with its gradient
    tracker: Any = MISSING  # conf/tracker/: where results go beside their folders
    world_size: Any = "auto"  # ranks; auto: all GPUs, or two CPU ranks
    seed: int | None = None  # null: a fresh one each invocation, recorded
    mode: str | None = None  # null: all passes; forward, forward_backward; of a model training, inference
    baseline: str = "single"  # the same work on one device; dense: dense attention by the same variant; none
    phases: Any = True  # true: a line a pass is printed, table: a table; false
    nvtx: bool = False  # on GPUs: passes and phases of the phase pass are NVTX ranges, for nsys
    energy: bool = True  # on GPUs joules per token, by their counters, in a window of 1.3 s more
    deterministic: bool = False  # the same bits in every call
    agreement: bool = True  # ranks compare what they ask for whenever they make a plan
    replay: Any = "none"  # none, graphs or auto, as `attention.make` has it
    order: str = "auto"  # of a sweep's samples: sequential, interleaved, interleaved:KEY, or auto
    until_limit: bool = False  # a sweep does not run lengths beyond one that ended as oom, timeout or crash
    resume: bool = False  # keep the runs that are done; resume=FOLDER on the command line
    dry_run: bool = False  # show what would be run, and end
    output: str = "outputs"  # the folder of all results


@cache
def groups() -> dict[str, list[str]]:
    """Every config group's choices: the folders of conf/, each with a file a choice. Not to be changed."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found
