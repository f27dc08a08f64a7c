"""A causal LM of transformers with random weights, in the place of our transformer."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from attention.api import ContextParallel
from attention.models import Batch, Config
from attention.models.split import Split


class Decoder(nn.Module):
    """The model of a configuration as JSON, with the attention of `fn`. As `attention.models.Transformer`, from a batch to
    this rank's logits."""

    def __init__(self, text: str, config: Config, fn: ContextParallel, recompute: bool, dtype: torch.dtype):
        from transformers import AutoConfig, AutoModelForCausalLM

        from attention.huggingface import context_parallel

        super().__init__()
        given = json.loads(text) | {"num_hidden_layers": config.layers, "dtype": "float32"}
        if given.get("layer_types"):
            given["layer_types"] = given["layer_types"][: config.layers]
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).train()
        if dtype == torch.float64 and hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # grouped products have no fp64
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.cp = context_parallel(self.model, fn)
        self.config = config

    def hidden(self, batch: Batch) -> Tensor:
        """Logits already: a model may scale or cap them in a way of its own."""
        how = Split((len(batch.ids), self.config.context))
        given: dict[str, Any] = {"use_cache": False, "context_parallel": how}
        return self.model(input_ids=batch.ids, position_ids=batch.positions, **given).logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, batch: Batch) -> Tensor:
        return self.logits(self.hidden(batch))
