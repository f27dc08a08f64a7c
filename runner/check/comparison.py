"""Attention's comparison with its reference: plain softmax (`reference.attend`) in fp64, or fp32 where fp64 would take too
long, on the unsharded tensors, in pieces of one batch element and one KV head. The same pieces go through a local call of the
same kernel in the same dtype, which gives the error of one device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import name_of
from attention.masks.mask import Mask
from runner.check import local, pieces
from runner.check.errors import Compared, Error, Tolerance, described, total, verdict
from runner.check.pieces import HALF, HeadPiece, Local
from runner.check.reference import Reference, smallest
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import ROLES, SINKS, AttentionWork, score_factor

MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # reference work above which a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # of references that a rank keeps for later runs


def compare(
    me: Rank, experiment: Experiment, work: AttentionWork, outputs: dict[str, Tensor], with_scales: bool
) -> Compared:
    """The comparison (`gate.Compare`) of attention: out, dq, dk, dv, dsinks and the LSE."""
    lse = _lse(me, work)
    whole = {name: work.whole(name, outputs.pop(name)) for name in [*outputs]}
    if isinstance(lse, Tensor):
        whole["lse"] = work.whole("lse", lse)
    comparison = _Comparison(me, experiment, work, whole, with_scales)
    share = comparison.add_pieces(KEPT_BYTES if experiment.launch.memory_limit_gb is None else 0)
    me.say("check_compare")
    scales = {name: comparison.scales_of_shard(name) for name in comparison.scales}
    about = {"reference": name_of(comparison.dtype), "kernel": work.plan.kernel.name, "checked_share": share}
    return Compared(comparison.result(lse if isinstance(lse, str) else None) | about, scales, comparison.limits)


def tolerances(experiment: Experiment) -> dict[str, Tolerance]:
    """The tolerances of out, dq, dk, dv and dsinks, which has too few values for more than a relative L2 error."""
    given, spec = experiment.dtype, experiment.workload
    atol, capped = given.gqa_atol if spec.heads != spec.kv_heads else given.atol, cap_error(spec.softcap, spec.dtype)
    of_out = Tolerance(given.rel_l2 + capped, atol, given.row + capped, given.gain, given.error_ratio)
    of_gradient = replace(
        of_out,
        rel_l2=given.grad_rel_l2 + capped,
        absolute=max(given.grad_atol, atol),
        row=given.grad_row + capped,
    )
    of_dk = replace(of_gradient, absolute=of_gradient.absolute * score_factor(spec))  # dk is a sum of q
    of_sum = replace(of_gradient, gain=math.inf, ratio=None)
    return {"out": of_out, "dq": of_gradient, "dk": of_dk, "dv": of_gradient, SINKS: of_sum}


def cap_error(softcap: float | None, dtype: str) -> float:
    """How much of itself a softmax's term is off through the rounding of its capped score, which is relative to the score: kernels
    for half precision take a tanh with a relative error of 2^-11. (Few scores are above 64: see `score_factor`.)"""
    return min(softcap or 0.0, 64.0) * 2.0 ** (-11 if dtype in HALF else -22)


def _lse(me: Rank, work: AttentionWork) -> Tensor | str:
    """This rank's LSE `[B, s, H, 1]`, or why there is none."""
    me.say("check_variant", note="the LSE")
    try:
        with torch.no_grad():
            _, lse = work.fn(work.q, work.k, work.v, **work.options, return_lse=True)
    except UnsupportedCall as error:
        return str(error)
    return lse.transpose(-1, -2).unsqueeze(-1).contiguous()


