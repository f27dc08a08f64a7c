"""Multi-head dilated attention as a module: one projection for q, k and v, dilated attention, LayerNorm before the output
projection. MAGNETO's sub-LayerNorm and initialization, as in LongNet.

Source: LongNet (Ding et al., 2023); Foundation Transformers (MAGNETO, Wang et al., 2022), figure 2; dilated-attention-pytorch's
MultiheadDilatedAttention (Odom, 2023)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention.api import make
from attention.geometry.options import check_heads

EPS = 1e-5  # of LayerNorm
MOVED = (
    "IGNORED", "PRESETS", "SPARSE", "Batch", "Config", "Kind", "Latent", "Transformer", "preset", "reduce_gradients", "shard",
)  # fmt: skip


class DilatedMultihead(nn.Module):
    """x `[B, s, hidden]` to the same shape.

    kv_heads: KV heads, by default as many as heads. gamma: scales the initial weights that v and the output pass through; MAGNETO has
    it grow with the number of layers, sqrt(log(2 N)) for a decoder of N. variant: `dilated_improved`, where x is the whole
    sequence, or `ring_dilated`, where it is this rank's shard. options: of the variant and of `attention.make`.
    Raises ValueError where the heads do not divide the hidden size, and as `attention.make`."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        variant: str = "dilated_improved",
        group: dist.ProcessGroup | None = None,
        gamma: float = 1.0,
        bias: bool = True,
        layer_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or hidden % heads:
            raise ValueError(f"heads={heads}: must divide hidden={hidden}; give another number of heads")
        self.attend = make(variant, group=group, **options)
        check_heads(heads, kv_heads)
        self.attend.options.check(heads, kv_heads, self.attend.world)
        self.head_dim, self.gamma = hidden // heads, gamma
        self.parts = (heads, kv_heads, kv_heads)
        about: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = nn.Linear(hidden, sum(self.parts) * self.head_dim, **about)
        self.norm = nn.LayerNorm(hidden, EPS, device=device, dtype=dtype) if layer_norm else nn.Identity()
        self.out = nn.Linear(hidden, hidden, **about)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-normal weights, of v and the output times gamma; biases 0."""
        of_q, of_k, of_v = self.qkv.weight.split([n * self.head_dim for n in self.parts])
        for weight, gain in ((of_q, 1.0), (of_k, 1.0), (of_v, self.gamma), (self.out.weight, self.gamma)):
            nn.init.xavier_normal_(weight, gain)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.parts, -2)
        out: Tensor = self.out(self.norm(self.attend(q, k, v, causal=causal).flatten(-2)))
        return out


def __getattr__(name: str) -> Any:
    if name in MOVED:
        raise ImportError(f"attention.models.{name}: whole models are in the program; import {name} from runner.models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
