"""The typed configuration, its cross-field rules, and the experiment that comes out of it. No torch here: a bad value
answers at once."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import factorial, prod
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from attention.autotune import choice, model
from attention.geometry import counts
from attention.geometry.options import BEST, check_heads
from attention.masks.band import Mask
from attention.variants.base import Variant
from attention.variants.registry import everything, variant
from runner import environment
from runner.config import folders
from runner.config.groups import groups
from runner.config.values import LARGEST, InvalidConfig, UnsupportedHere, above_zero, one_of, shown, whole

TIMING_METHODS = ("simple", "warmup", "adaptive", "cudagraph", "profiler")
MODELS = ("none",)
MODES = ("forward", "forward_backward")
SEEDS = 1 << 31
MOST_RANKS = 1 << 16
MOST_SEQUENCES = 1 << 19  # of a pack
MOST_RUNS = 1_000_000  # timed or not; of one sample each
MOST_MS = 24 * 3.6e6  # a day
RANKS_A_CORE = 32  # on a CPU
FINITE = sys.float_info.max
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # bytes
# where a run may be when a fault is provoked, in this order
PHASES = (
    "prepare", "trials", "estimate", "check_variant", "check_reference", "check_compare", "ceilings", "timing", "check_timed",
    "phases", "profiler", "baseline", "finish",
)  # fmt: skip
PHASES_AFTER_CHECK = PHASES[PHASES.index("ceilings") :]
BASELINES = ("single", "none")
ORDERS = ("auto", "interleaved", "sequential")
HARDWARE = ("auto", "cpu", "cuda")

# what config=default stands for on each kind of hardware
DEFAULT_SIZES = {
    "cpu": {"batch": 2, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq_len": 1024},
    "cuda": {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 32768},
}


NEW_PACKS = 1024  # of a run, the first again behind the last; many more than functions have plans of

TIMING_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"warmup_runs": 1, "warmup_ms": 0.0, "settle_ms": 100.0, "timing_runs": 6},
    "cuda": {"warmup_runs": 3, "warmup_ms": 200.0, "settle_ms": 2000.0, "timing_runs": 20},
}


@dataclass
class NamedConf:
    name: str = "auto"


@dataclass
class DtypeConf:
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
    method: str = MISSING
    warmup_runs: int | None = None  # iterations before the first sample, at least; null: 3 on a GPU, 1 on a CPU
    warmup_ms: float | None = None  # and this long at least; null: 200 on a GPU, 0 on a CPU
    settle_ms: float | None = (
        None  # and then until times no longer rise or fall, so long at most; null: 2000 on a GPU, 100 on a CPU
    )
    timing_runs: int | None = None  # samples; null: 20 on a GPU, 6 on a CPU, the least that give an interval
    layers: int = 1  # calls that a sample has, one after another as a model's layers; what is reported is a layer's
    new_packs: bool = False  # each sample's pack is new: the same lengths in another order
    flush_l2: bool = False  # overwrite the L2 cache before every sample
    autograd_thread: bool = False  # backwards by autograd's own thread: woken once a model's backward, here once a pass
    do_bench: bool = False  # also time with triton.testing.do_bench, for comparison; world_size=1 on CUDA
    counters: bool = False  # also count by ncu the bytes that the kernels move; world_size=1 on CUDA
    precision: float = 0.01  # adaptive: half width of the median's 95% interval over the median
    time_cap_s: float = 60.0  # adaptive
    profile_runs: int = 3  # profiler


@dataclass
class CheckConf:
    enabled: bool = True
    max_tflop: float | None = None  # reference work over which only a sample of heads is checked; null: by hardware


@dataclass
class LaunchConf:
    fresh: bool = False  # a new world for this run
    timeout_s: float = 300.0  # silence of a rank that counts as a hang; stretched when a step is expected to be long
    start_timeout_s: float = 300.0
    memory_limit_gb: float | None = None  # per rank
    fault: str | None = None  # provoke one, to see what is recorded: RANK:PHASE:raise|kill|hang|oom
    nodes: int = 1
    endpoint: str | None = None  # HOST:PORT of the first node, for nodes > 1
    # variables of the ranks' environment, {NAME:value,..} or null; those of the program's own environment reach them, too
    env: Any = None
    share_gpu: bool = False  # all ranks on the first GPU, to check them where there are fewer: nothing is timed


@dataclass
class RunConf:
    attention: Any = MISSING
    model: NamedConf = field(default_factory=lambda: NamedConf("none"))
    kernel: NamedConf = field(default_factory=NamedConf)
    transport: NamedConf = field(default_factory=NamedConf)
    hardware: NamedConf = field(default_factory=NamedConf)
    dtype: DtypeConf = field(default_factory=DtypeConf)
    timing: TimingConf = field(default_factory=TimingConf)
    check: CheckConf = field(default_factory=CheckConf)
    launch: LaunchConf = field(default_factory=LaunchConf)
    config: str = "default"
    category: str = "default"
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    seq_len: int | None = None
    q_len: int | None = None  # queries of a decode, on every rank; null: 1 for a decode, else as many as keys
    seqlens: Any = None  # lengths of a pack's sequences: [..], random, or null: what the variant is made for
    seqlens_mean: int | None = None  # seqlens=random; null: an eighth of seq_len
    seqlens_std: int | None = None  # null: half of the mean
    causal: bool = True
    window: list[int] = field(default_factory=lambda: [-1, -1])
    world_size: Any = "auto"
    seed: int | None = None  # null: a fresh one each invocation, recorded
    mode: str | None = None  # forward or forward_backward; null: both where there is a backward
    baseline: str = "single"
    phases: bool = True
    deterministic: bool = False
    # passes are replayed from CUDA graphs, inputs and results copied: for few tokens a GPU; auto: where attention=auto says so
    graphs: Any = False
    order: str = "auto"  # of a sweep's samples: interleaved, sequential; auto: interleaved where it compares runs
    resume: bool = False
    output: str = "outputs"


def register() -> None:
    """Make the schema and the names of folders known to Hydra."""
    ConfigStore.instance().store(name="schema", node=RunConf)
    if not OmegaConf.has_resolver("run_name"):
        OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_, usable_gpus(_root_)))
        OmegaConf.register_new_resolver("stamp", folders.stamp)
        OmegaConf.register_new_resolver("per_rank", lambda n, *, _root_: per_rank(_root_, n))


def per_rank(cfg: DictConfig, n: int) -> int:
    """`seq_len: ${per_rank:8192}`: n for each rank of the world, so that a sweep over world_size is weak scaling."""
    if cfg.world_size == "auto":
        return n * _world_size(cfg, _device(cfg, usable_gpus(cfg)), usable_gpus(cfg))
    # what is no world size is refused later, by its name
    world = cfg.world_size if isinstance(cfg.world_size, int) else 1
    return n * max(world, 1)


# what does not change what is measured, and so is not part of a run's identity
_NOT_IDENTITY = ("hydra", "order", "output", "resume")


def identity(cfg: DictConfig) -> str:
    """A short hash of the resolved configuration."""
    plain = {key: OmegaConf.to_container(cfg[key], resolve=True) if OmegaConf.is_config(cfg[key]) else cfg[key]
             for key in cfg if key not in _NOT_IDENTITY}  # fmt: skip
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:8]


def usable_gpus(cfg: DictConfig) -> int:
    """The GPUs that a run of this configuration may use: none with hardware=cpu or a PyTorch without CUDA."""
    if cfg.hardware.name == "cpu" or not environment.gpu_count():
        return 0
    return environment.gpu_count() if environment.torch_has_cuda() else 0


LONGEST_PART = 40  # characters, of a folder's name: a file system takes 255


def run_name(cfg: DictConfig, gpus: int) -> str:
    """The run folder's name on a machine with `gpus` usable GPUs: variant, config, sizes and the hash. world_size=auto
    is named by what it stands for here."""
    world = cfg.world_size
    if world == "auto" and cfg.hardware.name in HARDWARE:
        world = _world_size(cfg, _device(cfg, gpus), gpus)
    parts = [cfg.attention.get("name", "none"), cfg.config]
    tokens = cfg.seq_len
    if isinstance(cfg.seqlens, ListConfig) and all(isinstance(n, int) for n in cfg.seqlens):
        tokens = sum(cfg.seqlens)
    parts += [f"s{tokens}"] if tokens is not None else []
    parts += [f"w{world}", cfg.dtype.name, cfg.timing.method, identity(cfg)]
    return re.sub(r"[^A-Za-z0-9_.-]", "-", "_".join(str(p)[:LONGEST_PART] for p in parts))


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    causal: bool
    window: tuple[int, int]
    dtype: str
    q_len: int | None = None  # of a decode
    seqlens: tuple[int, ...] | None = None  # of a pack, which has batch 1 and seq_len tokens in all

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return (0, *accumulate(self.seqlens)) if self.seqlens else (0, self.seq_len)

    @property
    def queries(self) -> int:
        return self.seq_len if self.q_len is None else self.q_len

    @property
    def pairs(self) -> int:
        """(query, key) pairs under the mask, of one batch element."""
        if self.q_len is not None:
            return self.q_len * self.seq_len
        return counts.global_pairs(self.cu_seqlens, self.mask)

    def describe(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        tokens = f"{self.seq_len:,} tokens"
        if self.q_len is not None:
            tokens = f"{self.q_len} quer{'y' if self.q_len == 1 else 'ies'} on {self.seq_len:,} keys"
        elif self.seqlens:
            tokens += f" in {len(self.seqlens)} sequences"
        return f"batch {self.batch}, {tokens}, {heads} heads of {self.head_dim}, {self.mask.describe()}, {self.dtype}"


@dataclass(frozen=True)
class Experiment:
    """One run, fully resolved and checked: what the ranks are handed, as a plain dict."""

    variant: str
    options: dict[str, Any]
    workload: Workload
    world_size: int
    device: str
    kernel: str
    transport: str
    dtype: dict[str, Any]
    timing: dict[str, Any]
    check: dict[str, Any]
    launch: dict[str, Any]
    seed: int
    mode: str
    baseline: str
    phases: bool
    deterministic: bool
    graphs: bool | str

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Experiment:
        workload = dict(plain["workload"])
        workload["window"] = tuple(workload["window"])
        workload["seqlens"] = tuple(workload["seqlens"]) if workload["seqlens"] else None
        return Experiment(**{**plain, "workload": Workload(**workload)})


def _plain(node: Any) -> dict[str, Any]:
    return {str(k): v for k, v in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]


def _require_values(cfg: DictConfig) -> None:
    """Raises InvalidConfig for a value that is missing, or an interpolation that leads nowhere or to a wrong type."""
    for key in cfg:
        if key == "hydra":
            continue
        try:
            node = cfg[key]
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            raise InvalidConfig(
                f"{error.full_key or str(key)}=???: this is the mark of a value that is still missing; give one"
            ) from None
        except OmegaConfBaseException as error:
            raise InvalidConfig(
                f"{error.full_key or str(key)}: {shown(str(error).splitlines()[0])}; give a value"
            ) from None


def _check_names(cfg: DictConfig) -> None:
    one_of("attention", cfg.attention.get("name"), [choice.AUTO, *everything()])
    for group in ("kernel", "transport", "dtype"):
        one_of(group, cfg[group].name, groups()[group])
    one_of("model", cfg.model.name, MODELS)
    one_of("hardware", cfg.hardware.name, HARDWARE)
    one_of("timing.method", cfg.timing.method, TIMING_METHODS)
    one_of("baseline", cfg.baseline, BASELINES)
    one_of("order", cfg.order, ORDERS)
    if cfg.mode is not None:
        one_of("mode", cfg.mode, MODES)


def _check_dtype(cfg: DictConfig) -> None:
    way_out = f"leave it out for that of dtype={cfg.dtype.name}"
    for key in cfg.dtype:
        if key == "name":
            continue
        above_zero(f"dtype.{key}", cfg.dtype[key], way_out, FINITE)
        if str(key).endswith("rel_l2") or key in ("row", "grad_row", "gain", "lse"):
            above_zero(f"dtype.{key}", cfg.dtype[key], f"an output of zeros is 1 off; {way_out}", 0.5)


def _check_check(cfg: DictConfig) -> None:
    above_zero(
        "check.max_tflop", cfg.check.max_tflop, "null for what this hardware does, check.enabled=false for no check"
    )


# of the ranks' environment, which the launcher sets
OWN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ATTENTION_", "PYTHON")


def _check_launch(cfg: DictConfig) -> None:
    launch = cfg.launch
    for key in ("timeout_s", "start_timeout_s"):
        above_zero(f"launch.{key}", launch[key], f"the default is {getattr(LaunchConf, key):g}, inf for no limit")
    if launch.memory_limit_gb == math.inf:
        raise InvalidConfig(
            "launch.memory_limit_gb=inf: must be a number of GiB; launch.memory_limit_gb=null is no limit"
        )
    above_zero("launch.memory_limit_gb", launch.memory_limit_gb, "launch.memory_limit_gb=null is no limit", 1e9)
    whole("launch.nodes", launch.nodes, most=MOST_RANKS)
    _check_env(launch.env)
    if launch.endpoint is not None:
        _check_endpoint(launch.endpoint)
    elif launch.nodes > 1:
        raise InvalidConfig(
            f"launch.nodes={launch.nodes}: the nodes meet at launch.endpoint=HOST:PORT of the first one; none is given"
        )


def _check_env(variables: Any) -> None:
    if variables is None:
        return
    if not isinstance(variables, DictConfig):
        raise InvalidConfig(f"launch.env={shown(variables)}: must be null or {{NAME:value,..}}")
    for name, value in ((str(name), value) for name, value in variables.items()):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidConfig(f"launch.env: {shown(name)} is no variable's name; use letters, digits and _")
        if environment.SECRET.search(name):
            raise InvalidConfig(f"launch.env.{name}: results record what stands here; set what is secret outside")
        if value is None or OmegaConf.is_config(value):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: must be a text or a number")
        if name.startswith(OWN_VARIABLES):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: is the launcher's own; leave it out")


def _check_endpoint(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    name = re.fullmatch(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", host)
    if not name or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise InvalidConfig(
            f"launch.endpoint={shown(endpoint)}: must be HOST:PORT of the first node, with a port from 1 to 65535; "
            "for instance launch.endpoint=node0:29500"
        )


def _check_timing(cfg: DictConfig) -> None:
    timing = cfg.timing
    for key, least, most in (
        ("timing_runs", 1, MOST_RUNS), ("profile_runs", 1, MOST_RUNS), ("warmup_runs", 0, MOST_RUNS), ("layers", 1, MOST_RUNS),
    ):  # fmt: skip
        if timing[key] is not None:
            whole(f"timing.{key}", timing[key], least, most)
    for key in ("warmup_ms", "settle_ms"):
        if timing[key] is not None and not 0 <= timing[key] <= MOST_MS:
            raise InvalidConfig(
                f"timing.{key}={timing[key]:g}: must be a time of at least 0 and at most a day, or null"
            )
    if cfg.order == "interleaved" and timing.method == "simple":
        raise InvalidConfig(
            "order=interleaved timing=simple: one mean can't be taken in rounds; use timing=warmup or order=auto"
        )
    for key, highest in (("precision", FINITE), ("time_cap_s", MOST_MS / 1e3)):
        above_zero(f"timing.{key}", timing[key], f"the default is {getattr(TimingConf, key):g}", highest)


# each of one config group alone
GROUP_RULES = (_check_names, _check_dtype, _check_check, _check_launch, _check_timing)


@dataclass(frozen=True)
class Resolved:
    """What the rules across groups look at: a configuration with its open values filled in for a machine."""

    cfg: DictConfig
    name: str
    variant: Variant[Any] | None  # None: attention=auto
    options: dict[str, Any]
    mode: str
    device: str
    world: int
    work: Workload
    timing: dict[str, Any]


def experiment(cfg: DictConfig, gpus: int, seed: int) -> Experiment:
    """The experiment of a composed configuration on a machine with `gpus` usable GPUs.

    Raises InvalidConfig for a broken rule, UnsupportedHere for what this machine cannot do."""
    _require_values(cfg)
    for rule in GROUP_RULES:
        rule(cfg)
    name = cfg.attention.name
    chosen = None if name == choice.AUTO else variant(name)
    options = _options(cfg, chosen)
    mode = _mode(cfg, chosen)
    device = _device(cfg, gpus)
    chosen_seed = seed if cfg.seed is None else whole("seed", cfg.seed, 0)
    run = Resolved(
        cfg=cfg,
        name=name,
        variant=chosen,
        options=options,
        mode=mode,
        device=device,
        work=workload(cfg, device, chosen, chosen_seed),
        world=_world_size(cfg, device, gpus),
        timing={**TIMING_DEFAULTS[device], **{k: x for k, x in _plain(cfg.timing).items() if x is not None}},
    )
    for check in RUN_RULES:
        check(run)
    return Experiment(
        variant=name,
        options=options,
        workload=run.work,
        world_size=run.world,
        device=device,
        kernel=cfg.kernel.name,
        transport=cfg.transport.name,
        dtype=_plain(cfg.dtype),
        timing=run.timing,
        check=_plain(cfg.check),
        launch=_plain(cfg.launch),
        seed=chosen_seed,
        mode=mode,
        baseline=cfg.baseline,
        phases=cfg.phases,
        deterministic=cfg.deterministic,
        graphs=cfg.graphs,
    )


def _options(cfg: DictConfig, chosen: Variant[Any] | None) -> dict[str, Any]:
    options = {k: v for k, v in _plain(cfg.attention).items() if k != "name"}
    known = choice.OPTIONS if chosen is None else chosen.options.names()
    for option in options:
        if option not in known:
            raise InvalidConfig(
                f"attention.{shown(option)}: {cfg.attention.name} has no such option; its options: "
                f"{', '.join(known) or 'none'}"
            )
    return options


def _mode(cfg: DictConfig, chosen: Variant[Any] | None) -> str:
    decode = chosen.decode if chosen is not None else cfg.q_len is not None
    mode = cfg.mode or ("forward" if decode else "forward_backward")
    if decode and mode != "forward":
        name = cfg.attention.name if chosen is not None else f"q_len={cfg.q_len}"
        raise InvalidConfig(f"mode={mode}: {name} is a decode and has no backward; use mode=forward")
    return mode


def _check_variant(run: Resolved) -> None:
    """The variant with these heads, lengths, mask and options in this world."""
    work, world = run.work, run.world
    if run.cfg.launch.nodes > 1 and world % run.cfg.launch.nodes:
        raise InvalidConfig(f"world_size={world}: must be a multiple of launch.nodes={run.cfg.launch.nodes}")
    try:
        check_heads(work.heads, work.kv_heads)
        if run.variant is None:
            _check_automatic(work, world, run.options, run.mode)
        else:
            about = work.heads, work.kv_heads, work.cu_seqlens, world, work.mask, work.q_len
            run.variant.settings(run.options, *about)
    except ValueError as error:
        drawn = work.seqlens is not None and run.cfg.seqlens == "random"
        way_out = (
            "; these lengths were drawn: of a seqlens_mean of at least 128 they are multiples of 64" if drawn else ""
        )
        raise InvalidConfig(f"{_by_keys(str(error), run)}{way_out}") from None


def _by_keys(message: str, run: Resolved) -> str:
    """A message of the library, which names its arguments, with the command line's keys and values for them."""
    mask = run.work.mask
    named = {f"window=({mask.left}, {mask.right})": f"window={shown(run.cfg.window)}"}
    named |= {f"{key}={value}": f"attention.{key}={shown(value)}" for key, value in run.options.items()}
    named |= {f"{key}={value!r}": f"attention.{key}={shown(value)}" for key, value in run.options.items()}
    for argument, key in named.items():
        if message.startswith(f"{argument}:"):
            return key + message.removeprefix(argument)
    return message


