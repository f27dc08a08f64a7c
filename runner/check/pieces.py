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
from runner.check.reference import Reference, Rows, Seen, attend
from runner.config.experiment import AttentionCall, Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import global_input, global_prefix, global_sinks

SHARED_ROWS = 64  # ranks share a piece if each gets two chunks of at least so many queries
SCORES = 1 << 26  # held at once by a reference on a CPU
MOST_SCORES = 1 << 29  # and on a GPU
FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # reference work up to which fp64 is affordable
HALF = ("bf16", "fp16")  # fp32 is precise enough for their errors: fp64 up to a tenth of that work

_references: dict[Any, list[HeadPiece]] = {}  # by workload, the newest last; the variants of a sweep share them


@dataclass
class Local:
    """A local call on a piece: its errors, and its gradient of the sinks, `[G]` in fp64 on the CPU."""

    errors: dict[str, Error]
    dsinks: Tensor | None


@dataclass
class HeadPiece:
    """One KV head of one batch element, with its query heads."""

    batch: int
    head: int
    number: int
    rows: tuple[Rows, ...]  # the tokens that this rank compares: all but where ranks share the piece
    reference: Reference | None = None  # of those tokens, in CPU memory, since a GPU's memory is measured
    local: dict[str, Local] = field(default_factory=dict)  # by the requested kernel

    @property
    def first(self) -> bool:
        """Whether this rank is the first, or the only one, that has this piece."""
        return self.rows[0][0] == 0

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens of `[S, ...]`."""
        parts = [x[slice(*rows)] for rows in self.rows]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _heads(self, whole: Tensor, heads: int) -> Tensor:
        """This piece's `[S, heads, D]` of all batch elements and heads, `[B, S, H, D]` or packed `[T, H, D]`."""
        of_batch = whole if whole.dim() == 3 else whole[self.batch]
        return of_batch[:, self.head * heads : (self.head + 1) * heads]

    def of(self, whole: Tensor, heads: int) -> Tensor:
        """This rank's tokens of the piece, `[tokens, heads, D]`, of a whole `[B, S, H, D]` or packed `[T, H, D]`."""
        return self.mine(self._heads(whole, heads))

    def put(self, whole: Tensor, x: Tensor) -> None:
        """Writes `[tokens, heads, D]` of this rank's tokens to their place in a whole."""
        part = self._heads(whole, x.shape[1])
        part[self.mine(torch.arange(len(part)))] = x.to(whole.dtype)

    def add(self, error: Error, x: Tensor, reference: Reference, name: str, rtol: float) -> None:
        """Adds the error of `x`, `[tokens, heads, D]` of this rank's tokens, against its reference."""
        x, value = without_keys(x, reference.values[name])
        tokens = self.mine(torch.arange(self.rows[-1][1]))
        error.add(x, value, reference.scales(name), rtol, self.batch, tokens, self.head * x.shape[1])


def without_keys(x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """x and expected, with 0 where both are -inf: the LSE of a row without keys."""
    both = (x == -torch.inf) & (expected == -torch.inf)
    return x.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)


def reference_bytes(pieces: list[HeadPiece]) -> int:
    return sum(piece.reference.nbytes for piece in pieces if piece.reference is not None)


def keep(key: Any, pieces: list[HeadPiece], most: int) -> None:
    """Keeps pieces for `kept`, and drops the oldest until all take at most `most` bytes."""
    _references[key] = pieces
    while sum(map(reference_bytes, _references.values())) > most:
        del _references[next(iter(_references))]


def kept(key: Any) -> list[HeadPiece] | None:
    """The pieces kept under `key`; they are kept no longer."""
    return _references.pop(key, None)


def tflop(experiment: Experiment) -> float:
    """TFLOP of the whole reference."""
    shapes = replace(experiment.workload.shapes, batch=1, heads=1)
    flops = counts.forward_flops(shapes, experiment.head_pairs)
    if experiment.backward:
        flops += counts.backward_flops(shapes, experiment.head_pairs)
    return flops / 1e12


def precision(experiment: Experiment, reference_tflop: float) -> torch.dtype:
    """fp64 or, where that would take too long, fp32: in what a reference of so much work is computed."""
    affordable = FP64_TFLOP[experiment.device] / (10 if experiment.workload.dtype in HALF else 1)
    return torch.float64 if reference_tflop <= affordable else torch.float32


