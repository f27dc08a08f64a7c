"""One run, resolved and checked, with its mask by name and its model. The ranks receive it as a plain dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from attention import masks
from attention.geometry import counts
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.masks.sequences import mask_of, of_sequences
from attention.variants.base import Variant
from attention.variants.registry import AUTO
from runner.config import huggingface
from runner.config.schema import Check, Dtype, Launch
from runner.models import Config, preset
from runner.peers import Package, variant

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # bytes
BEST = "best"  # of an option on the command line: the fastest of its choices
MODULES = ("dilated_multihead",)  # measured with the projections and the LayerNorm around them
NEW_PACKS = 1024  # different packed batches of a run with timing.new_packs; after the last comes the first again

# where a run may be when a fault is provoked, in this order
PHASES = (
    "prepare", "trials", "estimate", "check_variant", "check_reference", "check_compare", "ceilings", "timing", "check_timed",
    "energy", "phases", "profiler", "baseline", "finish",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionCall:
    """The global attention call of a run: sizes, mask and dtype. causal and window hold beside a mask by name."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    causal: bool
    window: tuple[int, int]
    dtype: str
    q_len: int | None = None  # of a decode
    seqlens: tuple[int, ...] | None = None  # of a packed batch, which has batch 1 and seq_len tokens in all
    named_mask: NamedMask | None = None
    v_head_dim: int | None = None  # None: head_dim
    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float | None = None
    sinks: bool = False
    kv_lengths: tuple[int, ...] | None = None  # of a decode, the keys of each batch element; None: seq_len
    prefix: int | None = None  # of a decode, keys before those of every batch element, which all share

    @cached_property
    def mask(self) -> Band | Mask:
        """The band within every sequence, or any other mask over all positions."""
        given = self.named_mask.make() if self.named_mask else None
        return mask_of(Band.of(self.causal, self.window), self.cu_seqlens, given)

    @property
    def whole_mask(self) -> Mask:
        """The mask over all positions."""
        return self.mask if isinstance(self.mask, Mask) else of_sequences(self.mask, self.cu_seqlens)

    @property
    def dense(self) -> AttentionCall:
        """Dense attention over the same tokens as one sequence, causal where no query sees a later key."""
        return replace(self, causal=self._is_causal, window=(-1, -1), seqlens=None, named_mask=None)

    @property
    def _is_causal(self) -> bool:
        if isinstance(self.mask, Mask):
            return self.mask.is_causal(self.seq_len)
        return self.mask.right == 0

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return (0, *accumulate(self.seqlens)) if self.seqlens else (0, self.seq_len)

    @property
    def queries(self) -> int:
        return self.seq_len if self.q_len is None else self.q_len

    @property
    def pairs(self) -> int:
        """(query, key) pairs under the mask, of one batch element with all keys and no prefix."""
        if self.q_len is not None and isinstance(self.mask, Band):
            return self.mask.pairs(self.q_len, self.seq_len)
        if isinstance(self.mask, Mask):
            return self.mask.pairs(self.seq_len)
        return counts.global_pairs(self.cu_seqlens, self.mask)

    @property
    def ends(self) -> tuple[int, ...]:
        """Keys of each batch element, without the prefix."""
        return self.kv_lengths or (self.seq_len,) * self.batch

    def shortened(self, tokens: int) -> AttentionCall:
        """The call on so many tokens; none of a decode's batch elements has more keys."""
        lengths = self.kv_lengths and tuple(min(n, tokens) for n in self.kv_lengths)
        return replace(self, seq_len=tokens, kv_lengths=lengths)

    @property
    def batch_pairs(self) -> int:
        """(query, key) pairs under the mask, of all batch elements."""
        shared = self.batch * self.queries * (self.prefix or 0)
        if self.kv_lengths is None:
            return self.batch * self.pairs + shared
        assert self.q_len is not None and isinstance(self.mask, Band)
        return sum(self.mask.pairs(self.q_len, n) for n in self.kv_lengths) + shared

    @property
    def shapes(self) -> counts.Shapes:
        return counts.Shapes(
            self.batch, self.heads, self.kv_heads, self.head_dim, ITEMSIZE[self.dtype], self.v_head_dim
        )

    @property
    def value_dim(self) -> int:
        """Of a value and of out."""
        return self.v_head_dim or self.head_dim

    @property
    def scale_of_scores(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def describe(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        tokens = f"{self.seq_len:,} tokens"
        if self.q_len is not None:
            tokens = f"{self.q_len} quer{'y' if self.q_len == 1 else 'ies'} on {self.seq_len:,} keys"
        elif self.seqlens:
            tokens += f" in {len(self.seqlens)} sequences"
        parts = [f"{heads} heads of {self.head_dim}", *self.features, self.mask.describe(), self.dtype]
        return f"batch {self.batch}, {tokens}, {', '.join(parts)}"

    @property
    def features(self) -> list[str]:
        """What the call has beyond plain attention, in words."""
        found = [f"values of {self.v_head_dim}"] if self.value_dim != self.head_dim else []
        found += [f"{key} {value:.4g}" for key in ("scale", "softcap") if (value := getattr(self, key)) is not None]
        found += ["sinks"] if self.sinks else []
        if self.kv_lengths:
            found.append(f"{min(self.kv_lengths):,} to {max(self.kv_lengths):,} keys")
        return found + ([f"a shared prefix of {self.prefix:,}"] if self.prefix else [])


@dataclass(frozen=True)
class Dilation:
    """What dilated attention computes, where a variant does: segment lengths with their rates, and how they are mixed."""

    pairs: tuple[tuple[int, int], ...]
    mixing: str
    weights: str

    @property
    def divisor(self) -> int:
        """By what the result is divided."""
        return len(self.pairs) if self.mixing == "head_groups" else 1

    def pairs_of(self, head: int, heads: int) -> list[tuple[int, int, int]]:
        """(segment, rate, offset) of each pair that a head computes. Of head groups the first `heads % n` have one head more."""
        n = len(self.pairs)
        if self.mixing == "longnet":
            return [(segment, rate, head % rate) for segment, rate in self.pairs]
        each, more = divmod(heads, n)
        i = head // (each + 1) if head < more * (each + 1) else more + (head - more * (each + 1)) // each
        segment, rate = self.pairs[i]
        return [(segment, rate, i % rate)]


@dataclass(frozen=True)
class Timing:
    """`schema.TimingConf` with the defaults of the hardware."""

    method: str
    warmup_runs: int
    warmup_ms: float
    settle_ms: float
    timing_runs: int
    layers: int
    new_packs: bool
    flush_l2: bool
    autograd_thread: bool
    counters: bool
    precision: float
    time_cap_s: float
    profile_runs: int
    phase_runs: int | None = None  # those of 0.2 s, at most 15


@dataclass(frozen=True)
class Experiment:
    variant: str
    options: dict[str, Any]
    workload: AttentionCall
    world_size: int
    device: str
    kernel: str
    transport: str
    dtype: Dtype
    timing: Timing
    check: Check
    launch: Launch
    seed: int
    mode: str
    baseline: str
    phases: bool
    deterministic: bool
    replay: str
    model: Model | None = None  # None: attention alone
    agreement: bool = True
    energy: bool = False
    nvtx: bool = False

    @property
    def chosen(self) -> Variant[Any] | None:
        """The variant; None for attention=auto."""
        return None if self.variant == AUTO else variant(self.variant)

    @property
    def is_peer(self) -> bool:
        """Whether an external package does the call, with an exchange of its own."""
        return isinstance(self.chosen, Package)

    @property
    def dilation(self) -> Dilation | None:
        """What a variant of dilated attention computes; None for attention under the call's mask."""
        if self.chosen is None or not self.chosen.mixes:
            return None
        options: Any = self.chosen.parse(self.options)
        return Dilation(options.pairs(self.workload.seq_len), options.mixing, options.weights)

    @property
    def is_module(self) -> bool:
        """Whether a whole module is measured: attention with its projections and LayerNorm."""
        return self.variant in MODULES

    @property
    def parameter_ranks(self) -> int:
        """Ranks that a model's parameters are sharded over."""
        return self.world_size if self.model is not None and self.model.sharded else 1

    @property
    def sharing(self) -> int:
        """The ranks that share the work: one where each does all of it."""
        return 1 if self.chosen is not None and self.chosen.layout.replicated else self.world_size

    @property
    def head_pairs(self) -> int:
        """(query, key) pairs of all heads and batch elements; of dilated attention as often as pairs of segment and rate have them."""
        call = self.workload
        if self.chosen is None or not self.chosen.mixes:
            return call.heads * call.batch_pairs
        return call.batch * counts.head_pairs(self.problem, call.heads, call.kv_heads)

    @property
    def problem(self) -> Problem:
        """What the variant divides among the ranks; of a model its first layer's."""
        assert self.chosen is not None, "attention=auto"
        call = self.workload
        return self.chosen.problem(call.cu_seqlens, self.world_size, call.mask, self.call_options, call.q_len)

    @property
    def backward(self) -> bool:
        return self.mode in ("forward_backward", "training")

    @property
    def dense(self) -> Experiment:
        """Dense attention over the same tokens, of a model in each layer of the decoder."""
        model = self.model and replace(self.model, own_masks=False)
        return replace(self, workload=self.workload.dense, model=model)

    @property
    def call_options(self) -> dict[str, Any]:
        """All options. Some come from the call: the mask that a layout is made for, and the number of tokens. With new packs this mask
        holds the masks of all batches."""
        call = self.workload.dense if self.timing.new_packs else self.workload
        of_call = {"mask": call.whole_mask, "tokens": call.seq_len}
        names = self.chosen.options.from_call if self.chosen else ()
        return self.options | {name: of_call[name] for name in names}

    @property
    def best_options(self) -> list[str]:
        """The options whose fastest value is found by trials."""
        return [name for name, value in self.options.items() if value == BEST]

    @property
    def graphs(self) -> bool | str:
        """Whether forward and backward are replayed from CUDA graphs; "auto": attention=auto decides."""
        return "auto" if self.replay == "auto" else self.replay == "graphs"

    def plain(self) -> dict[str, Any]:
        """As a result records it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self) | {"graphs": self.graphs}))
        return plain

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Experiment:
        """Of what `plain` returned."""
        call: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in plain["workload"].items()}
        if call.get("named_mask"):
            call["named_mask"] = NamedMask(**call["named_mask"])
        values = {key: x for key, x in plain.items() if key not in ("graphs", "model")} | {"workload": call}
        if isinstance(plain.get("model"), dict):
            values["model"] = Model(**plain["model"])
        kinds = {"workload": AttentionCall, "dtype": Dtype, "timing": Timing, "check": Check, "launch": Launch}
        return Experiment(**values | {key: kind(**values[key]) for key, kind in kinds.items()})


NONE = "none"  # no mask by name: `causal` and `window` say what a query sees; no model: attention alone


@dataclass(frozen=True)
class NamedMask:
    """A name of `attention.masks` and its parameters, which are JSON."""

    name: str
    parameters: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, json.dumps(self.parameters, sort_keys=True)))

    def make(self) -> Mask:
        """Raises ValueError for an unknown name or a bad parameter."""
        return masks.make(self.name, **self.parameters)


def named(name: str, parameters: dict[str, Any], tokens: int, lengths: Sequence[int] | None) -> NamedMask:
    """The mask with its open parameters (null) filled in for a sequence of so many tokens, in their order. lengths: of the
    sequences of a packed batch."""
    values, half = dict(parameters), tokens // 2

    def share(divisor: int, most: int = tokens) -> int:
        return min(max(1, tokens // divisor), most)

    def whole(key: str) -> list[int] | None:
        """The numbers of an earlier parameter; None for others, which are refused when the mask is made."""
        numbers = values.get(key)
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return numbers if all(isinstance(n, int) for n in numbers) else None

    def quarters(n: int) -> list[int]:
        return [(i + 1) * n // 4 - i * n // 4 for i in range(4)]

    dca = name == "dca"
    open_values: dict[str, Callable[[], Any]] = {
        "left": lambda: share(8),
        "chunk": lambda: share(4),
        "prefix": lambda: share(4),
        "lengths": lambda: list(lengths) if lengths else split(tokens),
        "prefixes": lambda: [n // 4 for n in whole("lengths") or []],
        "prompt": lambda: tokens - sum(whole("answers") or [tokens - half]),
        "answers": lambda: quarters(tokens - sum(whole("prompt") or [tokens])),
        "parts": lambda: [[[a, b], [a, b], [-1, -1]] for a, b in ((0, half), (half, tokens))],
        "window": lambda: share(4, 2048) if dca else share(8),
        "global_tokens": lambda: share(64, 128) if dca else share(64),
    }
    if dca:
        open_values["random"] = lambda: share(16, 512)
    for key in [key for key, value in parameters.items() if value is None and key in open_values]:
        values[key] = open_values[key]()
    return NamedMask(name, values)


def split(tokens: int) -> list[int]:
    """The lengths S/8, S/4, S/2 and the rest."""
    first = [tokens // 8, tokens // 4, tokens // 2]
    return [*first, tokens - sum(first)]


HF = "hf"  # any causal LM of transformers


@dataclass(frozen=True)
class Model:
    """A preset, with sizes of its own where they are not None, and heads, sinks, softcap and scale of the run's call. own_masks: every layer has the preset's mask; else the
    decoder's layers have the call's. steps: the fewest of a training run."""

    name: str
    own_masks: bool
    recompute: bool
    steps: int
    learning_rate: float
    layers: int | None = None
    hidden: int | None = None
    mlp: int | None = None
    vocabulary: int | None = None
    huggingface: str | None = None  # of model=hf: what `huggingface.loaded` returned
    sharded: bool = False  # parameters, gradients and optimizer states, over all ranks
    offload: bool = False  # to the host's memory what a forward keeps for the backward

    @property
    def sizes(self) -> Config:
        """Of the preset or of transformers' configuration, before those of the call."""
        return preset(self.name) if self.huggingface is None else huggingface.config_of(self.huggingface)

    def config(self, call: AttentionCall) -> Config:
        """The sizes, with the call's heads. Raises ValueError for sizes that do not fit together."""
        sizes = {key: getattr(self, key) for key in ("layers", "hidden", "mlp", "vocabulary")}
        sizes = {} if self.huggingface else sizes  # has them already
        heads = {key: getattr(call, key) for key in ("heads", "kv_heads", "head_dim", "v_head_dim")}
        if self.sizes.latent:
            heads.pop("kv_heads")
        found = replace(self.sizes, **{key: x for key, x in sizes.items() if x is not None}, **heads)
        found = found if self.own_masks else found.under(call.whole_mask)
        how: dict[str, Any] = {"sinks": call.sinks, "softcap": call.softcap, "scale": call.scale}
        return replace(found, kinds=tuple(replace(kind, **how) for kind in found.kinds))
