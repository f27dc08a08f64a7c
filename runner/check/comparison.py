"""Attention's comparison with its reference: plain softmax (`reference.attend`) in fp64, or fp32 where fp64 would take too
long, on the unsharded tensors, in pieces of one batch element and one KV head. The same pieces go through a local call of the
same kernel in the same dtype, which gives the error of one device."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import name_of
from runner.check import pieces
from runner.check.errors import Compared, Error, Tolerance, total, verdict
from runner.check.local import Local
from runner.check.pieces import HALF, HeadPiece
from runner.check.reference import Reference, smallest
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import ROLES, SINKS, AttentionWork, score_factor
from runner.record.fields import Correctness, LseError, TensorError

MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # reference work above which a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # of references that a rank keeps for later runs


def compare(me: Rank, experiment: Experiment, work: AttentionWork, outputs: dict[str, Tensor]) -> Compared:
    """The comparison (`gate.Compare`) of attention: out, dq, dk, dv, dsinks and the LSE."""
    lse = _lse(me, work)
    whole = {name: work.whole(name, outputs.pop(name)) for name in [*outputs]}
    if isinstance(lse, Tensor):
        whole["lse"] = work.whole("lse", lse)
    comparison = _Comparison(me, experiment, work, whole)
    share = comparison.add_pieces(KEPT_BYTES if experiment.launch.memory_limit_gb is None else 0)
    me.say("check_compare")
    correctness = replace(comparison.result(lse if isinstance(lse, str) else None), checked_share=share)
    return Compared(correctness, comparison.limits)


def tolerances(experiment: Experiment) -> dict[str, Tolerance]:
    """The tolerances of out, dq, dk, dv and dsinks, which has too few values for more than a relative L2 error."""
    asked, spec = experiment.dtype, experiment.workload
    atol, capped = asked.gqa_atol if spec.heads != spec.kv_heads else asked.atol, cap_error(spec.softcap, spec.dtype)
    of_out = Tolerance(asked.rel_l2 + capped, atol, asked.row + capped, asked.gain, asked.error_ratio)
    of_gradient = replace(
        of_out, rel_l2=asked.grad_rel_l2 + capped, absolute=max(asked.grad_atol, atol), row=asked.grad_row + capped
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

    def __init__(self, me: Rank, experiment: Experiment, work: AttentionWork, whole: dict[str, Tensor]):
        self.me, self.experiment, self.work, self.whole = me, experiment, work, whole
        self.dtype = pieces.precision(experiment, pieces.tflop(experiment))
        self.limits = tolerances(experiment)
        self.errors = {name: Error() for name in whole}
        self.local = {name: Error() for name in whole if name != "lse"}
        # of each head's sink: the reference, its square, and a local call's gradient
        self.sums = torch.zeros(3, experiment.workload.heads, dtype=torch.float64, device=me.device)

    def add_pieces(self, most_bytes: int) -> float:
        """Compares this rank's pieces; the share of all pieces that is checked. Keeps at most so many bytes of references
        for later checks. Collective."""
        me, experiment, spec = self.me, self.experiment, self.experiment.workload
        limit = experiment.check.max_tflop or MAX_TFLOP[experiment.device]
        mine, share, shared = pieces.pieces_of(experiment, me.world, me.rank, limit)
        about = spec, experiment.dilation, experiment.seed, experiment.backward, self.dtype, me.world, limit
        references = [pieces.kept((about, piece.number)) for piece in mine]
        me.say("check_reference")  # also on a rank that has no piece to check
        if shared and any(me.gather(None in references)):
            ours = pieces.share_reference(me, experiment, mine[0] if mine else None, shared, self.dtype)
            references = [ours for _ in mine]
        alone = Local(me, experiment, self.work)
        for piece, reference in zip(mine, references, strict=True):
            me.say("check_reference", note=f"{piece.number + 1} of {len(mine)}")
            inputs = pieces.piece_inputs(experiment, piece, me.device)
            if reference is None:
                reference = pieces.reference(inputs, piece, experiment, self.dtype)
            self._add(piece, reference.to(me.device), alone.outputs(piece, inputs))
            pieces.keep((about, piece.number), reference.to("cpu"), most_bytes)
        if SINKS in self.whole:
            self._add_dsinks()
        return share

    def _add(self, piece: HeadPiece, reference: Reference, alone: dict[str, Tensor]) -> None:
        """Compares a piece. alone: a local call's outputs."""
        spec, dsinks = self.experiment.workload, alone.pop(SINKS, None)
        for name in self.whole.keys() - {SINKS}:
            x = piece.of(self.whole[name], 1 if ROLES[name] == "kv" else spec.heads // spec.kv_heads)
            piece.add(self.errors[name], x, reference, name, self._rtol(name))
        for name, x in alone.items():
            piece.add(self.local[name], x, reference, name, self._rtol(name))
        if dsinks is not None:
            sums = self.sums.view(3, spec.kv_heads, -1)[:, piece.head]
            sums[0] += reference.values[SINKS].flatten()
            sums[1] += reference.values[f"{SINKS}2"].flatten()
            if piece.rows.start == 0:  # of the ranks that share the piece only one
                sums[2] += dsinks

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
        compared = self.whole[SINKS].where(squares > 0, value)
        for errors, x in ((self.errors, compared), (self.local, alone)):
            errors[SINKS].add(x, value, reference.scales(SINKS), self._rtol(SINKS))

    def result(self, without_lse: str | None) -> Correctness:
        """The errors over all ranks against the tolerances. without_lse: why there is no LSE to compare."""
        everyone = self.me.gather((self.errors, self.local))
        errors = {name: total(ranks[name] for ranks, _ in everyone) for name in self.errors}
        tensors, why = {}, []
        for name in self.local:
            alone = total(ranks[name] for _, ranks in everyone)
            error = errors[name]
            why += error.faults(name, self.limits[name], alone)
            tensors[name] = TensorError(local_worst_row=alone.row, **error.plain(), **error.beside(alone))
        asked, lse = self.experiment.dtype, LseError(checked=False, why=without_lse)
        if "lse" in errors:
            lse = LseError(checked=True, **errors["lse"].plain() | {"rel_l2": None, "gain": None})
            if not errors["lse"].row <= asked.lse:
                why.append(f"lse error {errors['lse'].row:.2e} of 1 + |lse| > {asked.lse:.0e} at {errors['lse'].place}")
        tolerance = {"lse": asked.lse, "error_ratio": asked.error_ratio, "gain": self.limits["out"].gain}
        for prefix, name in (("", "out"), ("grad_", "dq")):
            limit = self.limits[name]
            tolerance |= {f"{prefix}atol": limit.absolute, f"{prefix}rel_l2": limit.rel_l2, f"{prefix}row": limit.row}
        return Correctness(
            **verdict(why),
            tensors=tensors,
            lse=lse,
            reference=name_of(self.dtype),
            kernel=self.work.plan.kernel.name,
            tolerance={name: limit for name, limit in tolerance.items() if limit is not None},
        )
