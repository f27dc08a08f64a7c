"""A causal LM of transformers with random weights, in the place of our transformer."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from attention.api import ContextParallel
from attention.models import Batch, Config
from attention.models.split import Split
from runner.config.values import UnsupportedHere


class Decoder(nn.Module):
    """The model of `runner.config.huggingface.loaded`, with the attention of `fn`. As `attention.models.Transformer`, from a batch
    to this rank's logits. The forward raises UnsupportedHere for what `attention.huggingface` refuses, and for a layer that
    attends otherwise than `config` says: its FLOPs would be those of another model."""

    def __init__(self, text: str, config: Config, fn: ContextParallel, recompute: bool, dtype: torch.dtype):
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        from attention.huggingface import context_parallel

        super().__init__()
        given = AutoConfig.for_model(**json.loads(text)["config"] | {"dtype": "float32"})
        if given.num_hidden_layers != config.layers:
            if getattr(given, "layer_types", None):
                given.layer_types = given.layer_types[: config.layers]
            given.num_hidden_layers = config.layers
        self.model = AutoModelForCausalLM.from_config(given).train()
        if dtype == torch.float64 and hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # grouped products have no fp64
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.cp = context_parallel(self.model, fn)
        AttentionInterface.register(self.model.config._attn_implementation, self._attend)
        self.config = config

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        config, layer = self.config, getattr(module, "layer_idx", 0)
        kind = config.kind(layer)
        asked = {
            "heads": ((query.shape[1], key.shape[1]), (config.heads, config.key_heads)),
            "head dims": ((query.shape[-1], value.shape[-1]), (config.head_dim, config.value_dim)),
            "causal": (attention_mask.causal, True),
            "window": (attention_mask.window[0], -1 if kind.mask.band is None else kind.mask.band.left),
            "softcap": (given.get("softcap"), kind.softcap),
            "sinks": (given.get("s_aux") is not None, kind.sinks),
        }
        for what, (model, read) in asked.items():
            if model != read:
                raise ValueError(
                    f"layer {layer} attends with {what} {model}, and its configuration was read as {read}; take another model"
                )
        return self.cp.attend(module, query, key, value, attention_mask, **given)

    def hidden(self, batch: Batch) -> Tensor:
        """Logits already: a model may scale or cap them in a way of its own."""
        how = Split((len(batch.ids), self.config.context))
        given: dict[str, Any] = {"use_cache": False, "context_parallel": how}
        try:
            return self.model(input_ids=batch.ids, position_ids=batch.positions, **given).logits
        except ValueError as error:
            raise UnsupportedHere(f"model=hf: {error}") from None

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, batch: Batch) -> Tensor:
        return self.logits(self.hidden(batch))
