"""A transformer whose attention is any function of `attention.make`: a decoder, or an encoder and a decoder with cross
attention. RMSNorm, rotary positions, SwiGLU, and an output layer tied to the embedding.

    model = Transformer(preset("decoder_tiny"), attention.make("zigzag"))
    batch = shard(model.attend, ids)                  # global ids [B, S] to this rank's part
    loss = batch.loss(model(batch))                   # summed over ranks, the global mean
    loss.backward(); reduce_gradients(model)          # or let FSDP sum them

Every rank has all parameters, equal on all ranks (the same seed), unless FSDP shards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention import masks, profiling
from attention.api import ContextParallel
from runner.models.batch import Batch
from runner.models.config import Config, Kind, Latent
from runner.models.language_model import LanguageModel

STD = 0.02  # of initial weights
EPS = 1e-6  # of RMSNorm
PROJECTIONS = "comp_projections"  # the phase of queries, keys, values and the output; attention has phases of its own
HEAD = "comp_head"


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of x `[B, s, H, D]` at the global positions `[B, s]`; at least fp32 within."""
    half, compute_dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=compute_dtype) / half)
    angle = positions[..., None, None].to(compute_dtype) * frequencies  # [B, s, 1, D / 2]
    a, b = x.to(compute_dtype).split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


def linear(inputs: int, outputs: int, residuals: int = 0) -> nn.Linear:
    """Without bias. residuals: of a layer that adds to the residual stream, how many do; it starts smaller."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=STD / max(residuals, 1) ** 0.5)
    return made


class Heads(nn.Module):
    """q `[B, s, H, D]` from x, and k `[B, s, Hk, D]` and v `[B, s, Hk, Dv]` from the memory, both `[B, s, C]`."""

    def __init__(self, config: Config, rotary: bool):
        super().__init__()
        self.dim, self.value_dim, self.base = config.head_dim, config.value_dim, config.rotary_base if rotary else None
        self.q = linear(config.hidden, config.heads * config.head_dim)
        self.k = linear(config.hidden, config.key_heads * config.head_dim)
        self.v = linear(config.hidden, config.key_heads * config.value_dim)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (heads.unflatten(-1, (-1, self.dim)) for heads in (self.q(x), self.k(memory)))
        if self.base is not None:
            q, k = rotate(q, positions, self.base), rotate(k, positions, self.base)
        return q, k, self.v(memory).unflatten(-1, (-1, self.value_dim))


class LatentHeads(nn.Module):
    """As `Heads`, by MLA in the form that is trained: queries, keys and values from low-rank latents, and rotary dims that
    all keys share. Source: DeepSeek-V2 (2024), section 2.1."""

    def __init__(self, config: Config, latent: Latent):
        super().__init__()
        self.heads, self.base, self.latent = config.heads, config.rotary_base, latent
        self.parts = config.head_dim - latent.rotary, latent.rotary
        self.kv_parts = self.parts[0], config.value_dim
        self.q_down = linear(config.hidden, latent.q)
        self.kv_down = linear(config.hidden, latent.kv + latent.rotary)
        self.q_norm, self.kv_norm = nn.RMSNorm(latent.q, EPS), nn.RMSNorm(latent.kv, EPS)
        self.q_up = linear(latent.q, config.heads * config.head_dim)
        self.kv_up = linear(latent.kv, config.heads * sum(self.kv_parts))

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, turned = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).split(self.parts, -1)
        latent, shared = self.kv_down(memory).split((self.latent.kv, self.latent.rotary), -1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).split(self.kv_parts, -1)
        shared = rotate(shared.unsqueeze(2), positions, self.base).expand(-1, -1, self.heads, -1)
        return torch.cat([q, rotate(turned, positions, self.base)], -1), torch.cat([k, shared], -1), v


class Attention(nn.Module):
    """Queries of x over the memory, by a function of `attention.make`, under the kind's mask."""

    def __init__(self, config: Config, kind: Kind, attend: ContextParallel, residuals: int, cross: bool = False):
        super().__init__()
        self.attend, self.kind = attend, kind
        self.heads = Heads(config, not cross) if config.latent is None or cross else LatentHeads(config, config.latent)
        self.sinks = nn.Parameter(STD * torch.randn(config.heads)) if kind.sinks else None
        self.out = linear(config.heads * config.value_dim, config.hidden, residuals)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        q, k, v = profiling.layer(PROJECTIONS, self.heads, x, memory, positions)
        mask, softcap, scale = self.kind.mask, self.kind.softcap, self.kind.scale
        out = self.attend(q, k, v, mask=mask, sinks=self.sinks, softcap=softcap, scale=scale)
        return profiling.layer(PROJECTIONS, self.out, out.flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config: Config, residuals: int):
        super().__init__()
        self.gate, self.up = (linear(config.hidden, config.mlp_dim) for _ in range(2))
        self.down = linear(config.mlp_dim, config.hidden, residuals)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """A layer, with cross attention over the encoder's output where `cross` is its function."""

    def __init__(
        self, config: Config, kind: Kind, attend: ContextParallel, residuals: int, cross: ContextParallel | None = None
    ):
        super().__init__()
        self.attention = Attention(config, kind, attend, residuals)
        self.cross = None if cross is None else Attention(config, FULL, cross, residuals, cross=True)
        self.mlp = SwiGLU(config, residuals)
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden, EPS) for _ in range(2 if cross is None else 3))

    def forward(self, x: Tensor, positions: Tensor, memory: Tensor | None = None) -> Tensor:
        norm, *between, last = self.norms
        normed = norm(x)
        x = x + self.attention(normed, normed, positions)
        if self.cross is not None and memory is not None:
            x = x + self.cross(between[0](x), memory, positions)
        return x + profiling.layer("comp_mlp", lambda x: self.mlp(last(x)), x)


