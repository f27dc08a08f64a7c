"""A causal LM of transformers with random weights, in the place of our transformer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from attention import masks, profiling
from attention.api import ContextParallel
from attention.huggingface.batch import Split
from attention.huggingface.masks import LayerMask
from attention.masks.band import FULL
from attention.masks.mask import Banded
from runner.config.huggingface import model_of
from runner.config.values import UnsupportedHere
from runner.models import Batch, Config
from runner.models.language_model import LanguageModel
from runner.models.transformer import HEAD, PROJECTIONS


class Decoder(LanguageModel):
    """The model of `runner.config.huggingface.loaded`, with the attention of `fn`. The forward raises UnsupportedHere for what
    `attention.huggingface` refuses, and for a layer that attends otherwise than `config` says: its FLOPs would be those of another
    model."""

    def __init__(self, text: str, config: Config, fn: ContextParallel, recompute: bool, dtype: torch.dtype):
        from transformers import AutoConfig

        from attention.huggingface import context_parallel

        super().__init__()
        sizes = AutoConfig.for_model(**json.loads(text)["config"] | {"dtype": "float32"})
        if getattr(sizes, "layer_types", None):
            sizes.layer_types = sizes.layer_types[: config.layers]
        sizes.num_hidden_layers = config.layers
        self.model = model_of(sizes).train()
        if dtype == torch.float64 and hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # grouped products have no fp64
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.cp = context_parallel(self.model, fn)
        self.config = config
        self.head = self.model.get_output_embeddings()
        self.head_type = type(self.head)
        self.head.__class__ = type(self.head_type.__name__, (self.head_type,), {"forward": _passed})
        self.changes_logits = False  # known from the first forward
        self.blocks = self._mark_phases()

    def _mark_phases(self) -> list[nn.Module]:
        """As in `runner.models.Transformer`. What attends has a `layer_idx`; beside it in a layer is the MLP. The layers."""
        marked, layers = dict[nn.Module, str](), []
        for module in self.model.modules():
            children = [child for child in module.children() if "norm" not in type(child).__name__.lower()]
            others = [child for child in children if not hasattr(child, "layer_idx")]
            if len(others) < len(children) and not isinstance(module, nn.ModuleList):
                marked |= dict.fromkeys(others, "comp_mlp")
                layers.append(module)
            elif hasattr(module, "layer_idx"):
                marked |= dict.fromkeys(others, PROJECTIONS)
        for module, name in marked.items():
            module.__class__ = _in_phase(type(module), name)
        return layers

    def hidden(self, batch: Batch) -> Tensor:
        """What the head takes, or the logits of a model that changes them after its head, as by a softcap."""
        given = self._output(batch)
        if self.changes_logits or hasattr(given, "passed"):
            return given
        self.changes_logits = True
        self.head.__class__ = _in_phase(self.head_type, HEAD)
        return self._output(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.changes_logits:
            return hidden
        return profiling.layer(HEAD, partial(self.head_type.forward, self.head), hidden)

    def _output(self, batch: Batch) -> Tensor:
        shape = len(batch.ids), self.config.context
        split = CheckedSplit(self.cp.fn, shape, positions=batch.positions, config=self.config)
        inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "context_parallel": split}
        if "use_cache" in signature(self.model.forward).parameters:
            inputs["use_cache"] = False
        try:
            return self.model(**inputs).logits
        except ValueError as error:
            raise UnsupportedHere(f"model=hf: {error}") from None


def _passed(head: nn.Module, hidden: Tensor) -> Tensor:
    """The forward of a head that leaves the logits to `Decoder.logits`: a model that changes them has other tensors."""
    hidden.passed = True  # type: ignore[attr-defined]
    return hidden


def _in_phase(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """The class, whose forward and backward are such a phase. A forward of the module's own would keep it alive."""

    def forward(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        return profiling.layer(name, partial(kind.forward, module), *inputs, **named)

    return type(kind.__name__, (kind,), {"forward": forward})


@dataclass(frozen=True)
class CheckedSplit(Split):
    """Raises ValueError for a layer that attends otherwise than `config` says."""

    config: Config = field(kw_only=True)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, layer: LayerMask, **options: Any) -> Tensor:
        c, number = self.config, getattr(module, "layer_idx", 0)
        kind = c.kind(number)
        facts = {  # which the FLOPs depend on: the layer's, and as the configuration was read
            "heads": (q.shape[2], c.heads),
            "KV heads": (k.shape[2], c.key_heads),
            "head dim": (q.shape[3], c.head_dim),
            "value dim": (v.shape[3], c.value_dim),
            "mask": (masks.chunked(layer.chunk) if layer.chunk else Banded(layer.band or FULL), kind.mask),
            "softcap": (options.get("softcap"), kind.softcap),
            "sinks": ("sinks" in options, kind.sinks),
        }
        if wrong := [f"{what} {fact}, read as {read}" for what, (fact, read) in facts.items() if fact != read]:
            raise ValueError(f"layer {number} attends with {wrong[0]} from its configuration; take another model")
        return super().attend(module, q, k, v, layer, **options)
