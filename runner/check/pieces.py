"""The pieces of the reference: one KV head of one batch element each, computed by one rank or shared by several."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.geometry import counts
from runner.check import dilated
from runner.check.errors import Error
from runner.check.reference import Reference, Rows, Seen, SeenRectangles, attend
from runner.config.experiment import AttentionCall, Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import global_input, global_prefix, global_sinks

SHARED_ROWS = 64  # ranks share a piece if each gets two chunks of at least so many queries
SCORES = 1 << 26  # held at once by a reference on a CPU
MOST_SCORES = 1 << 29  # and on a GPU

_references: dict[Any, list[HeadPiece]] = {}  # by workload, the newest last; the variants of a sweep share them


@dataclass
class HeadPiece:
    """One KV head of one batch element, with its query heads."""

    batch: int
    head: int
    number: int = 0
    rows: tuple[Rows, ...] | None = None  # the tokens that this rank compares, of a piece that ranks share
    reference: Reference | None = None  # of those tokens, in CPU memory, since a GPU's memory is measured
    local: dict[str, dict[str, Error]] = field(default_factory=dict)  # errors of a local call, by the requested kernel
    local_dsinks: dict[str, Tensor] = field(default_factory=dict)  # and its gradient of the sinks, `[G]` in fp64

    @property
    def first(self) -> bool:
        """Whether this rank is the first, or the only one, that has this piece."""
        return self.rows is None or self.rows[0][0] == 0

    @property
    def tokens(self) -> Tensor | None:
        """This rank's tokens, int64 on the CPU; None for all."""
        return None if self.rows is None else torch.cat([torch.arange(*rows) for rows in self.rows])

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens of `[S, ...]`."""
        tokens = self.tokens
        return x if tokens is None else x[tokens]

    def _heads(self, whole: Tensor, packed: bool, heads: int) -> Tensor:
        """This piece's `[S, heads, ...]` of a tensor of all batch elements and heads."""
        return (whole if packed else whole[self.batch])[:, self.head * heads : (self.head + 1) * heads]

    def of(self, x: Tensor, heads: int) -> Tensor:
        """This rank's tokens of the piece, `[tokens, heads, D]`, of a whole `[B, S, H, D]` or packed `[T, H, D]`."""
        return self.mine(self._heads(x, x.dim() == 3, heads))

    def put(self, whole: Tensor, heads: int, x: Tensor) -> None:
        """Writes `[tokens, heads]` of this rank's tokens to their place in a whole `[B, S, H]` or `[T, H]`."""
        tokens = self.tokens
        self._heads(whole, whole.dim() == 2, heads)[... if tokens is None else tokens] = x.to(whole.dtype)

    def add(self, error: Error, x: Tensor, reference: Reference, name: str, rtol: float) -> None:
        """Adds the error of `x`, `[tokens, heads, D]` of this rank's tokens, against its reference."""
        value = reference.values[name]
        if name == "lse":
            x, value = without_keys(x, value.unsqueeze(-1))
        error.add(x, value, reference.scales(name), rtol, self.batch, self.tokens, self.head * x.shape[1])


def without_keys(x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """x and expected, with 0 where both are -inf: the LSE of a row without keys."""
    both = (x == -torch.inf) & (expected == -torch.inf)
    return x.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)


def kept_bytes() -> int:
    """Bytes of CPU memory that this rank's kept references take."""
    return sum(reference_bytes(pieces) for pieces in _references.values())


def reference_bytes(pieces: list[HeadPiece]) -> int:
    return sum(piece.reference.nbytes for piece in pieces if piece.reference is not None)


def keep(key: Any, pieces: list[HeadPiece], most: int) -> None:
    """Keep pieces under `key`; drop the least recently used until all take at most `most` bytes."""
    _references[key] = pieces
    while kept_bytes() > most:
        del _references[next(iter(_references))]


def kept(key: Any) -> list[HeadPiece] | None:
    """The pieces kept under `key`; they are kept no longer."""
    return _references.pop(key, None)


def tflop(experiment: Experiment) -> float:
    """TFLOP of the whole reference."""
    shapes = replace(experiment.workload.shapes, batch=1, heads=1)
    found = counts.forward_flops(shapes, experiment.head_pairs)
    return (found + (counts.backward_flops(shapes, experiment.head_pairs) if experiment.backward else 0)) / 1e12