FULL = Kind(masks.full())


class Transformer(LanguageModel):
    """A decoder or, with `config.encoder_layers`, an encoder and a decoder.

    attend: the attention of all layers.
    recompute: the backward computes each layer's forward again instead of keeping what it needs (activation
    checkpointing).
    Raises ValueError for a decode."""

    def __init__(self, config: Config, attend: ContextParallel, recompute: bool = False):
        super().__init__()
        if attend.variant.decode:
            raise ValueError(f"attend={attend}: is a decode, forward only; take one of the other variants")
        self.attend, self.config, self.recompute = attend, config, recompute
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        nn.init.normal_(self.embedding.weight, std=STD)
        both = config.encoder_layers > 0
        residuals = (3 if both else 2) * config.layers
        self.encoder = nn.ModuleList(
            TransformerBlock(config, FULL, attend, 2 * config.encoder_layers) for _ in range(config.encoder_layers)
        )
        self.encoder_norm = nn.RMSNorm(config.hidden, EPS) if both else None
        self.layers = nn.ModuleList(
            TransformerBlock(config, config.kind(i), attend, residuals, attend if both else None)
            for i in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, EPS)
        self.blocks = (*self.encoder, *self.layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """By the output layer, which is the embedding."""
        return profiling.layer(HEAD, F.linear, hidden, self.embedding.weight)

    def hidden(self, batch: Batch) -> Tensor:
        """What the output layer takes, `[B, s, C]`. Raises ValueError for a source without an encoder, or the reverse."""
        memory = None
        if (batch.source is None) != (self.encoder_norm is None):
            needs = "has no encoder: leave source out" if self.encoder_norm is None else "has an encoder: give source"
            raise ValueError(
                f"source={'None' if batch.source is None else list(batch.source.shape)}: the model {needs}"
            )
        if batch.source is not None and self.encoder_norm is not None:
            memory = self.embedding(batch.source)
            for layer in self.encoder:
                memory = self._run(layer, memory, batch.positions)
            memory = self.encoder_norm(memory)
        x = self.embedding(batch.ids)
        for layer in self.layers:
            x = self._run(layer, x, batch.positions, memory)
        return self.norm(x)

    def _run(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)