def _check_graphs(run: Resolved) -> None:
    graphs, method = run.cfg.graphs, run.timing["method"]
    if graphs != "auto" and not isinstance(graphs, bool):
        raise InvalidConfig(f"graphs={shown(graphs)}: must be true or false, or auto with attention=auto")
    if graphs == "auto" and run.variant is not None:
        raise InvalidConfig(f"graphs=auto: attention=auto decides that; for {run.name} give true or false")
    if graphs and method == "cudagraph":
        raise InvalidConfig(
            f"graphs={shown(graphs)} timing=cudagraph: either the passes are replayed or whole calls are; use one of the two"
        )
    if _tried(run.cfg) and method == "cudagraph":
        asked, way_out = f"attention.trials={run.cfg.attention.get('trials')}", "attention.trials=null"
        if run.variant is not None:
            option = next(name for name, value in run.options.items() if value == BEST)
            asked, way_out = f"attention.{option}={BEST}", "one of its values"
        raise InvalidConfig(f"{asked} timing=cudagraph: trials are launched by the host; use {way_out}")


def _check_device(run: Resolved) -> None:
    """What the ways of timing and of launching need of the hardware. Raises UnsupportedHere."""
    timing = run.timing
    if run.cfg.graphs is True and run.device == "cpu":
        raise UnsupportedHere("graphs=true on a CPU: CUDA graphs need a GPU; graphs=false works here")
    if timing["method"] == "cudagraph" and run.device == "cpu":
        raise UnsupportedHere("timing=cudagraph on a CPU: CUDA graphs need a GPU; timing=warmup works here")
    if run.cfg.launch.share_gpu:
        _check_shared(run)
    one_gpu = run.device == "cuda" and run.world == 1
    if timing["counters"] and not one_gpu:
        raise UnsupportedHere("timing.counters=true: ncu looks into one process with a GPU; use world_size=1 on CUDA")
    if timing["do_bench"] and not one_gpu:
        raise UnsupportedHere("timing.do_bench=true: triton.testing.do_bench times one GPU; use world_size=1 on CUDA")


