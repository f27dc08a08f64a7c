"""Comparing a call's outputs with the reference, piece by piece, and what is too far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels import Call, Shape, select
from runner.config.experiment import AttentionCall, Experiment
from runner.launch.rank import Rank
from runner.measure import pieces
from runner.measure.attention_work import ROLES, AttentionWork
from runner.measure.errors import Error, Tolerance, described
from runner.measure.pieces import Piece
from runner.measure.reference import Reference


def tolerances(experiment: Experiment) -> dict[str, Tolerance]:
    """The tolerances of out, dq, dk and dv."""
    given, spec = experiment.dtype, experiment.workload
    atol = given.gqa_atol if spec.heads != spec.kv_heads else given.atol
    common = given.gain, given.error_ratio
    of_gradients = Tolerance(given.grad_rel_l2, max(given.grad_atol, atol), given.grad_row, *common)
    of_out = Tolerance(given.rel_l2, atol, given.row, *common)
    return {"out": of_out, **dict.fromkeys(("dq", "dk", "dv"), of_gradients)}


class Comparison:
    """Whole outputs against the references of this rank's pieces."""

    def __init__(
        self, me: Rank, experiment: Experiment, work: AttentionWork, whole: dict[str, Tensor], with_scales: bool
    ):
        self.me, self.experiment, self.work, self.whole = me, experiment, work, whole
        self.limits = tolerances(experiment)
        self.errors = {name: Error() for name in whole}
        self.local = {name: Error() for name in whole if name != "lse"}
        # scales of the rows that this rank compares: `[B, S, H]`, packed `[T, H]`
        self.scales = {name: whole[name].new_zeros(whole[name].shape[:-1], dtype=torch.float32) for name in self.local}
        if not with_scales:
            self.scales = {}
        # an external package has its own meaning of kernel=auto
        own = experiment.kernel == "auto" and not work.fn.variant.external
        self.asked = "auto" if own else work.plan.kernel.name

    def add(self, piece: Piece, dtype: torch.dtype) -> None:
        """Compares a piece; computes its reference if it has none."""
        spec, device = self.experiment.workload, self.me.device
        new = self.asked not in piece.local
        if new or piece.reference is None:
            inputs = pieces.piece_inputs(spec, piece, self.experiment.seed, device, self.work.backward)
        if piece.reference is None:
            piece.reference = pieces.reference(inputs, self.experiment, dtype).to("cpu")
        reference = piece.reference.to(device)
        for name, x in self.whole.items():
            heads = 1 if ROLES[name] == "kv" else spec.heads // spec.kv_heads
            value, scales, here = reference.values[name], reference.scales(name), piece.of(x, heads)
            if name == "lse":
                here, value = without_keys(here, value.unsqueeze(-1))
            rtol = self.limits[name].absolute if name in self.limits else 0.0
            self.errors[name].add(here, value, scales, rtol, piece.places(heads))
            if name in self.scales:
                piece.put(self.scales[name], heads, scales)
        if new:
            piece.local[self.asked] = self._local_errors(piece, inputs, reference)
        self.local = {name: error.plus(piece.local[self.asked][name]) for name, error in self.local.items()}

    def _local_errors(self, piece: Piece, inputs: dict[str, Tensor], reference: Reference) -> dict[str, Error]:
        errors = {}
        for name, x in _local(inputs, self.experiment.workload, self.asked, self.work).items():
            errors[name] = Error()
            found = piece.mine(x if x.dim() == 3 else x[0])
            rtol, places = self.limits[name].absolute, piece.places(found.shape[1])
            errors[name].add(found, reference.values[name], reference.scales(name), rtol, places)
        return errors

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
        for name, limit in self.limits.items():
            if name not in errors:
                continue
            local = total(of_local[name] for _, of_local in everyone)
            why += errors[name].faults(name, limit, local)
            more = {"local_rel_l2": local.rel_l2, "local_worst_row": local.row}
            tensors[name] = errors[name].plain() | more | {"ratio_to_local": errors[name].ratio_to(local)}
        lse, lse_fault = self._lse_verdict(errors.get("lse"), without_lse)
        why += lse_fault
        out, gradient = self.limits["out"], self.limits["dq"]
        tolerance = {"atol": out.absolute, "grad_atol": gradient.absolute}
        names = ("rel_l2", "grad_rel_l2", "row", "grad_row", "gain", "lse", "error_ratio")
        tolerance |= {name: getattr(self.experiment.dtype, name) for name in names}
        return {
            "passed": not why,
            "why": "; ".join(why) or None,
            "tensors": tensors,
            "lse": lse,
            "tolerance": tolerance,
        }

    def _lse_verdict(self, error: Error | None, without: str | None) -> tuple[dict[str, Any], list[str]]:
        """What the result says of the LSE, and why it is wrong."""
        if error is None:
            return {"checked": False, "why": without}, []
        most = self.experiment.dtype.lse
        found = {"checked": True, "why": None, "max_abs": error.worst, "worst_row": error.row}
        found["worst_row_at"] = error.plain()["worst_row_at"]
        if error.row <= most:
            return found, []
        return found, [f"lse error {error.row:.2e} of 1 + |lse| > {most:.0e} at {described(error.row_at)}"]


def total(errors: Iterable[Error]) -> Error:
    found = Error()
    for error in errors:
        found = found.plus(error)
    return found


def without_keys(x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """x and expected, with 0 where both are -inf: the LSE of a row without keys."""
    both = (x == -torch.inf) & (expected == -torch.inf)
    return x.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)


def _local(inputs: dict[str, Tensor], spec: AttentionCall, asked: str, work: AttentionWork) -> dict[str, Tensor]:
    """out, dq, dk, dv of a call of the kernel on one device, with a batch dim of 1 unless packed."""
    packed = spec.seqlens is not None
    q, k, v, *dout = (x if packed else x.unsqueeze(0) for x in inputs.values())
    kernel = select(asked, Shape.of(q, k), (spec.mask,)) if asked == "auto" else work.plan.kernel
    scale = spec.head_dim**-0.5
    call = Call(scale, spec.mask)
    if spec.seqlens is not None:
        call = Call.of_packed(scale, spec.mask, spec.seqlens, spec.seqlens, q.device)
    out, lse = kernel.forward(q, k, v, call)
    found = {"out": out}
    if dout:
        found |= dict(zip(("dq", "dk", "dv"), kernel.backward(dout[0], q, k, v, out, lse, call), strict=True))
    return found
