"""The sizes of a model, how its layers attend, and the presets. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attention import masks
from attention.errors import nearest
from attention.geometry.options import check_heads
from attention.masks.mask import Mask
from runner.reading import read_yaml

CAUSAL = masks.causal()
MOST_LOGITS = 1 << 28  # that a training step holds at once: 1 GiB in fp32


@dataclass(frozen=True)
class Kind:
    """How a layer attends. mask: which keys a query sees. sinks: a learned logit for each head joins the softmax.
    softcap: scores become c tanh(score / c). scale: of the scores; None: head_dim^-0.5."""

    mask: Mask = CAUSAL
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The ranks of MLA's projections (DeepSeek-V2, 2024). rotary: the dims of a head that rotate; keys share theirs."""

    q: int
    kv: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """context: tokens that the model is made for, of the source and of the target each. mlp: hidden size of the SwiGLU;
    None: 4 times `hidden`. v_head_dim: None: head_dim. Layer i of the decoder attends as `kinds[i % len(kinds)]`.
    counted: `matrices` of a model that is built otherwise.
    encoder_layers: 0 for a decoder alone; the encoder and the cross attention see everything.

    Raises ValueError for sizes that do not fit together, and for dropout."""

    context: int
    layers: int
    heads: int
    hidden: int
    head_dim: int
    kv_heads: int | None = None
    v_head_dim: int | None = None
    mlp: int | None = None
    vocabulary: int = 50257
    rotary_base: float = 10_000.0
    kinds: tuple[Kind, ...] = (Kind(),)
    latent: Latent | None = None
    encoder_layers: int = 0
    dropout: float = 0.0
    counted: int | None = None

    def __post_init__(self) -> None:
        sizes = ("context", "layers", "heads", "hidden", "head_dim", "vocabulary", "kv_heads", "v_head_dim", "mlp")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        if self.dropout:
            raise ValueError(
                f"dropout={self.dropout}: attention has none, and ranks would draw what one rank does not; use dropout=0"
            )
        check_heads(self.heads, self.key_heads)
        rotary = self.head_dim if self.latent is None else self.latent.rotary
        if rotary % 2 or rotary > self.head_dim:
            name = "head_dim" if self.latent is None else "latent.rotary"
            raise ValueError(
                f"{name}={rotary}: rotary embedding needs an even number of at most head_dim={self.head_dim}"
            )
        if self.latent is not None and self.key_heads != self.heads:
            raise ValueError(
                f"kv_heads={self.kv_heads}: MLA makes a key for each head; use kv_heads={self.heads} or None"
            )
        if not self.kinds:
            raise ValueError("kinds=(): a layer needs one; give (Kind(),) for causal attention")

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def mlp_dim(self) -> int:
        return 4 * self.hidden if self.mlp is None else self.mlp

    @property
    def matrices(self) -> int:
        """The parameters of all matrices, each of which a token meets once: the embedding as the output layer."""
        if self.counted is not None:
            return self.counted
        heads = self.heads * self.head_dim, self.key_heads * (self.head_dim + self.value_dim)
        out, mlp = self.heads * self.value_dim * self.hidden, 3 * self.hidden * self.mlp_dim
        dense = self.hidden * sum(heads) + out
        own = dense if self.latent is None else self._latent_matrices(self.latent) + out
        encoder = self.encoder_layers * (own + mlp) + (self.layers * dense if self.encoder_layers else 0)
        return self.vocabulary * self.hidden + self.layers * (own + mlp) + encoder

    def _latent_matrices(self, latent: Latent) -> int:
        down = self.hidden * (latent.q + latent.kv + latent.rotary)
        up = latent.q * self.head_dim + latent.kv * (self.head_dim - latent.rotary + self.value_dim)
        return down + self.heads * up

    def flops(self, batch: int, tokens: int) -> int:
        """FLOPs of a forward over `[batch, tokens]` (a source of as many): 2 for each token and matrix parameter, and
        2 (D + Dv) for each pair and head that a layer's mask keeps. A model's backward counts twice that, whatever is
        computed again."""
        pairs = sum(self.kind(i).mask.pairs(tokens) for i in range(self.layers))
        if self.encoder_layers:
            pairs += (self.encoder_layers + self.layers) * tokens**2
        attended = self.heads * (self.head_dim + self.value_dim) * pairs
        return 2 * batch * (tokens * self.matrices + attended)

    def kind(self, layer: int) -> Kind:
        return self.kinds[layer % len(self.kinds)]

    def under(self, mask: Mask) -> Config:
        """The same model with this mask in every layer of the decoder."""
        return replace(self, kinds=tuple(replace(kind, mask=mask) for kind in self.kinds))


def _kind(mask: str = "causal", sinks: bool = False, **parameters: Any) -> Kind:
    return Kind(masks.make(mask, **parameters), sinks)


def _config(kinds: Sequence[dict[str, Any]] = ({},), latent: dict[str, int] | None = None, **sizes: Any) -> Config:
    layers = tuple(_kind(**kind) for kind in kinds)
    return Config(kinds=layers, latent=Latent(**latent) if latent else None, **sizes)


_DECLARED = read_yaml(Path(__file__).with_name("presets.yaml"))
PRESETS: dict[str, Config] = {name: _config(**sizes) for name, sizes in _DECLARED["presets"].items()}
SPARSE: dict[str, list[int]] = _DECLARED["sparse"]


def preset(name: str, **changes: Any) -> Config:
    """A preset by its name, with other values for some fields. Raises ValueError for an unknown name or a bad value."""
    if name not in PRESETS:
        raise ValueError(f"model={name}: {nearest(str(name), PRESETS)}")
    return replace(PRESETS[name], **changes)
