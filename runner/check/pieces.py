"""The pieces of the reference: one KV head of one batch element each, computed by one rank or shared by several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.geometry import counts
from runner.check import dilated
from runner.check.errors import Error
from runner.check.reference import Reference, Seen, attend
from runner.config.experiment import AttentionCall, Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import global_input, global_prefix, global_sinks

SHARED_ROWS = 128  # ranks share a piece if each gets so many queries
SCORES = 1 << 21  # held at once by a reference on a CPU, whose caches hold them
MOST_SCORES = 1 << 29  # and on a GPU
FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # reference work up to which fp64 is affordable
HALF = ("bf16", "fp16")  # fp32 is precise enough for their errors: fp64 up to a tenth of that work

# in CPU memory, since a GPU's memory is measured; by workload and piece, the newest last. The variants of a sweep share them
_kept: dict[Any, Reference] = {}


@dataclass(frozen=True)
class HeadPiece:
    """One KV head of one batch element, with its query heads."""

    batch: int
    head: int
    number: int
    rows: slice  # the tokens that this rank compares: all but where ranks share the piece

    def of(self, whole: Tensor, heads: int) -> Tensor:
        """A view of this rank's tokens of the piece, `[tokens, heads, D]`, of a whole `[B, S, H, D]` or packed `[T, H, D]`."""
        element = whole if whole.dim() == 3 else whole[self.batch]
        return element[self.rows, self.head * heads : (self.head + 1) * heads]

    def add(self, error: Error, x: Tensor, reference: Reference, name: str, rtol: float) -> None:
        """Adds the error of `x`, `[tokens, heads, D]` of this rank's tokens, against its reference."""
        x, value = without_keys(x, reference.values[name])
        tokens = torch.arange(self.rows.start, self.rows.stop)
        error.add(x, value, reference.scales(name), rtol, self.batch, tokens, self.head * x.shape[1])


def without_keys(x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """x and expected, with 0 where both are -inf: the LSE of a row without keys."""
    both = (x == -torch.inf) & (expected == -torch.inf)
    return x.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)


def keep(key: Any, reference: Reference, most: int) -> None:
    """Keeps a reference for `kept`, and drops the oldest until all take at most `most` bytes."""
    _kept[key] = reference
    while sum(reference.nbytes for reference in _kept.values()) > most:
        del _kept[next(iter(_kept))]


def kept(key: Any) -> Reference | None:
    """The reference kept under `key`; it is kept no longer."""
    return _kept.pop(key, None)


def tflop(experiment: Experiment) -> float:
    """TFLOP of the whole reference."""
    shapes = replace(experiment.workload.shapes, batch=1, heads=1)
    passes = (counts.forward_flops, counts.backward_flops) if experiment.backward else (counts.forward_flops,)
    return sum(flops(shapes, experiment.head_pairs) for flops in passes) / 1e12


def precision(experiment: Experiment, reference_tflop: float) -> torch.dtype:
    """fp64 or, where that would take too long, fp32: in what a reference of so much work is computed."""
    affordable = FP64_TFLOP[experiment.device] / (10 if experiment.workload.dtype in HALF else 1)
    return torch.float64 if reference_tflop <= affordable else torch.float32


