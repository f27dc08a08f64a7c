"""The gate: no timing without out, dq, dk and dv compared with a reference.

The reference is plain softmax in fp64 (fp32 where fp64 would take too long), on the unsharded tensors, in chunks of
queries. Its work is done once a run: it falls apart into (batch element, KV head) pieces, and each rank does its share of
them; of fewer pieces than ranks, several ranks do one together, each for some of the queries. The same pieces go through
a local call of the same kernel in the same dtype: what error one device makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels import Call, Shape, select
from attention.kernels.math import SCORES, Math
from attention.masks import Interval, tile
from runner.rank import Rank
from runner.schema import Experiment, Workload
from runner.workpiece import AttentionWork, global_input

FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # reference work up to which fp64 is affordable
HALF = ("bf16", "fp16")  # whose errors an fp32 reference resolves as well: fp64 for a tenth of that work
MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # over it a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # of references that a rank keeps for later runs
SHARED_ROWS = 64  # queries of a chunk from which on ranks share a piece
MOST_SCORES = 1 << 29  # held at once by a reference on a GPU


@dataclass
class _Error:
    """Running sums of one tensor's comparison."""

    difference: float = 0.0
    reference: float = 0.0
    worst: float = 0.0
    excess: float = -torch.inf  # the largest |x - ref| - rtol |ref|
    finite: bool = True

    def add(self, x: Tensor, reference: Tensor, rtol: float) -> None:
        delta = (x.to(reference.dtype) - reference).abs_()
        self.finite &= bool(torch.isfinite(x).all())
        self.difference += float(delta.double().square().sum())
        self.reference += float(reference.double().square().sum())
        self.worst = max(self.worst, float(delta.max()))
        self.excess = max(self.excess, float((delta - rtol * reference.abs()).max()))

    def plus(self, other: _Error) -> _Error:
        return _Error(
            self.difference + other.difference,
            self.reference + other.reference,
            max(self.worst, other.worst),
            max(self.excess, other.excess),
            self.finite and other.finite,
        )

    @property
    def rel_l2(self) -> float:
        return (self.difference / self.reference) ** 0.5 if self.reference else self.difference**0.5


@dataclass
class _Piece:
    """One batch element's KV head with the query heads it serves, as `[1, S, G, D]` and `[1, S, 1, D]` (packed
    `[T, G, D]` and `[T, 1, D]`)."""

    batch: int
    head: int
    number: int = 0
    rows: tuple[Interval, ...] | None = None  # the tokens that this rank compares, of a piece that ranks share
    reference: dict[str, Tensor] = field(default_factory=dict)  # in the host's memory: a GPU's is measured
    local: dict[str, dict[str, _Error]] = field(
        default_factory=dict
    )  # of a local call, by the kernel that was asked for

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens of `[1, S, H, D]`."""
        return x if self.rows is None else torch.cat([x[:, a:b] for a, b in self.rows], 1)


_references: dict[Any, list[_Piece]] = {}  # of the last workloads, which a sweep over variants comes back to


def kept_bytes() -> int:
    """What the references that this rank keeps take of the host's memory."""
    return sum(_bytes(pieces) for pieces in _references.values())


def _bytes(pieces: list[_Piece]) -> int:
    return sum(x.numel() * x.element_size() for piece in pieces for x in piece.reference.values())


def _keep(key: Any, pieces: list[_Piece], most: int) -> None:
    """Under `key`, in place of those that were needed the longest time ago."""
    _references[key] = pieces
    while kept_bytes() > most:
        del _references[next(iter(_references))]