class _Comparison:
    """Whole outputs against the references of this rank's pieces, which are computed in `dtype`."""

    def __init__(
        self, me: Rank, experiment: Experiment, work: AttentionWork, whole: dict[str, Tensor], with_scales: bool
    ):
        self.me, self.experiment, self.work, self.whole = me, experiment, work, whole
        self.dtype = pieces.precision(experiment, pieces.tflop(experiment))
        self.limits = tolerances(experiment)
        self.errors = {name: Error() for name in whole}
        self.local = {name: Error() for name in whole if name != "lse"}
        # of each head's sink: the reference, its square, and a local call's gradient
        self.sums = torch.zeros(3, experiment.workload.heads, dtype=torch.float64, device=me.device)
        # scales of the rows that this rank compares: `[B, S, H, 1]`, packed `[T, H, 1]`
        self.scales = {}
        if with_scales:
            self.scales = {
                name: whole[name].new_zeros((*whole[name].shape[:-1], 1), dtype=torch.float32) for name in self.local
            }
        # an external package's `auto` is a kernel of its own
        own = experiment.kernel == "auto" and not experiment.is_peer
        self.kernel = "auto" if own else work.plan.kernel.name

    def add_pieces(self, most_bytes: int) -> float:
        """Compares this rank's pieces; the share of all pieces that is checked. Keeps at most so many bytes of references
        for later checks. Collective."""
        me, experiment = self.me, self.experiment
        limit = experiment.check.max_tflop or MAX_TFLOP[experiment.device]
        spec, passes = experiment.workload, experiment.backward
        key = (spec, experiment.dilation, experiment.seed, passes, self.dtype, me.world, limit)
        mine, share, shared = pieces.pieces_of(experiment, me.world, me.rank, limit)
        kept = pieces.kept(key) or mine
        me.say("check_reference")  # also on a rank that has no piece to check
        if shared and any(me.gather(not all(piece.reference for piece in kept))):
            pieces.share_reference(me, experiment, mine, shared, self.dtype)
            kept = mine
        for number, piece in enumerate(kept):
            me.say("check_reference", note=f"{number + 1} of {len(kept)}")
            self._add(piece)
            if pieces.reference_bytes([piece]) * len(kept) > most_bytes:
                piece.reference = None
        if all(piece.reference for piece in kept):
            pieces.keep(key, kept, most_bytes)
        if SINKS in self.whole:
            self._add_dsinks()
        return share

    def _add(self, piece: HeadPiece) -> None:
        """Compares a piece; computes its reference if it has none."""
        spec, device = self.experiment.workload, self.me.device
        new = self.kernel not in piece.local
        if new or piece.reference is None:
            inputs = pieces.piece_inputs(self.experiment, piece, device)
        if piece.reference is None:
            piece.reference = pieces.reference(inputs, piece, self.experiment, self.dtype).to("cpu")
        reference, group = piece.reference.to(device), spec.heads // spec.kv_heads
        for name in self.whole.keys() - {SINKS}:
            x = piece.of(self.whole[name], 1 if ROLES[name] == "kv" else group)
            piece.add(self.errors[name], x, reference, name, self._rtol(name))
            if name in self.scales:
                piece.put(self.scales[name], reference.scales(name).unsqueeze(-1))
        if new:
            piece.local[self.kernel] = self._local(piece, inputs, reference)
        own = piece.local[self.kernel]
        self.local |= {name: self.local[name].plus(error) for name, error in own.errors.items()}
        if own.dsinks is not None:
            sums = self.sums[:, piece.head * group : (piece.head + 1) * group]
            sums[0] += reference.values[SINKS].flatten()
            sums[1] += reference.values[f"{SINKS}2"].flatten()
            if piece.first:
                sums[2] += own.dsinks.to(device)

    def _local(self, piece: HeadPiece, inputs: dict[str, Tensor], reference: Reference) -> Local:
        """A local call on a piece."""
        by_name = self.experiment.dilation is not None or self.kernel == "auto"
        if isinstance(self.experiment.workload.mask, Mask):
            by_name = False
        kernel = self.kernel if by_name else self.work.plan.kernel
        outputs = local.results(self.experiment, inputs, piece.head * inputs["q"].shape[1], kernel)
        dsinks = outputs.pop(SINKS).double().cpu() if SINKS in outputs else None
        errors = {name: Error() for name in outputs}
        for name, x in outputs.items():
            piece.add(errors[name], piece.mine(x), reference, name, self._rtol(name))
        return Local(errors, dsinks)

    def _rtol(self, name: str) -> float:
        return self.limits[name].absolute if name in self.limits else 0.0

    def _add_dsinks(self) -> None:
        """Compares the sinks' gradient, to which every piece adds, on rank 0. Collective."""
        if self.me.world > 1:
            dist.all_reduce(self.sums)
        if self.me.rank:
            return
        value, squares, alone = self.sums.view(3, 1, -1, 1)
        reference = Reference({SINKS: value, f"{SINKS}2": squares}, smallest(self.work.q.dtype))
        scales = reference.scales(SINKS)
        compared = self.whole[SINKS].where(squares > 0, value)
        for errors, x in ((self.errors, compared), (self.local, alone)):
            errors[SINKS].add(x, value, scales, self._rtol(SINKS))
        if SINKS in self.scales:
            self.scales[SINKS] = scales.float().unsqueeze(-1)

    def scales_of_shard(self, name: str) -> Tensor:
        """The scales of this rank's rows of a tensor, `[B, s, H]`. A head that no rank compared gets the largest scale
        among the compared heads of its token. Collective."""
        scales = self.scales[name]
        if self.me.world > 1:
            dist.all_reduce(scales)
        compared = scales.amax(-2, keepdim=True)
        if scales.dim() == 4:
            compared = compared.amax(0, keepdim=True)
        return self.work.shard(name, torch.where(scales > 0, scales, compared)).squeeze(-1)

    def result(self, without_lse: str | None) -> dict[str, Any]:
        """The errors over all ranks against the tolerances. without_lse: why there is no LSE to compare."""
        everyone = self.me.gather((self.errors, self.local))
        errors = {name: total(rank[name] for rank, _ in everyone) for name in self.errors}
        tensors, why = {}, []
        for name in self.local:
            alone = total(rank[name] for _, rank in everyone)
            why += errors[name].faults(name, self.limits[name], alone)
            more = {"local_rel_l2": alone.rel_l2, "local_worst_row": alone.row}
            tensors[name] = errors[name].plain() | more | {"ratio_to_local": errors[name].ratio_to(alone)}
        lse: dict[str, Any] = {"checked": False, "why": without_lse}
        if "lse" in errors:
            error, most = errors["lse"], self.experiment.dtype.lse
            lse = {"checked": True, "why": None, "max_abs": error.worst}
            lse |= {name: error.plain()[name] for name in ("worst_row", "worst_row_at")}
            if not error.row <= most:
                why.append(f"lse error {error.row:.2e} of 1 + |lse| > {most:.0e} at {described(error.row_at)}")
        out, grad, asked = self.limits["out"], self.limits["dq"], self.experiment.dtype
        tolerance = {
            "atol": out.absolute,
            "rel_l2": out.rel_l2,
            "row": out.row,
            "gain": out.gain,
            "lse": asked.lse,
            "grad_atol": grad.absolute,
            "grad_rel_l2": grad.rel_l2,
            "grad_row": grad.row,
            "error_ratio": asked.error_ratio,
        }
        return verdict(why, tensors=tensors, lse=lse, tolerance=tolerance)