def _check_shared(run: Resolved) -> None:
    """Of several ranks on one GPU, which exchange over symmetric memory and are checked, not timed."""
    cfg, asked = run.cfg, "launch.share_gpu=true"
    if cfg.launch.nodes > 1:
        raise InvalidConfig(f"{asked} launch.nodes={cfg.launch.nodes}: the ranks share one GPU; use launch.nodes=1")
    if not cfg.check.enabled:
        raise InvalidConfig(f"{asked} check.enabled=false: ranks of one GPU are checked only; use check.enabled=true")
    if run.variant is None:
        raise InvalidConfig(f"{asked} attention=auto: it chooses by times, which mean nothing here; name a variant")
    for option, value in run.options.items():
        if value == BEST:
            raise InvalidConfig(
                f"{asked} attention.{option}={BEST}: it is chosen by times, which mean nothing here; give a value"
            )
    if cfg.transport.name not in ("auto", "symm"):
        raise InvalidConfig(
            f"{asked} transport={cfg.transport.name}: NCCL refuses two ranks on one GPU, and gloo has CPU tensors only; "
            "use transport=symm"
        )
    if run.variant.executor == "external":
        raise UnsupportedHere(
            f"{asked} attention={run.name}: it exchanges over NCCL, which refuses two ranks on one GPU"
        )
    if run.device == "cpu":
        raise UnsupportedHere(f"{asked} on a CPU: no GPU to share; launch.share_gpu=false works here")


