"""Multi-head dilated attention as a workload: the module, with its projections and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.api import ContextParallel
from attention.models import DilatedMultihead
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork
from runner.measure.model_work import by_rows


class ModuleWork(AttentionWork):
    """The passes of `attention.models.DilatedMultihead` on x `[B, S, H D]`, which every rank has whole. Its outputs are out and the
    gradients of x and of every parameter. The initial biases are 0, so that out is odd in x. dtype: of the computation, if it is not
    the run's."""

    def __init__(
        self, me: Rank, experiment: Experiment, fn: ContextParallel | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(me, experiment, fn)
        work = self.spec
        torch.manual_seed(experiment.seed)
        made = DilatedMultihead(
            work.heads * work.head_dim, work.heads, work.kv_heads, experiment.variant, **experiment.options
        )
        dtype = self.q.dtype if dtype is None else dtype
        self.module = made.to(me.device, self.q.dtype).to(dtype)
        self.module.attend = self.fn
        self.x = self.q.detach().flatten(-2).to(dtype).requires_grad_(self.backward)
        self.dout = None if self.dout is None else self.dout.flatten(-2).to(dtype)
        self.q = self.k = self.v = self.x.new_empty(0)  # the module makes them
        self.inputs = [self.x, *([] if self.dout is None else [self.dout])]
        self.named = dict(self.module.named_parameters())
        self.wanted = [self.x, *self.named.values()]

    def call(self) -> Tensor:
        out: Tensor = self.module(self.x, causal=self.spec.causal)
        return out

    def by_name(self, out: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        outputs = {"out": out, **dict(zip(["dx", *(f"d{x}" for x in self.named)], gradients, strict=False))}
        # out and dx as `[B, S, 1, hidden]`, gradients of parameters by rows
        return {name: x.detach().unsqueeze(2) if name in ("out", "dx") else by_rows(x) for name, x in outputs.items()}

    def rows(self, name: str) -> Tensor:
        return torch.arange(self.spec.seq_len if name in ("out", "dx") else len(by_rows(self.named[name[1:]])))
