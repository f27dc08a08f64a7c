"""Every variant by its name: a layout, a schedule and the exchange that brings keys to queries. Pure Python, so that the
command line can list and check variants without torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, Literal

from attention.geometry import layouts, schedules
from attention.geometry.layouts import CuSeqlens, Layout
from attention.geometry.schedules import MANY_SEQUENCES, Problem, StepsOf
from attention.masks.band import Mask

Exchange = Literal["ring", "gather", "all_to_all", "tree", "peer"]  # peer: a package's own, see attention/external
GROUPINGS = ("separate", "packed", "fused")
REDUCTIONS = ("three", "two", "packed", "fused", "hierarchical")
RINGS = ("zigzag", "contiguous")
BEST = "best"  # of an option on the command line: the fastest of its choices
ROTATES = ("allgather", "alltoall")
CP_COMM_TYPES = ("p2p", "all_gather")
LISTED = {  # options by name, and their values
    "grouping": GROUPINGS,
    "reduce": REDUCTIONS,
    "ring": RINGS,
    "rotate": ROTATES,
    "cp_comm_type": CP_COMM_TYPES,
}


@dataclass(frozen=True)
class Variant:
    """`source` names the authors or the system and the year, `use` says in a clause when to take it; both stand in the
    first comment of the variant's YAML, too. `layout` is how a rank's q, k and v come in and its out goes back; `q_layout`,
    where given, is how the queries lie while they are computed on."""

    name: str
    summary: str
    source: str
    use: str
    layout: Layout
    schedule: StepsOf
    exchange: Exchange
    q_layout: Layout | None = None
    causal_only: bool = False
    windows: bool = True
    packs: bool = True  # takes packs
    packed: bool = False  # made for packs: a benchmark of it is one
    decode: bool = False  # few replicated queries against sharded keys; forward only, never causal
    options: Mapping[str, Any] = field(default_factory=dict)

    def ulysses(self, world: int, options: Mapping[str, Any]) -> int:
        """Ranks among which heads are exchanged for sequence. Raises ValueError unless they divide the world."""
        if self.exchange != "all_to_all" and "ulysses_size" not in self.options:
            return 1
        wanted = options.get("ulysses_size", world if self.name == "ulysses" else None)
        able = divisors(world)
        if wanted is None:  # as near to a square as it goes, the larger half within the groups
            return next(n for n in able if n * n >= world)
        if wanted not in able:
            raise ValueError(f"ulysses_size={wanted}: must divide world_size={world}; it may be {able}")
        return wanted

    def border(self, world: int, options: Mapping[str, Any]) -> Layout:
        """The layout in which a rank's tensors come in and go back."""
        outer = self._outer(options)
        inner = self.ulysses(world, options)
        return replace(outer, inner=inner) if inner > 1 else outer

    def _outer(self, options: Mapping[str, Any]) -> Layout:
        return layouts.CONTIGUOUS if options.get("ring") == "contiguous" else self.layout

    def steps(self, options: Mapping[str, Any], cu_seqlens: CuSeqlens, world: int, mask: Mask) -> StepsOf:
        """The schedule, which an option may choose."""
        if world > 1 and own_first(options, cu_seqlens, mask):
            return schedules.own_first
        if self.schedule is schedules.gather and by_owner(self.layout, options, cu_seqlens, mask):
            return schedules.gather_by_owner
        return schedules.ring if options.get("ring") == "contiguous" else self.schedule

    def problem(
        self,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Mask,
        options: Mapping[str, Any] | None = None,
        q_tokens: int | None = None,
    ) -> Problem:
        """Raises ValueError when the variant cannot do this mask or these lengths in this world."""
        options = {**self.options, **(options or {})}
        self._check_mask(mask, options)
        if len(cu_seqlens) > 2 and not self.packs:
            raise ValueError(
                f"a pack of {len(cu_seqlens) - 1} sequences: {self.name} takes batches of single sequences; use "
                "seqlens=null, or rfa_llama3, llama3 and zigzag_varlen, which take packs"
            )
        outer, ulysses = self._outer(options), self.ulysses(world, options)
        q_layout = outer
        if self.name == "grouped":
            q_layout = _grouped_layout(options, cu_seqlens, world)
        elif self.decode:
            q_layout = layouts.REPLICATED
        elif self.q_layout and mask.causal:
            q_layout = self.q_layout
        border = self.border(world, options)
        # the strictest speaks first; of groups the border, whose rule holds the computed layout's
        for layout in [border] if ulysses > 1 else sorted({border, q_layout}, key=lambda x: -x.chunks):
            layout.check(cu_seqlens, world)
        return Problem(
            cu_seqlens,
            world // ulysses,
            mask,
            outer,
            q_layout,
            self.steps(options, cu_seqlens, world, mask),
            q_tokens if self.decode else None,
            ulysses,
        )

    def _check_mask(self, mask: Mask, options: Mapping[str, Any]) -> None:
        if self.decode:
            if not mask.full:
                given = "causal=true" if mask.causal else f"window=({mask.left}, {mask.right})"
                raise ValueError(
                    f"{given}: {self.name} is a decode, whose queries see all keys; use causal=false without a window"
                )
            return
        zigzag = options.get("ring") == "zigzag"
        if (self.causal_only or zigzag) and mask.right != 0:
            others = "usp with ring=contiguous" if zigzag else "ring, ring_allgather, llama3 and ulysses"
            raise ValueError(
                f"causal=false: {self.name} balances the causal mask and is defined for causal=true only; not causal use "
                f"{others}"
            )
        if mask.windowed and (zigzag or not self.windows):
            others = (
                "ring=contiguous has one" if zigzag else "ring, ring_allgather, llama3, zigzag_llama3 and ulysses do"
            )
            raise ValueError(f"window=({mask.left}, {mask.right}): {self.name} has no sliding window; {others}")
        if mask.windowed and options.get("grouping") == "fused":
            raise ValueError(
                f"window=({mask.left}, {mask.right}): {self.name} with grouping=fused computes on prefixes of the keys; "
                "grouping=separate and packed take windows"
            )
        if mask.windowed and options.get("own_first"):
            raise ValueError(
                f"window=({mask.left}, {mask.right}): {self.name} with own_first=true has no sliding window; own_first=null "
                "has one"
            )

    def settled(self, options: Mapping[str, Any], writable: bool) -> dict[str, Any]:
        """The options with the reduction that null stands for: fused where the ranks can write into each other's GPU memory,
        else packed."""
        if "reduce" not in options or options["reduce"] is not None:
            return dict(options)
        return {**options, "reduce": "fused" if writable else "packed"}

    def choices(self, option: str, kv_heads: int, world: int) -> list[Any]:
        """The values of an option among which "best" decides. Raises ValueError for an option that has no list of them."""
        if option in self.options:
            if option in ("ulysses_size", "node_size"):
                return divisors(world)
            if option in ("heads_k_stride", "head_parts"):
                return divisors(kv_heads)
            if option in LISTED:
                return list(LISTED[option])
            if option == "own_first":
                return [True, False]
        able = [name for name in self.options if name != "n_groups"]
        raise ValueError(
            f"{option}={BEST}: {self.name} has no list of its values; best may be {', '.join(able) or 'none'}"
        )

    def settings(
        self,
        options: Mapping[str, Any],
        heads: int,
        kv_heads: int,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Mask,
        q_tokens: int | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The options with each combination of choices in place of "best" that this variant can do, and of the others, by
        `setting_label`, why not. Raises ValueError where none can be done."""
        open_ = [name for name, value in options.items() if value == BEST]
        able: list[dict[str, Any]] = []
        left_out: dict[str, str] = {}
        for values in product(*(self.choices(name, kv_heads, world) for name in open_)):
            setting = {**options, **dict(zip(open_, values, strict=True))}
            try:
                self.problem(cu_seqlens, world, mask, setting, q_tokens)
                self.check_options(setting, heads, kv_heads, world)
                able.append(setting)
            except ValueError as error:
                left_out[setting_label(setting, open_)] = str(error)
        if not able:
            raise ValueError(next(iter(left_out.values())))
        return able, left_out

    def check_options(self, options: Mapping[str, Any], heads: int, kv_heads: int, world: int) -> None:
        """Raises ValueError for an option's value that does not go with these heads in this world."""
        if "heads_k_stride" in options:
            check_stride(options["heads_k_stride"], kv_heads)
        for name, known in LISTED.items():
            open_to = (None, *known) if name == "reduce" else known
            if name in options and options[name] not in open_to:
                raise ValueError(f"{name}={options[name]}: {nearest(str(options[name]), known)}")
        if options.get("own_first") not in (None, True, False):
            raise ValueError(f"own_first={options['own_first']}: must be true, false or null")
        if options.get("own_first") and options["grouping"] != "separate":
            raise ValueError(
                f"own_first=true: what is left of the chunks is not grouped; use grouping=separate, not {options['grouping']}"
            )
        if "node_size" in options:
            node_size(world, options)
        ulysses = self.ulysses(world, options)
        if options.get("head_parts") is not None:
            check_parts(options["head_parts"], kv_heads, ulysses)
        repeats = self.exchange != "peer"  # KV heads, where there are fewer than ranks

        def shared(n: int) -> bool:
            return heads % n == 0 and (kv_heads % n == 0 or (repeats and n % kv_heads == 0))

        if not shared(ulysses):
            fits = [n for n in divisors(world) if shared(n)]
            raise ValueError(
                f"heads={heads}, kv_heads={kv_heads}: {self.name} gives each of {ulysses} ranks the same number of heads; "
                f"{'usp' if repeats else self.name} with ulysses_size {' or '.join(map(str, fits))} would work"
            )


VARIANTS: dict[str, Variant] = {}


def _register(variant: Variant) -> None:
    VARIANTS[variant.name] = variant


_register(
    Variant(
        "dense",
        "the whole attention on every rank, nothing sharded",
        "FlashAttention (Dao et al., 2022), or the kernel's own",
        "a comparison with what one device does by the same kernel",
        layouts.REPLICATED,
        schedules.local,
        "ring",
    )
)
_register(
    Variant(
        "ring",
        "contiguous shards; keys and values go round, partial results are merged",
        "Ring Attention with Blockwise Transformers for Near-Infinite Context (Liu et al., 2023)",
        "masks that are not causal, and windows, which only neighbours send keys for; causal it is imbalanced",
        layouts.CONTIGUOUS,
        schedules.ring,
        "ring",
        options={"head_parts": None},
    )
)
_register(
    replace(
        VARIANTS["ring"],
        name="ring_varlen",
        summary="ring on packs: every sequence of the pack is cut into contiguous shards",
        source="Ring Attention (Liu et al., 2023), by sequence as in ring-flash-attention (Zhu, 2024)",
        use="packs of many short sequences, each a multiple of W; long causal ones are imbalanced",
        packed=True,
    )
)
_register(
    Variant(
        "zigzag",
        "ring over chunks r and 2W-1-r of 2W, so that every rank has the same causal work",
        "ring-flash-attention's zigzag ring (Zhu, 2024); its chunks are Llama 3's, too (Llama Team, 2024)",
        "causal sequences where memory is short: two KV shards at a time, never the whole KV",
        layouts.ZIGZAG,
        schedules.zigzag,
        "ring",
        causal_only=True,
        windows=False,
        options={"head_parts": None},
    )
)
_register(
    replace(
        VARIANTS["zigzag"],
        name="zigzag_varlen",
        summary="zigzag on packs: every sequence of the pack is cut into 2W chunks",
        source="ring-flash-attention's zigzag ring on packs (Zhu, 2024)",
        use="causal packs of long sequences, each a multiple of 2W, where memory is short",
        packed=True,
    )
)
_register(
    Variant(
        "stripe",
        "ring over tokens t with t mod W = r: balanced to within a token, every step nearly causal",
        "Striped Attention: Faster Ring Attention for Causal Transformers (Brandon et al., 2023)",
        "causal sequences that lie striped already; zigzag was faster where both were measured",
        layouts.STRIPE,
        schedules.stripe,
        "ring",
        causal_only=True,
        windows=False,
        options={"head_parts": None},
    )
)
_register(
    Variant(
        "ring_allgather",
        "contiguous shards whose second query halves are swapped to balance; all keys gathered, no merges",
        "nnScaler's ring attention (nnScaler: Lin et al., 2024), which gathers as Llama 3 does (Llama Team, 2024)",
        "causal masks and windows on tokens that stay contiguous, given room for the KV of the heads in flight",
        layouts.CONTIGUOUS,
        schedules.gather,
        "gather",
        q_layout=layouts.PAIRED,
        options={"heads_k_stride": None},
    )
)
_register(
    Variant(
        "llama3",
        "an equal slice of the packed stream on each rank, across sequence borders; keys gathered, one call",
        "The Llama 3 Herd of Models, section 3.3.2 (Llama Team, 2024); packs as in ring-flash-attention (Zhu, 2024)",
        "packs of any lengths whose total W divides, given room for the KV of the heads in flight; long causal sequences are "
        "imbalanced",
        layouts.PACKED,
        schedules.gather,
        "gather",
        packed=True,
        options={"heads_k_stride": None},
    )
)
_register(
    Variant(
        "zigzag_llama3",
        "zigzag chunks, keys gathered, a call a chunk; a single sequence without a window begins by default with its own "
        "keys: two steps and a merge instead",
        "petrpan26/ring-flash-attention, a fork of Zhu's (2025): zigzag chunks gathered as in Llama 3",
        "causal sequences and windows with any number of heads, given room for the KV of the heads in flight",
        layouts.ZIGZAG,
        schedules.gather,
        "gather",
        causal_only=True,
        options={"heads_k_stride": None, "grouping": "separate", "own_first": None},
    )
)
_register(
    Variant(
        "grouped",
        "causal attention on one rank, its queries in n_groups chunks that attend nested prefixes of the keys",
        "what zigzag_llama3 (petrpan26/ring-flash-attention, 2025) computes on a rank, for 1 to 8 chunks",
        "the groupings measured against each other on one GPU",
        layouts.REPLICATED,
        schedules.gather,
        "gather",
        causal_only=True,
        windows=False,
        options={"n_groups": 2, "grouping": "separate", "heads_k_stride": None},
    )
)
_register(
    Variant(
        "ulysses",
        "heads exchanged for sequence before and after a local call over the whole sequence",
        "DeepSpeed Ulysses (Jacobs et al., 2023)",
        "heads that W divides: the fastest causal step measured on 4 GPUs; forward it receives less than a gather if "
        "W > 1 + H / Hk",
        layouts.CONTIGUOUS,
        schedules.local,
        "all_to_all",
        options={"head_parts": None},
    )
)
_register(
    Variant(
        "usp",
        "Ulysses within groups of ulysses_size ranks, a ring across the groups",
        "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI (Fang and Zhao, 2024)",
        "more ranks than the heads can be shared among: heads within a group, a ring for the rest",
        layouts.ZIGZAG,
        schedules.zigzag,
        "all_to_all",
        options={"ulysses_size": None, "ring": "zigzag", "head_parts": None},
    )
)
_register(
    Variant(
        "tree",
        "decode: each rank attends its shard of the keys, the partial results are reduced over the ranks",
        "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU Clusters (Shyam et al., 2024)",
        "decoding over more keys than one GPU holds, or about a million, where reduce=fused and packed beat one GPU",
        layouts.DECODE,
        schedules.tree,
        "tree",
        windows=False,
        decode=True,
        options={"reduce": None, "node_size": None},
    )
)
_register(
    Variant(
        "ring_decode",
        "decode: every rank's keys go round and each rank computes everything",
        "Ring Attention (Liu et al., 2023), as Tree Attention compares with it (Shyam et al., 2024)",
        "a comparison with tree, which was faster on 2 and 4 GPUs",
        layouts.DECODE,
        schedules.ring_decode,
        "ring",
        windows=False,
        decode=True,
    )
)


def _grouped_layout(options: Mapping[str, Any], cu_seqlens: CuSeqlens, world: int) -> Layout:
    n = options["n_groups"]
    if not isinstance(n, int) or not 1 <= n <= 8:
        raise ValueError(f"n_groups={n}: must be 1 to 8")
    if world > 1:
        raise ValueError(f"world_size={world}: grouped is one rank's share of a gathered attention; use world_size=1")
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    if any(length % n for length in lengths):
        near = max(n, round(lengths[0] / n) * n)
        raise ValueError(f"seq_len={lengths[0]}: must be a multiple of n_groups={n}; {near} would work")
    return layouts.chunked(n)


def setting_label(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return " ".join(f"{name}={options[name]}" for name in names)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest ones, else all. Of `a` and `a.b` the hint gives `a` alone."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close = [one for one in close if one.rpartition(".")[0] not in close]
    if not close:
        return f"known are {', '.join(known)}"
    *others, last = close
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def divisors(n: int) -> list[int]:
    """Of a whole number of at least 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def everything() -> dict[str, Variant]:
    """Our variants and, after them, the peers that they are compared with."""
    from attention.external import PEERS  # which are made of variants

    return VARIANTS | {name: peer.variant for name, peer in PEERS.items()}


def variant(name: str) -> Variant:
    """One of ours or a peer. Raises ValueError for an unknown name, with the nearest ones."""
    known = everything()
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]


def own_first(options: Mapping[str, Any], cu_seqlens: CuSeqlens, mask: Mask) -> bool:
    """Whether a gather begins with the rank's own keys. None: of single sequences, which are two merges then."""
    wanted = options.get("own_first", False)
    if wanted is None:
        single = len(cu_seqlens) == 2 and not mask.windowed
        return single and options["heads_k_stride"] is None and options["grouping"] == "separate"
    return bool(wanted)


def by_owner(layout: Layout, options: Mapping[str, Any], cu_seqlens: CuSeqlens, mask: Mask) -> bool:
    """Whether gathered keys lie by owner: of a pack of many sequences, of which a shard has several chunks each."""
    many = layout.per_sequence and layout.chunks > 1 and len(cu_seqlens) - 1 > MANY_SEQUENCES
    return many and not mask.windowed and options.get("grouping") != "fused"


def node_size(world: int, options: Mapping[str, Any]) -> int:
    """Ranks of a node for the hierarchical reduction: the option, else the largest divisor of the world up to 8, but
    never the whole world where it divides. Raises ValueError when it doesn't divide."""
    wanted = options.get("node_size")
    able = divisors(world)
    if wanted is None:
        return max((n for n in able if n <= 8 and n < world), default=1)
    if wanted not in able:
        raise ValueError(f"node_size={wanted}: must divide world_size={world}; it may be {able}")
    return wanted


def check_stride(stride: int | None, kv_heads: int) -> int:
    """The KV heads that a gather brings at a time, all for None. Raises ValueError when they don't divide."""
    if stride is None:
        return kv_heads
    if not isinstance(stride, int) or isinstance(stride, bool) or stride < 1 or kv_heads % stride:
        raise ValueError(f"heads_k_stride={stride}: must divide kv_heads={kv_heads}; it may be {divisors(kv_heads)}")
    return stride


def check_parts(parts: int, kv_heads: int, ulysses: int) -> None:
    """Raises ValueError unless each rank's KV heads can be computed in so many parts."""
    each = max(1, kv_heads // ulysses)
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1 or each % parts:
        raise ValueError(f"head_parts={parts}: must divide a rank's {each} KV heads; it may be {divisors(each)}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every KV head serves the same number of query heads."""
    if heads < 1 or kv_heads < 1:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: both must be at least 1; for instance heads=32 kv_heads=8"
        )
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple of kv_heads; kv_heads may be {divisors(heads)}"
        )