def _check_layers(run: Resolved) -> None:
    """Raises InvalidConfig where samples of several layers, or of a pack each, can't be."""
    cfg, work = run.cfg, run.work
    asked = [
        (f"timing.layers={cfg.timing.layers}", cfg.timing.layers > 1),
        ("timing.new_packs=true", cfg.timing.new_packs),
    ]
    for what in (what for what, wanted in asked if wanted):
        if cfg.timing.method not in ("warmup", "adaptive"):
            raise InvalidConfig(
                f"{what} timing={cfg.timing.method}: samples are of one call there; timing=warmup and adaptive have layers"
            )
        if cfg.timing.do_bench:
            raise InvalidConfig(f"{what} timing.do_bench=true: that times one call by itself; use one of the two")
    if not cfg.timing.new_packs:
        return
    if work.seqlens is None:
        raise InvalidConfig("timing.new_packs=true: this is no pack; give seqlens=random or a list of lengths")
    if cfg.graphs:
        raise InvalidConfig(
            f"timing.new_packs=true graphs={shown(cfg.graphs)}: what is replayed has to come again; use graphs=false"
        )
    orders = factorial(len(work.seqlens)) // prod(factorial(n) for n in Counter(work.seqlens).values())
    if orders <= NEW_PACKS:
        raise InvalidConfig(
            f"timing.new_packs=true: this pack's lengths have {orders} orders of the {NEW_PACKS} that are wanted; give more "
            "sequences, of different lengths"
        )