def pieces_of(experiment: Experiment, world: int, rank: int, limit_tflop: float) -> tuple[list[HeadPiece], float, int]:
    """(this rank's pieces, the share of all pieces that is checked, the number of pieces that ranks share: all or
    none). With fewer pieces than ranks, several ranks share a piece: each takes some of its queries."""
    work = experiment.workload
    everything = [[(b, h)] for b in range(work.batch) for h in range(work.kv_heads)]
    if work.sinks:  # whose gradients are sums over the batch
        everything = [[(b, h) for b in range(work.batch)] for h in range(work.kv_heads)]
    each = tflop(experiment) / len(everything)
    number = max(1, int(min(len(everything), limit_tflop / each)))
    sampled = [everything[i * len(everything) // number] for i in range(number)]  # evenly over batch and heads
    share, chosen = number / len(everything), [piece for pieces in sampled for piece in pieces]
    wanted = len(chosen)
    sharers = world // wanted  # ranks for each piece
    if sharers < 2 or work.seqlens is not None or work.queries < 2 * sharers * SHARED_ROWS:
        return [HeadPiece(b, h, i) for i, (b, h) in enumerate(chosen) if i % world == rank], share, 0
    if rank >= wanted * sharers:
        return [], share, wanted
    number, which = divmod(rank, sharers)
    borders = [i * work.queries // (2 * sharers) for i in range(2 * sharers + 1)]
    rows = tuple((borders[i], borders[i + 1]) for i in (which, 2 * sharers - 1 - which))  # causal: equal work
    return [HeadPiece(*chosen[number], number, rows)], share, wanted


def piece_inputs(experiment: Experiment, piece: HeadPiece, device: torch.device) -> dict[str, Tensor]:
    """The inputs of a piece: q `[S, G, D]`, dout `[S, G, Dv]`, k `[S, 1, D]`, v `[S, 1, Dv]` and, where the call has them, sinks
    `[G]`. Of a decode k and v are the keys of the batch element, those of the prefix first."""
    spec = experiment.workload
    group = spec.heads // spec.kv_heads
    found = {}
    for name in ("q", "k", "v", *(("dout",) if experiment.backward else ())):
        x = global_input(experiment, name, device, piece.batch)
        start, count = (piece.head, 1) if name in ("k", "v") else (piece.head * group, group)
        found[name] = (x if x.dim() == 3 else x[0])[:, start : start + count].contiguous()
    if spec.kv_lengths is not None:
        found |= {name: found[name][: spec.kv_lengths[piece.batch]] for name in ("k", "v")}
    if (prefix := global_prefix(experiment, device)) is not None:
        for name, shared in zip(("k", "v"), prefix, strict=True):
            found[name] = torch.cat([shared[0, :, piece.head : piece.head + 1], found[name]])
    if (sinks := global_sinks(spec, experiment.seed, device)) is not None:
        found["sinks"] = sinks[piece.head * group : (piece.head + 1) * group]
    return found


def reference(inputs: dict[str, Tensor], piece: HeadPiece, experiment: Experiment, dtype: torch.dtype) -> Reference:
    """The reference of a piece's inputs, of all queries or of this rank's."""
    spec, rows = experiment.workload, piece.rows
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    scores = scores_held(experiment, q.device, dtype)
    if (dilation := experiment.dilation) is not None:
        return dilated.reference(inputs, piece.head * q.shape[1], spec, dilation, dtype, scores, rows)
    seen = seen_by(spec, piece.batch)
    return attend(
        q, k, v, inputs.get("dout"), seen, spec.scale_of_scores, dtype, scores, rows, spec.softcap, inputs.get("sinks")
    )


def seen_by(spec: AttentionCall, batch: int = 0) -> Seen | SeenRectangles:
    """What each query of a batch element sees: causal, window and sequences from their definitions, a mask by name from its
    rectangles. The keys of a decode's prefix come first, and every query sees them all."""
    keys = spec.seqlens or (spec.ends[batch],)
    within = Seen.band(keys if spec.q_len is None else (spec.q_len,), keys, spec.causal, spec.window)
    if spec.prefix:
        return Seen(within.first, within.end + spec.prefix, within.keys + spec.prefix)
    if spec.named_mask is None:
        return within
    built = spec.named_mask.make().build(spec.seq_len)  # not from the library's cache
    return SeenRectangles(torch.tensor(built), within)


def share_reference(me: Rank, experiment: Experiment, mine: list[HeadPiece], pieces: int, dtype: torch.dtype) -> None:
    """Computes the references of shared pieces: each rank does its queries, and dk and dv are summed over the ranks."""
    for piece in mine:
        inputs = piece_inputs(experiment, piece, me.device)
        piece.reference = reference(inputs, piece, experiment, dtype)
    if experiment.backward:
        _sum_shares(me, experiment.workload, mine, pieces, dtype)
    for piece in mine:
        assert piece.reference is not None
        piece.reference = piece.reference.to("cpu")


def _sum_shares(me: Rank, spec: AttentionCall, mine: list[HeadPiece], pieces: int, dtype: torch.dtype) -> None:
    """Sums every piece's dk and dv over the ranks; each rank keeps its tokens."""
    for number in range(pieces):
        reference = mine[0].reference if mine and mine[0].number == number else None
        for name, dim in (("dk", spec.head_dim), ("dv", spec.value_dim)):
            for kind, shape in (("values", (spec.seq_len, 1, dim)), ("squares", (spec.seq_len, 1))):
                if reference is None:
                    dist.all_reduce(torch.zeros(shape, dtype=dtype, device=me.device))
                    continue
                found = getattr(reference, kind)
                dist.all_reduce(found[name])
                found[name] = mine[0].mine(found[name])


def scores_held(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> int:
    """How many scores a reference holds at once: on a GPU as many as fit a quarter of the free memory with at most eight
    temporaries; few under a memory limit."""
    if device.type != "cuda" or experiment.launch.memory_limit_gb is not None:
        return SCORES
    free = torch.cuda.mem_get_info(device)[0]
    return max(SCORES, min(MOST_SCORES, free // (4 * 8 * dtype.itemsize)))
