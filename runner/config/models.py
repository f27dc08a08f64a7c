"""The model of a run, as conf/model/ and results have it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.config import huggingface
from runner.models import Config, preset

if TYPE_CHECKING:
    from runner.config.experiment import AttentionCall

NONE = "none"  # attention alone
HF = "hf"  # any causal LM of transformers


@dataclass(frozen=True)
class Model:
    """A preset, with sizes of its own where they are not None, and heads, sinks, softcap and scale of the run's call. own_masks: every layer has the preset's mask; else the
    decoder's layers have the call's. steps: the fewest of a training run."""

    name: str
    own_masks: bool
    recompute: bool
    steps: int
    learning_rate: float
    layers: int | None = None
    hidden: int | None = None
    mlp: int | None = None
    vocabulary: int | None = None
    huggingface: str | None = None  # of model=hf: what `huggingface.loaded` returned

    @property
    def sizes(self) -> Config:
        """Of the preset or of transformers' configuration, before those of the call."""
        return preset(self.name) if self.huggingface is None else huggingface.config_of(self.huggingface, self.layers)

    def config(self, call: AttentionCall) -> Config:
        """The sizes, with the call's heads. Raises ValueError for sizes that do not fit together."""
        sizes = {key: getattr(self, key) for key in ("layers", "hidden", "mlp", "vocabulary")}
        sizes = {} if self.huggingface else sizes  # has them already
        heads = {key: getattr(call, key) for key in ("heads", "kv_heads", "head_dim", "v_head_dim")}
        if self.sizes.latent:
            heads.pop("kv_heads")
        found = replace(self.sizes, **{key: x for key, x in sizes.items() if x is not None}, **heads)
        found = found if self.own_masks else found.under(call.whole_mask)
        how: dict[str, Any] = {"sinks": call.sinks, "softcap": call.softcap, "scale": call.scale}
        return replace(found, kinds=tuple(replace(kind, **how) for kind in found.kinds))