def pieces_of(
    work: Workload, world: int, rank: int, limit_tflop: float, backward: bool
) -> tuple[list[_Piece], float, int]:
    """This rank's pieces, the share of all pieces that is checked, and how many of them ranks share (all or none)."""
    everything = [(b, h) for b in range(work.batch) for h in range(work.kv_heads)]
    pairs = work.pairs
    one = 4 * (work.heads // work.kv_heads) * work.head_dim * pairs * (3.5 if backward else 1) / 1e12
    wanted = max(1, int(min(len(everything), limit_tflop / one)))
    # spread over batch and heads
    chosen = [everything[i * len(everything) // wanted] for i in range(wanted)]
    share = len(chosen) / len(everything)
    queries = work.q_len or work.seq_len
    sharers = world // wanted  # ranks for each piece
    if sharers < 2 or work.seqlens is not None or queries < 2 * sharers * SHARED_ROWS:
        return [_Piece(b, h, i) for i, (b, h) in enumerate(chosen) if i % world == rank], share, 0
    if rank >= wanted * sharers:
        return [], share, wanted
    number, which = divmod(rank, sharers)
    borders = [i * queries // (2 * sharers) for i in range(2 * sharers + 1)]
    rows = tuple((borders[i], borders[i + 1]) for i in (which, 2 * sharers - 1 - which))  # causal: equal work
    return [_Piece(*chosen[number], number, rows)], share, wanted


def check(me: Rank, experiment: Experiment, work: AttentionWork) -> dict[str, Any]:
    """Run the variant once and compare. Returns the errors, the tolerances, `passed` and, where not, `why`."""
    spec, tolerance = experiment.workload, experiment.dtype
    backward = work.backward
    limit = experiment.check["max_tflop"] or MAX_TFLOP[experiment.device]
    pairs = spec.pairs
    tflop = 4 * spec.batch * spec.heads * spec.head_dim * pairs * (3.5 if backward else 1) / 1e12
    affordable = FP64_TFLOP[experiment.device] / (10 if spec.dtype in HALF else 1)
    dtype = torch.float64 if tflop <= affordable else torch.float32

    me.say("check_variant")
    work.run("forward")
    assert work.out is not None
    results = {"out": work.out.detach()}
    if backward:
        work.run("backward")
        results |= dict(zip(("dq", "dk", "dv"), work.gradients, strict=True))
    results = {name: work.fn.unshard(x, work.packs) for name, x in results.items()}
    work.release()

    key = (spec, experiment.seed, backward, dtype, me.world, limit)
    most = KEPT_BYTES if experiment.launch["memory_limit_gb"] is None else 0
    mine, share, shared = pieces_of(spec, me.world, me.rank, limit, backward)
    pieces = _references.pop(key, mine)
    gqa = spec.heads != spec.kv_heads
    atol = tolerance["gqa_atol"] if gqa else tolerance["atol"]
    grad_atol = max(tolerance["grad_atol"], atol)
    errors = {name: _Error() for name in results}
    local = {name: _Error() for name in results}
    group = spec.heads // spec.kv_heads
    own = experiment.kernel == "auto" and work.fn.variant.exchange != "peer"  # a peer's auto is not ours
    asked = "auto" if own else work.plan.kernel.name
    me.say("check_reference")  # also of a rank that has no piece to check
    if shared and any(me.gather(not all(piece.reference for piece in pieces))):
        _share_reference(me, experiment, mine, shared, dtype)
        pieces = mine
    for number, piece in enumerate(pieces):
        me.say("check_reference", note=f"{number + 1} of {len(pieces)}")
        new = asked not in piece.local
        if new or not piece.reference:
            inputs = _piece_inputs(spec, piece, experiment.seed, me.device, backward)
        if not piece.reference:
            piece.reference = _on_host(_reference(inputs, experiment, dtype))
        if new:
            mine_locally = _local(inputs, spec, asked, work)
            piece.local[asked] = {name: _Error() for name in results}
        q_heads = slice(piece.head * group, (piece.head + 1) * group)
        kv_head = slice(piece.head, piece.head + 1)
        for name, kept in piece.reference.items():
            reference = kept.to(me.device)
            heads = kv_head if name in ("dk", "dv") else q_heads
            rtol = atol if name == "out" else grad_atol
            errors[name].add(piece.mine(_part(results[name], piece.batch, heads)), reference, rtol)
            if new:
                piece.local[asked][name].add(piece.mine(mine_locally[name]), reference, rtol)
            local[name] = local[name].plus(piece.local[asked][name])
        if _bytes([piece]) * len(pieces) > most:
            piece.reference = {}
    if all(piece.reference for piece in pieces):
        _keep(key, pieces, most)
    me.say("check_compare")
    everyone = me.gather((errors, local))
    return _verdict(everyone, tolerance, atol, grad_atol, {
        "reference": "fp64" if dtype == torch.float64 else "fp32",
        "kernel": work.plan.kernel.name,
        "checked_share": share,
    })  # fmt: skip


def _part(x: Tensor, batch: int, heads: slice) -> Tensor:
    """A piece of `[B, S, H, D]`, or of a pack `[T, H, D]`."""
    return x[:, heads] if x.dim() == 3 else x[batch : batch + 1, :, heads]


def _call(spec: Workload, device: torch.device) -> Call:
    scale = spec.head_dim**-0.5
    if spec.seqlens is None:
        return Call(scale, spec.mask)
    return Call.of_packed(scale, spec.mask, spec.seqlens, spec.seqlens, device)


def _verdict(
    everyone: list[tuple[dict[str, _Error], dict[str, _Error]]],
    tolerance: dict[str, Any],
    atol: float,
    grad_atol: float,
    about: dict[str, Any],
) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    why = []
    for name in everyone[0][0]:
        error, local = _Error(), _Error()
        for errors, locals_ in everyone:
            error, local = error.plus(errors[name]), local.plus(locals_[name])
        most = tolerance["rel_l2"] if name == "out" else tolerance["grad_rel_l2"]
        most_abs = atol if name == "out" else grad_atol
        ratio = error.rel_l2 / local.rel_l2 if local.rel_l2 else None
        tensors[name] = {
            "rel_l2": error.rel_l2,
            "max_abs": error.worst,
            "local_rel_l2": local.rel_l2,
            "ratio_to_local": ratio,
        }
        if not error.finite:
            why.append(f"{name} is not finite")
        if not error.rel_l2 <= most:
            why.append(f"{name} rel L2 {error.rel_l2:.2e} > {most:.0e}")
        if not error.excess <= most_abs:
            why.append(f"{name} max abs {error.worst:.2e} > {most_abs:.1e} + {most_abs:.1e} |ref|")
        if tolerance["error_ratio"] and ratio is not None and ratio > tolerance["error_ratio"]:
            why.append(f"{name} has {ratio:.2f} times the error of a local call, > {tolerance['error_ratio']}")
    return {
        "passed": not why,
        "why": "; ".join(why) or None,
        "tensors": tensors,
        "tolerance": {
            "atol": atol,
            "grad_atol": grad_atol,
            **{key: tolerance[key] for key in ("rel_l2", "grad_rel_l2", "error_ratio")},
        },
        **about,
    }


def _piece_inputs(spec: Workload, piece: _Piece, seed: int, device: torch.device, backward: bool) -> dict[str, Tensor]:
    group = spec.heads // spec.kv_heads
    found = {}
    for name in ("q", "k", "v", *(("dout",) if backward else ())):
        x = global_input(spec, name, seed, device, piece.batch)
        start, count = (piece.head, 1) if name in ("k", "v") else (piece.head * group, group)
        found[name] = x[..., start : start + count, :].contiguous()
    return found


def _reference(inputs: dict[str, Tensor], experiment: Experiment, dtype: torch.dtype) -> dict[str, Tensor]:
    device = inputs["q"].device
    exact = Math(_scores_held(experiment, device, dtype))
    return _plainly(
        exact, inputs["q"], inputs["k"], inputs["v"], inputs.get("dout"), _call(experiment.workload, device), dtype
    )


def _plainly(
    exact: Math, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, call: Call, dtype: torch.dtype
) -> dict[str, Tensor]:
    with _exact_matmul():
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out, lse = exact.forward(q, k, v, call)
        if dout is None:
            return {"out": out}
        gradients = exact.backward(dout.to(dtype), q, k, v, out, lse, call)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def _share_reference(me: Rank, experiment: Experiment, mine: list[_Piece], pieces: int, dtype: torch.dtype) -> None:
    """The references of pieces that ranks share: each computes for its queries, and dk and dv are the sums over all."""
    spec = experiment.workload
    backward = experiment.mode == "forward_backward"
    sums: dict[str, Tensor] = {}
    exact = Math(_scores_held(experiment, me.device, dtype))
    for piece in mine:
        assert piece.rows is not None
        inputs = _piece_inputs(spec, piece, experiment.seed, me.device, backward)
        found: dict[str, list[Tensor]] = {"out": [], "dq": []}
        sums = {name: torch.zeros_like(inputs[name[1:]], dtype=dtype) for name in ("dk", "dv")} if backward else {}
        for number, rows in enumerate(piece.rows):
            me.say("check_reference", note=f"part {number + 1} of {len(piece.rows)}")
            for name, x in _of_rows(exact, inputs, spec, rows, dtype, sums).items():
                found[name].append(x)
        piece.reference = _on_host({name: torch.cat(parts, 1) for name, parts in found.items() if parts})
    if not backward:
        return
    shape = (1, spec.seq_len, 1, spec.head_dim)
    for number in range(pieces):
        for name in ("dk", "dv"):
            of_mine = bool(mine) and mine[0].number == number
            total = sums.pop(name) if of_mine else torch.zeros(shape, dtype=dtype, device=me.device)
            dist.all_reduce(total)
            if of_mine:
                mine[0].reference |= _on_host({name: mine[0].mine(total)})


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in tensors.items()}


def _of_rows(
    exact: Math,
    inputs: dict[str, Tensor],
    spec: Workload,
    rows: Interval,
    dtype: torch.dtype,
    sums: dict[str, Tensor],
) -> dict[str, Tensor]:
    """out and dq of some queries; what they add to dk and dv goes into `sums`."""
    q, dout = (inputs[name][:, rows[0] : rows[1]] if name in inputs else None for name in ("q", "dout"))
    assert q is not None
    shift = spec.seq_len - (spec.q_len or spec.seq_len)
    seen = tile(spec.mask, (rows[0] + shift, rows[1] + shift), (0, spec.seq_len))
    found = {name: torch.zeros_like(q, dtype=dtype) for name in ("out", *(("dq",) if dout is not None else ()))}
    if seen is None:
        return found
    (a, b), (c, d), band = seen
    a, b = a - shift - rows[0], b - shift - rows[0]
    k, v = inputs["k"][:, c:d], inputs["v"][:, c:d]
    call = Call(spec.head_dim**-0.5, band)
    part = _plainly(exact, q[:, a:b], k, v, dout[:, a:b] if dout is not None else None, call, dtype)
    for name, x in found.items():
        x[:, a:b] = part[name]
    for name, x in sums.items():
        x[:, c:d] += part[name]
    return found


def _scores_held(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> int:
    """On a GPU as many as a quarter of what is free takes with its temporaries, eight at most; few under a limit of memory."""
    if device.type != "cuda" or experiment.launch["memory_limit_gb"] is not None:
        return SCORES
    free = torch.cuda.mem_get_info(device)[0]
    return max(SCORES, min(MOST_SCORES, free // (4 * 8 * dtype.itemsize)))


class _exact_matmul:
    """No TF32 in references."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exc: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def _local(inputs: dict[str, Tensor], spec: Workload, asked: str, work: AttentionWork) -> dict[str, Tensor]:
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    kernel = select(asked, Shape.of(q, k), (spec.mask,)) if asked == "auto" else work.plan.kernel
    call = _call(spec, q.device)
    out, lse = kernel.forward(q, k, v, call)
    found = {"out": out}
    if "dout" in inputs:
        found |= dict(zip(("dq", "dk", "dv"), kernel.backward(inputs["dout"], q, k, v, out, lse, call), strict=True))
    return found
