"""A whole model as a workload: forward, backward and optimizer step of its training loop, or its forward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import profiling
from attention.api import ContextParallel
from attention.executors.plan import Plan
from attention.transports import Transport
from runner.config.experiment import AttentionCall, Experiment
from runner.config.huggingface import without_dropout
from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank
from runner.measure import ceilings
from runner.measure.attention_work import DTYPES, build, build_ms
from runner.measure.huggingface import Decoder
from runner.measure.text import excerpts
from runner.measure.workload import Passes
from runner.models import Batch, Kind, Transformer, reduce_gradients, shard
from runner.peers import Package

BATCHES = 16  # different ones, which training reads in turn
BETAS = 0.9, 0.95
GUESSED = "token losses"  # an output
REACHED = 0.3  # of a matrix product's rate, by a model


class ModelWork:
    """A rank's part of a model's training loop: implements `workload.Workload`. Parameters, gradients and AdamW's states are in
    the run's dtype.

    Its outputs are those of the first step after `restart`: the loss and every parameter's gradient or, without a backward,
    each token's loss. dtype: of the computation, if it is not the run's. Raises UnsupportedHere if the kernel cannot do
    the call."""

    def __init__(
        self, me: Rank, experiment: Experiment, fn: ContextParallel | None = None, dtype: torch.dtype | None = None
    ):
        assert experiment.model is not None
        self.me, self.experiment, self.fn = me, experiment, build(experiment) if fn is None else fn
        self.spec, self.about = experiment.workload, experiment.model
        self.config = self.about.config(self.spec)
        self.given = DTYPES[self.spec.dtype]
        self.dtype = self.given if dtype is None else dtype
        self.backward = experiment.backward
        self.passes: tuple[str, ...] = ("forward", "backward", "optimizer") if self.backward else ("forward",)
        self.has_phases = not experiment.is_peer
        self.batches = [self._batch(number) for number in range(BATCHES)]
        self.sign = 1
        self.loss: Tensor | None = None
        self.logits: Tensor | None = None
        self.restart()
        self.plans = {kind.mask: self._plan(kind) for kind in dict.fromkeys(self.config.kinds)}
        self.plan = self.plans[self.config.kind(0).mask]

    def _batch(self, number: int) -> Batch:
        """A global batch's part: the excerpt and its next bytes. An encoder reads what stands before it."""
        tokens, reads = self.spec.seq_len, 2 if self.config.encoder_layers else 1
        whole = excerpts(number, self.spec.batch, reads * tokens + 1).to(self.me.device)
        ids, labels = (whole[:, (reads - 1) * tokens + i :][:, :tokens] for i in (0, 1))
        return shard(self.fn, ids, labels, whole[:, :tokens] if reads == 2 else None)

    def restart(self) -> None:
        """Back to the first step, with the parameters of the seed."""
        for name in ("model", "optimizer"):
            self.__dict__.pop(name, None)  # freed first
        torch.manual_seed(self.experiment.seed)
        with torch.device(self.me.device):
            model = self._model()
        self.model = model.to(self.given).to(self.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.about.learning_rate, BETAS, fused=self.me.device.type == "cuda"
        )
        self.steps = 0
        self.losses: list[Tensor] = []  # this rank's part of each step's
        self.release()

    def _model(self) -> Transformer | Decoder:
        if self.about.huggingface is None:
            return Transformer(self.config, self.fn, self.about.recompute)
        return Decoder(self.about.huggingface, self.config, self.fn, self.about.recompute, self.dtype)

    def _plan(self, kind: Kind) -> Plan:
        """Of the attention of such a layer."""
        shape = (*self.batches[0].ids.shape,)
        heads = (self.config.heads, self.config.head_dim), (self.config.key_heads, self.config.head_dim)
        sizes = (*heads, (self.config.key_heads, self.config.value_dim))
        q, k, v = (torch.empty(*shape, *size, dtype=self.dtype, device=self.me.device) for size in sizes)
        options: dict[str, Any] = {"mask": kind.mask, "softcap": kind.softcap, "scale": kind.scale}
        options["sinks"] = q.new_zeros(self.config.heads) if kind.sinks else None
        try:
            return self.fn.plan(*(x.requires_grad_(self.backward) for x in (q, k, v)), **options)
        except ValueError as error:
            raise UnsupportedHere(str(error)) from None

    @property
    def inputs(self) -> list[Tensor]:
        """What a step starts with: parameters, AdamW's states, and the text."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return [*self.model.parameters(), *states, *(x for each in self.batches for x in (each.ids, each.labels))]

    def run(self, which: str) -> None:
        if which == "forward":
            self._forward()
        elif which == "backward":
            self._backward(keep=False)
        else:
            with profiling.phase("comp_optimizer"):
                self.optimizer.step()
            self.steps += 1

    def _forward(self) -> None:
        self.release()
        self.first = self.steps == 0
        batch = self.batches[self.steps % BATCHES]
        with torch.set_grad_enabled(self.backward):
            if not self.backward:
                self.logits = self.model(batch)
                return
            self.loss = profiling.layer("comp_loss", batch.loss, self.model(batch))
            self.losses.append(self.loss.detach())

    def _backward(self, keep: bool) -> None:
        assert self.loss is not None, "backward before forward"
        self.loss.backward(torch.full_like(self.loss, self.sign), retain_graph=keep)
        if self.fn.world > 1:
            reduce_gradients(self.model, self.fn.group)
        if not keep:
            self.loss = self.loss.detach()

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            if which == "backward":
                self.optimizer.zero_grad(set_to_none=True)
                self._backward(keep=True)
            else:
                self.run(which)

    def outputs(self) -> dict[str, Tensor]:
        """Of the first step, each `[rows, 1, D]`: `loss`, and the gradient of each parameter by its name; without a backward
        each token's loss, less that of a uniform guess. Collective."""
        if not self.first:
            return {}
        if not self.backward:
            return {} if self.logits is None else {GUESSED: self.sign * self._token_losses(self.logits)}
        if self.loss is None or any(p.grad is None for p in self.model.parameters()):
            return {}
        loss = self.losses[0].double()
        if self.fn.world > 1:
            torch.distributed.all_reduce(loss, group=self.fn.group)
        found = {"loss": self.sign * loss.view(1, 1, 1)}
        return found | {name: by_rows(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}

    def _token_losses(self, logits: Tensor) -> Tensor:
        upcast = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return self.less_guess(F.cross_entropy(upcast, self.batches[0].labels.flatten(), reduction="none"))

    def less_guess(self, losses: Tensor) -> Tensor:
        """Losses of tokens as `[tokens, 1, 1]`, less that of a uniform guess."""
        return (losses - math.log(self.config.vocabulary)).view(-1, 1, 1)

    def rows(self, name: str) -> Tensor:
        if name == GUESSED:
            return self.batches[0].positions.flatten().cpu()
        return torch.arange(1 if name == "loss" else len(by_rows(dict(self.model.named_parameters())[name])))

    def negate(self) -> None:
        """Restarts with the other sign of the loss, so that every output changes its sign."""
        self.sign = -self.sign
        self.restart()

    def release(self) -> None:
        self.loss = self.logits = None
        self.first = False
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def left(self) -> Any:
        return self.loss, self.logits

    @left.setter
    def left(self, left: Any) -> None:
        self.loss, self.logits = left

    def more(self) -> dict[str, Any]:
        """The field `model` of the result. A training goes on to its number of steps. Collective."""
        while self.backward and self.steps < self.about.steps:
            for which in self.passes:
                self.run(which)
        parameters = [*self.model.parameters()]
        numbers = sum(p.numel() for p in parameters)
        found = {"name": self.about.name, "parameters": numbers, "parameter_bytes": numbers * self.dtype.itemsize}
        found |= {"matrix_parameters": self.config.matrices, "text": "bytes of Coriolanus"}
        return {"model": found | {"loss_curve": self._curve()}}

    def _curve(self) -> list[float]:
        if not self.losses:
            return []
        losses = torch.stack(self.losses).double()
        if self.fn.world > 1:
            torch.distributed.all_reduce(losses, group=self.fn.group)
        return [float(x) for x in losses.tolist()]

    @property
    def transport(self) -> Transport:
        return self.plan.transport

    def resolved(self) -> dict[str, Any]:
        return self.plan.options.plain()

    def report(self) -> dict[str, Any]:
        kernel, chosen = self.plan.kernel.name, self.fn.variant
        note = chosen.served(kernel) if isinstance(chosen, Package) else self.transport.note
        if not all(kind.mask.is_causal(self.spec.seq_len) for kind in self.config.kinds):
            note = "a token sees the one that it is to predict, so the loss says nothing of the model"
        if self.about.huggingface and (zeroed := without_dropout(self.about.huggingface)):
            note = "; ".join(
                [*filter(None, [note]), f"without dropout: {', '.join(zeroed)} of the type's defaults set to 0"]
            )
        return {"kernel": kernel, "transport": self.transport.name, "note": note}

    def mask_build_ms(self) -> float | None:
        """Of the decoder's masks, each once: its layers share it."""
        built = [ms for plan in self.plans.values() if (ms := build_ms(plan)) is not None]
        return sum(built) if built else None

    def flops(self) -> float:
        whole = self.config.flops(self.spec.batch, self.spec.seq_len) * (3 if self.backward else 1)
        return whole / max(self.fn.world, 1)

    def rate(self) -> float:
        return REACHED * ceilings.ceilings(self.me, self.spec.dtype)["matmul_tflops"] * 1e12

    def layered(self, layers: int, new_packs: bool) -> Passes:
        raise AssertionError("refused by the rules of models")

    def new_pack(self, sign: int) -> AbstractContextManager[AttentionCall]:
        raise AssertionError("refused by the rules of models")


def by_rows(x: Tensor) -> Tensor:
    """A matrix as its rows `[rows, 1, D]`, a vector as one row."""
    return x.detach().reshape(len(x) if x.dim() == 2 else 1, 1, -1)
