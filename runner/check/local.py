"""Local calls: the same work on one device, with the same kernel in the same dtype. Their errors are what one device has anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import kernels
from attention.masks.mask import Mask
from runner.check.pieces import HeadPiece
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import GRADIENTS, SINKS, AttentionWork
from runner.measure.timing import iterate
from runner.measure.workload import alone
from runner.measure.workloads import on_one_device

OPTIONS = ("causal", "window", "cu_seqlens", "scale", "softcap", "mask")  # of a call on one KV head


class Local:
    """The outputs of pieces. Of dilated attention, whose heads differ, all heads are one call; else each piece is."""

    def __init__(self, me: Rank, experiment: Experiment, work: AttentionWork):
        # `auto` may choose another kernel for a piece; an external package's is a kernel of its own
        is_named = experiment.kernel != "auto" or experiment.is_peer or isinstance(experiment.workload.mask, Mask)
        name = work.plan.kernel.name if is_named and work.plan.kernel.name in kernels.names() else "auto"
        one = replace(on_one_device(experiment), kernel=name)
        self.spec, self.options, self.fn = experiment.workload, work.options, alone(one)
        self.whole: dict[str, Tensor] = {}
        if experiment.dilation is not None:
            together = AttentionWork(me, one, self.fn)
            iterate(together)
            self.whole = together.outputs()

    def outputs(self, piece: HeadPiece, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """out, dq, dk and dv of this rank's tokens of a piece, and of all its tokens dsinks `[G]`. inputs: `pieces.piece_inputs`."""
        if self.whole:
            kv_heads, whole = self.spec.kv_heads, dict(self.whole)
            outputs = (
                {SINKS: whole.pop(SINKS).view(kv_heads, -1)[piece.head] * (piece.batch == 0)} if SINKS in whole else {}
            )
            return outputs | {name: piece.of(x, x.shape[-2] // kv_heads) for name, x in whole.items()}
        batched = self.spec.seqlens is None
        q, k, v, *douts = (inputs[x][None] if batched else inputs[x] for x in ("q", "k", "v", "dout") if x in inputs)
        options: dict[str, Any] = {name: self.options[name] for name in OPTIONS if name in self.options}
        wanted = [q, k, v]
        if "sinks" in inputs:
            options["sinks"] = inputs["sinks"]
            wanted.append(inputs["sinks"])
        if self.spec.q_len is not None:  # a prefix and the element's own keys are one sequence
            options["kv_tokens"] = k.shape[1]
        for x in wanted:
            x.requires_grad_(bool(douts))
        out = self.fn(q, k, v, **options)
        gradients = torch.autograd.grad(out, wanted, douts) if douts else ()
        outputs = {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=False))}
        return {name: x if name == SINKS else (x[0] if batched else x)[piece.rows] for name, x in outputs.items()}