def pieces_of(experiment: Experiment, world: int, rank: int, limit_tflop: float) -> tuple[list[HeadPiece], float, int]:
    """(this rank's pieces, the share of all pieces that is checked, the number of pieces that ranks share: all or
    none). With fewer pieces than ranks, several ranks share a piece: each takes some of its queries."""
    work = experiment.workload
    batches, heads = range(work.batch), range(work.kv_heads)
    groups = [[(b, h)] for b in batches for h in heads]
    if work.sinks:  # whose gradients are sums over the batch
        groups = [[(b, h) for b in batches] for h in heads]
    number = max(1, int(min(len(groups), limit_tflop * len(groups) / tflop(experiment))))
    # evenly over batch and heads
    chosen = [piece for i in range(number) for piece in groups[i * len(groups) // number]]
    share, sharers = number / len(groups), world // len(chosen)
    if sharers < 2 or work.seqlens is not None or work.queries < 2 * sharers * SHARED_ROWS:
        whole = ((0, work.queries),)
        return [HeadPiece(*piece, i, whole) for i, piece in enumerate(chosen) if i % world == rank], share, 0
    if rank >= len(chosen) * sharers:
        return [], share, len(chosen)
    number, which = divmod(rank, sharers)
    borders = [i * work.queries // (2 * sharers) for i in range(2 * sharers + 1)]
    rows = tuple((borders[i], borders[i + 1]) for i in (which, 2 * sharers - 1 - which))  # causal: equal work
    return [HeadPiece(*chosen[number], number, rows)], share, len(chosen)


def piece_inputs(experiment: Experiment, piece: HeadPiece, device: torch.device) -> dict[str, Tensor]:
    """The inputs of a piece: q `[S, G, D]`, dout `[S, G, Dv]`, k `[S, 1, D]`, v `[S, 1, Dv]` and, where the call has them, sinks
    `[G]`. Of a decode k and v are the keys of the batch element, those of the prefix first."""
    spec = experiment.workload
    group = spec.heads // spec.kv_heads
    prefix = dict(zip(("k", "v"), global_prefix(experiment, device) or (), strict=False))
    inputs: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "dout") if experiment.backward else ("q", "k", "v"):
        x = global_input(experiment, name, device, piece.batch)
        x = x if x.dim() == 3 else x[0]
        if name in ("k", "v"):
            head = slice(piece.head, piece.head + 1)
            own = x[: spec.ends[piece.batch], head]
            inputs[name] = torch.cat([prefix[name][0, :, head], own]) if prefix else own.contiguous()
        else:
            inputs[name] = x[:, piece.head * group : (piece.head + 1) * group].contiguous()
    if (sinks := global_sinks(spec, experiment.seed, device)) is not None:
        inputs["sinks"] = sinks[piece.head * group : (piece.head + 1) * group]
    return inputs


def reference(inputs: dict[str, Tensor], piece: HeadPiece, experiment: Experiment, dtype: torch.dtype) -> Reference:
    """The reference of a piece's inputs, of this rank's queries."""
    spec, dilation = experiment.workload, experiment.dilation
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    about = dtype, scores_held(experiment, q.device, dtype), piece.rows
    if dilation is not None:
        return dilated.reference(inputs, piece.head * q.shape[1], spec, dilation, *about)
    seen, dout, sinks = seen_by(spec, piece.batch), inputs.get("dout"), inputs.get("sinks")
    return attend(q, k, v, dout, seen, spec.scale_of_scores, *about, spec.softcap, sinks)


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


def share_reference(me: Rank, experiment: Experiment, mine: list[HeadPiece], pieces: int, dtype: torch.dtype) -> None:
    """Computes the references of shared pieces: each rank does its queries; dk and dv are summed over the ranks, and each keeps its
    tokens. Collective."""
    spec = experiment.workload
    computed = {
        piece.number: reference(piece_inputs(experiment, piece, me.device), piece, experiment, dtype) for piece in mine
    }
    sums = {"dk": spec.head_dim, "dv": spec.value_dim, "dk2": 1, "dv2": 1} if experiment.backward else {}
    for number in range(pieces):
        for name, dim in sums.items():
            if number in computed:
                dist.all_reduce(computed[number].values[name])
                computed[number].values[name] = mine[0].mine(computed[number].values[name])
            else:
                dist.all_reduce(torch.zeros((spec.seq_len, 1, dim), dtype=dtype, device=me.device))
    for piece in mine:
        piece.reference = computed[piece.number].to("cpu")


def scores_held(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> int:
    """How many scores a reference holds at once: on a GPU as many as fit a quarter of the free memory with at most eight
    temporaries; few under a memory limit."""
    if device.type != "cuda" or experiment.launch.memory_limit_gb is not None:
        return SCORES
    free = torch.cuda.mem_get_info(device)[0]
    return max(SCORES, min(MOST_SCORES, free // (4 * 8 * dtype.itemsize)))