def _tried(cfg: DictConfig) -> bool:
    """Whether candidates are run before one is taken: of attention=auto, or of options that are best."""
    if cfg.attention.name == choice.AUTO:
        return cfg.attention.trials is not None
    return BEST in cfg.attention.values()


def _check_automatic(work: Workload, world: int, options: dict[str, Any], mode: str) -> None:
    """Raises ValueError where attention=auto has nothing to choose from, or an option of its own is wrong."""
    above_zero("attention.memory_gb", options["memory_gb"], "null for all that the GPU has", FINITE)
    choice.check_trials(options["trials"])
    shapes = counts.Shapes(work.batch, work.heads, work.kv_heads, work.head_dim, 2)
    backward = mode == "forward_backward"
    task = choice.Task(work.cu_seqlens, world, work.mask, shapes, bool(work.seqlens), backward, work.q_len)
    able, left_out = model.candidates(task)
    if not able:
        raise ValueError(model.nothing(task, left_out))


def workload(cfg: DictConfig, device: str, chosen: Variant[Any] | None = None, seed: int = 0) -> Workload:
    """The sizes of a composed configuration; those left open are filled in for `device` and the variant. Raises
    InvalidConfig."""
    sizes = {
        key: whole(key, cfg[key] if cfg[key] is not None else DEFAULT_SIZES[device][key])
        for key in ("batch", "heads", "kv_heads", "head_dim", "seq_len")
    }
    if cfg.kv_heads is None and cfg.heads is not None:
        sizes["kv_heads"] = sizes["heads"]
    window = _window(cfg)
    for key in ("seqlens_mean", "seqlens_std"):
        if cfg[key] is not None and cfg.seqlens != "random":
            raise InvalidConfig(
                f"{key}={shown(cfg[key])}: describes the lengths that seqlens=random draws, and this is seqlens={shown(cfg.seqlens)}; "
                f"give seqlens=random or {key}=null"
            )
    decode = chosen.decode if chosen is not None else cfg.q_len is not None
    q_len = None if cfg.q_len is None else whole("q_len", cfg.q_len)
    if q_len is not None and chosen is not None and not decode:
        raise InvalidConfig(
            f"q_len={q_len}: {chosen.name} is self-attention, with as many queries as keys; q_len is for tree and "
            "ring_decode, or give q_len=null"
        )
    if decode and q_len is None:
        q_len = 1
    if decode and cfg.seqlens is not None:
        name = chosen.name if chosen is not None else f"q_len={q_len}"
        raise InvalidConfig(f"seqlens={shown(cfg.seqlens)}: {name} is a decode of single sequences; use seqlens=null")
    lengths = None if decode else _lengths(cfg, sizes, chosen is not None and chosen.packed, seed)
    if lengths is not None:
        sizes |= {"batch": 1, "seq_len": sum(lengths)}
    causal = cfg.causal and not (decode and cfg.config == "default")  # the default workload suits every variant
    return Workload(**sizes, causal=causal, window=window, dtype=cfg.dtype.name, q_len=q_len, seqlens=lengths)


