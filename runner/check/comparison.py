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

from attention.call import positive, signed
from attention.errors import UnsupportedCall
from attention.kernels import Call, Kernel, Shape, select
from attention.masks.band import FULL, Band
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.reduction.parts import empty_result, merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import result_like
from runner.check import dilated, pieces
from runner.check.errors import Compared, Error, Tolerance, described, total
from runner.check.pieces import HeadPiece
from runner.check.reference import Reference
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import GRADIENTS, NAMES, ROLES, SINKS, AttentionWork, score_factor

FP64_TFLOP = {"cpu": 0.02, "cuda": 2.0}  # reference work up to which fp64 is affordable
HALF = ("bf16", "fp16")  # fp32 is precise enough for their errors: fp64 up to a tenth of that work
MAX_TFLOP = {"cpu": 2.0, "cuda": 400.0}  # above it a sample of the pieces is checked
KEPT_BYTES = 512 << 20  # of references that a rank keeps for later runs


def compare(
    me: Rank, experiment: Experiment, work: AttentionWork, outputs: dict[str, Tensor], with_scales: bool
) -> Compared:
    """The comparison (`gate.Compare`) of attention: out, dq, dk, dv, dsinks and the LSE."""
    tflop = pieces.tflop(experiment)
    affordable = FP64_TFLOP[experiment.device] / (10 if experiment.workload.dtype in HALF else 1)
    dtype = torch.float64 if tflop <= affordable else torch.float32
    lse = _lse(me, work)
    whole = {name: work.whole(name, outputs.pop(name)) for name in [*outputs]}
    if isinstance(lse, Tensor):
        whole["lse"] = work.whole("lse", lse)
    comparison = _Comparison(me, experiment, work, whole, dtype, with_scales)
    share = comparison.add_pieces(KEPT_BYTES if experiment.launch.memory_limit_gb is None else 0)
    me.say("check_compare")
    scales = {name: comparison.scales_of_shard(name) for name in comparison.scales}
    reference = "fp64" if dtype == torch.float64 else "fp32"
    about = {"reference": reference, "kernel": work.plan.kernel.name, "checked_share": share}
    return Compared(comparison.verdict(lse if isinstance(lse, str) else None) | about, scales, comparison.limits)


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
        self,
        me: Rank,
        experiment: Experiment,
        work: AttentionWork,
        whole: dict[str, Tensor],
        dtype: torch.dtype,
        with_scales: bool,
    ):
        self.me, self.experiment, self.work, self.whole, self.dtype = me, experiment, work, whole, dtype
        self.limits = tolerances(experiment)
        self.errors = {name: Error() for name in whole}
        self.local = {name: Error() for name in whole if name != "lse"}
        # of each head's sink: the reference, its square, and a local call's gradient
        self.sums = torch.zeros(3, experiment.workload.heads, dtype=torch.float64, device=me.device)
        # scales of the rows that this rank compares: `[B, S, H]`, packed `[T, H]`
        self.scales = {name: whole[name].new_zeros(whole[name].shape[:-1], dtype=torch.float32) for name in self.local}
        if not with_scales:
            self.scales = {}
        # an external package's `auto` is a kernel of its own
        own = experiment.kernel == "auto" and not experiment.is_peer
        self.kernel = "auto" if own else work.plan.kernel.name

    def add_pieces(self, most_bytes: int) -> float:
        """Compares this rank's pieces; the share of all pieces that is checked. Keeps at most so many bytes of references
        for later checks. Collective."""
        me, experiment, backward = self.me, self.experiment, self.experiment.backward
        limit = experiment.check.max_tflop or MAX_TFLOP[experiment.device]
        key = (experiment.workload, experiment.dilation, experiment.seed, backward, self.dtype, me.world, limit)
        mine, share, shared = pieces.pieces_of(experiment, me.world, me.rank, limit)
        found = pieces.kept(key) or mine
        me.say("check_reference")  # also on a rank that has no piece to check
        if shared and any(me.gather(not all(piece.reference for piece in found))):
            pieces.share_reference(me, experiment, mine, shared, self.dtype)
            found = mine
        for number, piece in enumerate(found):
            me.say("check_reference", note=f"{number + 1} of {len(found)}")
            self._add(piece)
            if pieces.reference_bytes([piece]) * len(found) > most_bytes:
                piece.reference = None
        if all(piece.reference for piece in found):
            pieces.keep(key, found, most_bytes)
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
        reference = piece.reference.to(device)
        rows = {name: x for name, x in self.whole.items() if name != SINKS}
        for name, x in rows.items():
            heads = 1 if ROLES[name] == "kv" else spec.heads // spec.kv_heads
            rtol = self.limits[name].absolute if name in self.limits else 0.0
            piece.add(self.errors[name], piece.of(x, heads), reference, name, rtol)
            if name in self.scales:
                piece.put(self.scales[name], heads, reference.scales(name))
        if new:
            errors = piece.local[self.kernel] = {name: Error() for name in self.local}
            local = self._local(inputs, piece)
            if SINKS in local:
                piece.local_dsinks[self.kernel] = local.pop(SINKS).double().cpu()
            for name, x in local.items():
                here = piece.mine(x if x.dim() == 3 else x[0])
                piece.add(errors[name], here, reference, name, self.limits[name].absolute)
        self.local = {name: error.plus(piece.local[self.kernel][name]) for name, error in self.local.items()}
        if SINKS in self.whole:
            heads = spec.heads // spec.kv_heads
            sums = self.sums[:, piece.head * heads : (piece.head + 1) * heads]
            sums[0] += reference.values[SINKS].flatten()
            sums[1] += reference.squares[SINKS].flatten()
            if piece.first:
                sums[2] += piece.local_dsinks[self.kernel].to(device)
            self.least = reference.least

    def _add_dsinks(self) -> None:
        """Compares the sinks' gradient, to which every piece adds, on rank 0. Collective."""
        if self.me.world > 1:
            dist.all_reduce(self.sums)
        if self.me.rank:
            return
        value, squares, local = self.sums
        reference = Reference({SINKS: value.view(1, -1, 1)}, {SINKS: squares.view(1, -1)}, self.least)
        expected, scales, rtol = reference.values[SINKS], reference.scales(SINKS), self.limits[SINKS].absolute
        compared = (squares > 0).view(1, -1, 1)
        self.errors[SINKS].add(self.whole[SINKS].where(compared, expected), expected, scales, rtol)
        self.local[SINKS].add(local.view(1, -1, 1), expected, scales, rtol)
        if SINKS in self.scales:
            self.scales[SINKS] = scales.float()

    def _local(self, inputs: dict[str, Tensor], piece: HeadPiece) -> dict[str, Tensor]:
        """out, dq, dk, dv and dsinks of a call of the kernel on one device, with a batch dim of 1 unless packed."""
        spec, sinks = self.experiment.workload, inputs.get("sinks")
        if (dilation := self.experiment.dilation) is not None:
            call = Call(positive(spec.scale, spec.head_dim), softcap=spec.softcap)
            given = inputs | {"q": signed(inputs["q"], spec.scale)}
            first = piece.head * inputs["q"].shape[1]
            found = dilated.local(given, first, spec, dilation, self.kernel, call)
            return found | ({"dq": signed(found["dq"], spec.scale)} if "dq" in found else {})
        q, k, v, *dout = (inputs[x].unsqueeze(0) if spec.seqlens is None else inputs[x] for x in NAMES if x in inputs)
        q, call = signed(q, spec.scale), Call(positive(spec.scale, spec.head_dim), softcap=spec.softcap)
        kernel = self._local_kernel(q, k, v)
        if spec.q_len is not None and isinstance(spec.mask, Band):
            return {"out": with_sinks(*self._decoded(kernel, q, k, v, call, spec.mask), sinks)[0]}
        if isinstance(spec.mask, Mask):
            call = call.under(Pattern(spec.seq_len, spec.seq_len, spec.mask.rectangles(spec.seq_len)))
        elif spec.seqlens is None:
            call = call.under(spec.mask)
        else:
            call = call.of_packed(spec.mask, spec.seqlens, spec.seqlens, q.device)
        out, lse = with_sinks(*kernel.forward(q, k, v, call), sinks)
        if not dout:
            return {"out": out}
        dq, dk, dv = kernel.backward(dout[0], q, k, v, out, lse, call)
        dsinks = sinks_gradients(dout[0], saved_with(sinks, q, k, v, out, lse))
        return {"out": out, **dict(zip(GRADIENTS, (signed(dq, spec.scale), dk, dv, *dsinks), strict=False))}

    def _decoded(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: Call, mask: Band
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of a decode: a call on the prefix and one on the element's own keys, merged."""
        (out, lse), at = empty_result(result_like(q, v)), self.experiment.workload.prefix or 0
        for keys, band in ((slice(0, at), FULL), (slice(at, k.shape[1]), mask)):
            if keys.start == keys.stop:
                continue
            here = kernel.forward(q, k[:, keys].contiguous(), v[:, keys].contiguous(), call.under(band))
            merge(out, lse, out, lse, *here)
        return out.to(q.dtype), lse

    def _local_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
        spec = self.experiment.workload
        if self.kernel != "auto" or isinstance(spec.mask, Mask):
            return self.work.plan.kernel
        return select("auto", Shape.of(q, k, v, softcap=spec.softcap is not None), (spec.mask,))

    def scales_of_shard(self, name: str) -> Tensor:
        """The scales of this rank's rows of a tensor, `[B, s, H]`. A head that no rank compared gets the largest scale
        among the compared heads of its token. Collective."""
        scales = self.scales[name]
        if self.me.world > 1:
            dist.all_reduce(scales)
        compared = scales.amax(-1, keepdim=True)
        if scales.dim() == 3:
            compared = compared.amax(0, keepdim=True)
        scales = torch.where(scales > 0, scales, compared).unsqueeze(-1)
        return self.work.shard(name, scales).squeeze(-1)

    def verdict(self, without_lse: str | None) -> dict[str, Any]:
        """The errors over all ranks against the tolerances. without_lse: why there is no LSE to compare."""
        everyone = self.me.gather((self.errors, self.local))
        errors = {name: total(of_all[name] for of_all, _ in everyone) for name in self.errors}
        tensors, why = {}, []
        for name in self.local:
            local = total(of_local[name] for _, of_local in everyone)
            why += errors[name].faults(name, self.limits[name], local)
            more = {"local_rel_l2": local.rel_l2, "local_worst_row": local.row}
            tensors[name] = errors[name].plain() | more | {"ratio_to_local": errors[name].ratio_to(local)}
        lse: dict[str, Any] = {"checked": False, "why": without_lse}
        if "lse" in errors:
            error, most = errors["lse"], self.experiment.dtype.lse
            lse = {"checked": True, "why": None, "max_abs": error.worst}
            lse |= {name: error.plain()[name] for name in ("worst_row", "worst_row_at")}
            if not error.row <= most:
                why.append(f"lse error {error.row:.2e} of 1 + |lse| > {most:.0e} at {described(error.row_at)}")
        out, grad, given = self.limits["out"], self.limits["dq"], self.experiment.dtype
        tolerance: dict[str, float | None] = {
            "atol": out.absolute,
            "rel_l2": out.rel_l2,
            "row": out.row,
            "gain": out.gain,
            "lse": given.lse,
        }
        tolerance |= {"grad_atol": grad.absolute, "grad_rel_l2": grad.rel_l2, "grad_row": grad.row}
        tolerance |= {"error_ratio": given.error_ratio}
        text = "; ".join(why) or None
        return {"passed": not why, "why": text, "tensors": tensors, "lse": lse, "tolerance": tolerance}
