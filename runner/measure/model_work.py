"""A whole model as a workload: forward, backward and optimizer step of its training loop, or its forward."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import profiling
from attention.executors.plan import Plan
from runner.config.huggingface import without_dropout
from runner.measure.huggingface import Decoder
from runner.measure.workload import DTYPES, Workload, by_rows
from runner.models import Batch, Kind, Transformer, reduce_gradients, shard
from runner.record.fields import Model

BATCHES = 16  # different ones, which training reads in turn
BETAS = 0.9, 0.95
GUESSED = "token losses"  # an output
TEXT = "coriolanus.txt"  # of the first scenes of Coriolanus (William Shakespeare, about 1608; public domain, Globe edition of 1864)


class ModelWork(Workload):
    """A rank's part of a model's training loop. Parameters, gradients and AdamW's states are in the run's dtype.

    Its outputs are those of the first step after `restart`: the loss and every parameter's gradient or, without a backward,
    each token's loss."""

    results = ("loss", "logits")
    loss: Tensor | None
    logits: Tensor | None

    def prepare(self) -> None:
        assert self.experiment.model is not None
        self.about = self.experiment.model
        self.config = self.about.config(self.spec)
        self.sharded = self.about.sharded and self.fn.world > 1
        self.passes = ("forward", "backward", "optimizer") if self.backward else ("forward",)
        self.batches = [self._batch(number) for number in range(BATCHES)]
        self.sign = 1
        self.restart()
        self.plans = [self._plan(kind) for kind in dict.fromkeys(self.config.kinds)]

    def _batch(self, number: int) -> Batch:
        """A global batch's part: the excerpt and its next bytes. An encoder reads what stands before it."""
        tokens, reads = self.spec.seq_len, 2 if self.config.encoder_layers else 1
        whole = excerpts(number, self.spec.batch, reads * tokens + 1).to(self.me.device)
        ids, labels = (whole[:, (reads - 1) * tokens + i :][:, :tokens] for i in (0, 1))
        return shard(self.fn, ids, labels, whole[:, :tokens] if reads == 2 else None)

    def restart(self) -> None:
        """Back to the first step, with the parameters of the seed."""
        for name in ("model", "optimizer"):
            vars(self).pop(name, None)  # freed first
        torch.manual_seed(self.experiment.seed)
        text, about = self.about.huggingface, (self.config, self.fn, self.about.recompute)
        with torch.device(self.me.device):
            model = Transformer(*about) if text is None else Decoder(text, *about, self.dtype)
        self.model = model.to(DTYPES[self.spec.dtype]).to(self.dtype)
        self.model.offload = self.about.offload
        if self.sharded:
            self.model.shard_parameters(self.me.device)
        options = self.about.learning_rate, BETAS
        self.optimizer = torch.optim.AdamW(self.model.parameters(), *options, fused=self.me.device.type == "cuda")
        self.steps = 0
        self.losses: list[Tensor] = []  # this rank's part of each step's
        self.release()

    def _plan(self, kind: Kind) -> Plan:
        """Of the attention of such a layer."""
        c, shape = self.config, self.batches[0].ids.shape
        sizes = (c.heads, c.head_dim), (c.key_heads, c.head_dim), (c.key_heads, c.value_dim)
        about: dict[str, Any] = {"dtype": self.dtype, "device": self.me.device, "requires_grad": self.backward}
        q, k, v = (torch.empty(*shape, *size, **about) for size in sizes)
        sinks = q.new_zeros(c.heads) if kind.sinks else None
        return self.planned(q, k, v, {"mask": kind.mask, "softcap": kind.softcap, "scale": kind.scale, "sinks": sinks})

    @property
    def inputs(self) -> list[Tensor]:
        """What a step starts with: this rank's parameters and AdamW's states, and the text."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        text = [x for each in self.batches for x in (each.ids, each.labels)]
        return [*map(_local, [*self.model.parameters(), *states]), *text]

    def run(self, which: str, keep: bool = False) -> None:
        if which == "forward":
            self._forward()
        elif which == "optimizer":
            with profiling.phase("comp_optimizer"):
                self.optimizer.step()
            self.steps += 1
        else:
            assert self.loss is not None, "backward before forward"
            if keep:  # it is repeated
                self.optimizer.zero_grad(set_to_none=True)
            self.loss.backward(torch.full_like(self.loss, self.sign), retain_graph=keep)
            if self.fn.world > 1 and not self.sharded:
                reduce_gradients(self.model, self.fn.group)
            if not keep:
                self.loss = self.loss.detach()

    def _forward(self) -> None:
        self.release()
        self.first = self.steps == 0
        batch = self.batches[self.steps % BATCHES]
        if self.backward:
            self.loss = self.model.loss(batch)
            self.losses[self.steps :] = [self.loss.detach()]  # timing=simple repeats forwards
        else:
            with torch.no_grad():
                self.logits = self.model(batch)

    def outputs(self) -> dict[str, Tensor]:
        """Of the first step, each `[rows, 1, D]`: `loss`, and the gradient of each parameter by its name; without a backward
        each token's loss, less that of a uniform guess. Collective."""
        if self.first and self.logits is not None:
            logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).flatten(0, 1)
            losses = F.cross_entropy(logits, self.batches[0].labels.flatten(), reduction="none")
            return {GUESSED: self.sign * self.less_guess(losses)}
        parameters: dict[str, Any] = dict(self.model.named_parameters())
        gradients = {
            name: by_rows(p.grad.full_tensor() if self.sharded else p.grad)
            for name, p in parameters.items()
            if p.grad is not None
        }
        if not self.first or self.loss is None or len(gradients) < len(parameters):
            return {}
        return {"loss": self.sign * self._whole_losses()[:1].view(1, 1, 1), **gradients}

    def _whole_losses(self) -> Tensor:
        """Each step's loss, of all ranks. Collective."""
        losses = torch.stack(self.losses).double()
        if self.fn.world > 1:
            torch.distributed.all_reduce(losses, group=self.fn.group)
        return losses

    def less_guess(self, losses: Tensor) -> Tensor:
        """Losses of tokens as `[tokens, 1, 1]`, less that of a uniform guess."""
        return (losses - math.log(self.config.vocabulary)).view(-1, 1, 1)

    def rows(self, name: str, output: Tensor) -> Tensor:
        return self.batches[0].positions.flatten().cpu() if name == GUESSED else super().rows(name, output)

    def negate(self) -> None:
        """Restarts with the other sign of the loss, so that every output changes its sign."""
        self.sign = -self.sign
        self.restart()

    def release(self) -> None:
        super().release()
        self.first = False
        self.optimizer.zero_grad(set_to_none=True)

    def trained(self) -> Model:
        """A training goes on to its number of steps."""
        while self.backward and self.steps < self.about.steps:
            for which in self.passes:
                self.run(which)
        numbers = sum(p.numel() for p in self.model.parameters())
        return Model(
            name=self.about.name,
            text="bytes of Coriolanus",
            parameters=numbers,
            matrix_parameters=self.config.matrices,
            parameter_bytes=sum(_local(p).nbytes for p in self.model.parameters()),
            loss_curve=self._whole_losses().tolist() if self.losses else [],
        )

    def notes(self) -> list[str]:
        notes = []
        if not all(kind.mask.is_causal(self.spec.seq_len) for kind in self.config.kinds):
            notes.append("a token sees the one that it is to predict, so the loss says nothing of the model")
        if self.about.huggingface and (zeroed := without_dropout(self.about.huggingface)):
            notes.append(f"without dropout: {', '.join(zeroed)} of the type's defaults set to 0")
        return notes


def _local(x: Any) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    # a DTensor is known by its method: to import its type takes half a second
    return x.to_local() if hasattr(x, "to_local") else x


@cache
def whole_text() -> Tensor:
    """The bytes that models are trained on, int64 `[n]`. Not to be changed."""
    return torch.tensor([*Path(__file__).with_name(TEXT).read_bytes()])


def excerpts(number: int, batch: int, tokens: int) -> Tensor:
    """The `number`-th global batch of `batch` excerpts of `tokens` bytes, `[batch, tokens]`. Each begins where the one
    before ends, and after the end of the text comes its beginning."""
    whole = whole_text()
    starts = (number * batch + torch.arange(batch)) * tokens
    return whole[(starts[:, None] + torch.arange(tokens)) % len(whole)]