def _window(cfg: DictConfig) -> tuple[int, int]:
    if not OmegaConf.is_list(cfg.window) or len(cfg.window) != 2:  # an interpolation may lead to anything
        raise InvalidConfig(f"window={shown(cfg.window)}: must be [left,right], for instance window=[512,0]")
    window = list(cfg.window)
    left, right = window
    if not all(isinstance(side, int) and -1 <= side <= LARGEST for side in window):
        raise InvalidConfig(
            f"window={shown(window)}: each side must be -1 (unbounded) or a number of tokens up to {LARGEST}; "
            "give for instance window=[512,0]"
        )
    return left, right


def _lengths(cfg: DictConfig, sizes: dict[str, int], packed: bool, seed: int) -> tuple[int, ...] | None:
    """The pack's lengths: as given, drawn, or S/8, S/4, S/2, S/8 for every batch element of a variant made for packs."""
    given = cfg.seqlens
    seq_len, batch = sizes["seq_len"], sizes["batch"]
    if given is None:
        if not packed:
            return None
        eighth = seq_len // 8
        if seq_len % 8:
            raise InvalidConfig(
                f"seq_len={seq_len}: the default pack S/8, S/4, S/2, S/8 needs a multiple of 8; "
                f"{max(8, round(seq_len / 8) * 8)} would work"
            )
        _check_sequences(f"batch={batch}", 4 * batch)
        return (eighth, 2 * eighth, 4 * eighth, eighth) * batch
    if given == "random":
        return _random_lengths(cfg, seq_len * batch, seq_len, seed)
    if not OmegaConf.is_list(given) or not given or any(not _is_length(n) for n in given):
        raise InvalidConfig(
            f"seqlens={shown(given)}: must be a list of lengths, for instance seqlens=[512,1024], random or null"
        )
    _check_sequences("seqlens", len(given))
    return tuple(given)