def pieces_of(experiment: Experiment, world: int, rank: int, limit_tflop: float) -> tuple[list[HeadPiece], float, int]:
    """(this rank's pieces, the share of all pieces that is checked, the number of pieces that ranks share: all or
    none). With fewer pieces than ranks, several ranks share a piece: each takes some of its queries."""
    work = experiment.workload
    groups = [[place] for place in product(range(work.batch), range(work.kv_heads))]
    if work.sinks:  # whose gradients are sums over the batch
        groups = [[(b, h) for b in range(work.batch)] for h in range(work.kv_heads)]
    number = max(1, int(min(len(groups), limit_tflop * len(groups) / tflop(experiment))))
    # evenly over batch and heads
    chosen = [place for i in range(number) for place in groups[i * len(groups) // number]]
    share, sharers = number / len(groups), world // len(chosen)
    is_whole = work.seqlens is not None or experiment.dilation is not None
    if sharers < 2 or is_whole or work.queries < sharers * SHARED_ROWS:
        rows = slice(0, work.queries)
        return [HeadPiece(*place, i, rows) for i, place in enumerate(chosen) if i % world == rank], share, 0
    number, which = divmod(rank, sharers)
    if number >= len(chosen):
        return [], share, len(chosen)
    # equal work: of n causal rows the first x n see x^2 of the pairs
    start, stop = (round(work.queries * (i / sharers) ** (0.5 if work.causal else 1.0)) for i in (which, which + 1))
    return [HeadPiece(*chosen[number], number, slice(start, stop))], share, len(chosen)


def piece_inputs(experiment: Experiment, piece: HeadPiece, device: torch.device) -> dict[str, Tensor]:
    """The inputs of a piece: q `[S, G, D]`, dout `[S, G, Dv]`, k `[S, 1, D]`, v `[S, 1, Dv]` and, where the call has them, sinks
    `[G]`. Of a decode k and v are the keys of the batch element, those of the prefix first."""
    spec = experiment.workload
    prefix = dict(zip(("k", "v"), global_prefix(experiment, device) or (), strict=False))
    inputs: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "dout") if experiment.backward else ("q", "k", "v"):
        x = global_input(experiment, name, device, piece.batch)
        x = (x if x.dim() == 3 else x[0]).unflatten(1, (spec.kv_heads, -1))[:, piece.head]
        if name in ("k", "v"):
            x = x[: spec.ends[piece.batch]]
        inputs[name] = torch.cat([prefix[name][0][:, [piece.head]], x]) if name in prefix else x.contiguous()
    if (sinks := global_sinks(spec, experiment.seed, device)) is not None:
        inputs["sinks"] = sinks.view(spec.kv_heads, -1)[piece.head]
    return inputs


def reference(inputs: dict[str, Tensor], piece: HeadPiece, experiment: Experiment, dtype: torch.dtype) -> Reference:
    """The reference of a piece's inputs, of this rank's queries."""
    spec, dilation = experiment.workload, experiment.dilation
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    scores = scores_held(experiment, q.device, dtype)
    if dilation is not None:
        return dilated.reference(inputs, piece.head * q.shape[1], spec, dilation, dtype, scores)
    seen, dout, sinks = seen_by(spec, piece.batch), inputs.get("dout"), inputs.get("sinks")
    return attend(q, k, v, dout, seen, spec.scale_of_scores, dtype, scores, piece.rows, spec.softcap, sinks)


def seen_by(spec: AttentionCall, batch: int = 0) -> Seen:
    """What each query of a batch element sees: causal, window and sequences from their definitions, a mask by name from its
    rectangles. The keys of a decode's prefix come first, and every query sees them all."""
    keys = spec.seqlens or (spec.ends[batch],)
    queries = keys if spec.q_len is None else (spec.q_len,)
    seen = Seen.band(queries, keys, spec.causal, spec.window)
    if spec.prefix:
        return Seen(seen.first, seen.end + spec.prefix, seen.keys + spec.prefix)
    if spec.named_mask is None:
        return seen
    # not from the library's cache
    return replace(seen, rectangles=torch.tensor(spec.named_mask.make().build(spec.seq_len)))


def share_reference(
    me: Rank, experiment: Experiment, piece: HeadPiece | None, pieces: int, dtype: torch.dtype
) -> Reference | None:
    """The reference of this rank's part of its piece, where ranks share `pieces` pieces: each rank does its queries; dk and dv are
    summed over the ranks, and each keeps its tokens. Collective."""
    spec = experiment.workload
    mine = None if piece is None else reference(piece_inputs(experiment, piece, me.device), piece, experiment, dtype)
    sums = {"dk": spec.head_dim, "dv": spec.value_dim, "dk2": 1, "dv2": 1} if experiment.backward else {}
    for number, (name, dim) in product(range(pieces), sums.items()):
        if piece and mine and piece.number == number:
            dist.all_reduce(mine.values[name])
            mine.values[name] = mine.values[name][piece.rows].clone()
        else:
            dist.all_reduce(torch.zeros((spec.seq_len, 1, dim), dtype=dtype, device=me.device))
    return mine


def scores_held(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> int:
    """How many scores a reference holds at once: on a GPU as many as fit a quarter of the free memory with at most eight
    temporaries; few under a memory limit."""
    if device.type != "cuda" or experiment.launch.memory_limit_gb is not None:
        return SCORES
    free = torch.cuda.mem_get_info(device)[0]
    return max(SCORES, min(MOST_SCORES, free // (4 * 8 * dtype.itemsize)))