def _is_length(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= LARGEST


def _check_sequences(what: str, number: int) -> None:
    if number > MOST_SEQUENCES:
        raise InvalidConfig(
            f"{what}: {number} sequences; a pack has at most {MOST_SEQUENCES}; give fewer or longer ones"
        )


def _random_lengths(cfg: DictConfig, total: int, seq_len: int, seed: int) -> tuple[int, ...]:
    """Normal lengths of that mean and spread that add up to the total, from the run's seed: multiples of 64, which any
    layout on up to 32 ranks divides, or of less where the mean is less than two of those."""
    mean = whole("seqlens_mean", cfg.seqlens_mean if cfg.seqlens_mean is not None else max(1, seq_len // 8))
    spread = whole("seqlens_std", cfg.seqlens_std if cfg.seqlens_std is not None else max(1, mean // 2), 0)
    _check_sequences(f"seqlens=random seqlens_mean={mean}", total // mean)
    draw = random.Random(seed)
    unit = 64
    while unit > 1 and (total % unit or 2 * unit > mean):
        unit //= 2
    lengths: list[int] = []
    left = total
    while left:
        n = max(unit, round(draw.gauss(mean, spread) / unit) * unit)
        lengths.append(min(n, left))
        left -= lengths[-1]
    return tuple(lengths)


def _device(cfg: DictConfig, gpus: int) -> str:
    return cfg.hardware.name if cfg.hardware.name != "auto" else ("cuda" if gpus else "cpu")


def _world_size(cfg: DictConfig, device: str, gpus: int) -> int:
    value = cfg.world_size
    if value == "auto":
        return max(gpus, 2 if cfg.launch.share_gpu else 1) if device == "cuda" else 2
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfig(f"world_size={shown(value)}: must be auto or a whole number of at least 1")
    whole("world_size", value, most=MOST_RANKS)
    if device == "cuda" and value > gpus * cfg.launch.nodes and not (gpus and cfg.launch.share_gpu):
        others = f"world_size={gpus} or hardware=cpu would work, launch.share_gpu=true would check it without timing it"
        raise UnsupportedHere(
            f"world_size={value}: each rank needs a GPU of its own and this machine has {gpus}; "
            + (others if gpus else "hardware=cpu would work")
        )
    return value


FAULTS = ("raise", "kill", "hang", "oom")


def _check_fault(run: Resolved) -> None:
    cfg, world, fault = run.cfg, run.world, run.cfg.launch.fault
    if fault is None:
        return
    parts = fault.split(":")
    if len(parts) != 3 or not re.fullmatch("[0-9]{1,6}", parts[0]) or int(parts[0]) >= world or parts[2] not in FAULTS:
        raise InvalidConfig(
            f"launch.fault={shown(fault)}: must be RANK:PHASE:{'|'.join(FAULTS)} with a rank below {world}, "
            "for instance 1:timing:raise"
        )
    one_of("launch.fault's phase", parts[1], PHASES)
    checked = (cfg.check.enabled, "check.enabled=true")
    there = {
        "trials": (_tried(cfg), "an option that is best, or attention=auto attention.trials=2"),
        "check_variant": checked,
        "check_reference": checked,
        "check_compare": checked,
        "check_timed": checked,
        "phases": (cfg.phases, "phases=true"),
        "profiler": (cfg.timing.method == "profiler", "timing=profiler"),
        "baseline": (cfg.baseline == "single", "baseline=single"),
    }
    here, way_out = there.get(parts[1], (True, ""))
    if cfg.launch.share_gpu and parts[1] in PHASES_AFTER_CHECK:
        here, way_out = False, "launch.share_gpu=false"
    if not here:
        raise InvalidConfig(f"launch.fault={fault}: this run has no phase {parts[1]}; {way_out} would give it one")


# across groups; what this machine lacks comes last, for a broken rule is one everywhere
RUN_RULES = (_check_variant, _check_layers, _check_graphs, _check_fault, _check_device)


@dataclass(frozen=True)
class Machine:
    """What bounds a run here. None: not known, and no bound."""

    cores: int
    memory: int | None = None  # bytes
    gpus: int = 0
    gpu_memory: int | None = None  # bytes of the largest GPU


def check_fits(spec: Experiment, machine: Machine) -> None:
    """Raises InvalidConfig for more ranks than this machine's cores can serve, or inputs that its memory cannot hold."""
    ranks = -(-spec.world_size // spec.launch["nodes"])  # on this node
    most = RANKS_A_CORE * machine.cores
    if spec.device == "cpu" and ranks > most:
        raise InvalidConfig(
            f"world_size={spec.world_size}: {ranks} ranks on this machine's {machine.cores} cores; it takes at most {most}"
        )
    memory, sharing = machine.memory, ranks
    if spec.device == "cuda":
        memory, sharing = machine.gpu_memory, -(-ranks // max(machine.gpus, 1))
        sharing = ranks if spec.launch["share_gpu"] else sharing
    each = input_bytes(spec)
    if memory is not None and each * sharing > memory:
        work = spec.workload
        keys = ("batch", "seq_len", "heads", "kv_heads", "head_dim")
        sizes = " ".join(f"{key}={getattr(work, key)}" for key in keys)
        where = "a GPU" if spec.device == "cuda" else "this machine"
        raise InvalidConfig(
            f"{sizes}: the inputs take {each / 2**30:,.1f} GiB a rank and {each * sharing / 2**30:,.1f} GiB for the "
            f"{sharing} here, and {where} has {memory / 2**30:,.1f} GiB; give smaller sizes"
        )


def input_bytes(spec: Experiment) -> int:
    """Of a rank's share of q, k, v and, where there is a backward, the output's gradient."""
    work = spec.workload
    whole_here = spec.variant != choice.AUTO and variant(spec.variant).layout.replicated
    world = 1 if whole_here else spec.world_size
    queries = work.queries if work.q_len is not None else -(-work.seq_len // world)
    rows = queries * work.heads * (2 if spec.mode == "forward_backward" else 1)
    rows += 2 * -(-work.seq_len // world) * work.kv_heads
    return work.batch * rows * work.head_dim * ITEMSIZE[work.dtype]
