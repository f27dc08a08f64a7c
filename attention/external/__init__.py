"""Others' context-parallel attention, chosen and measured as our variants are: `PEERS` by name, and why one can't run.

A peer is a `Variant` whose exchange is "peer": its layout is the one that the package expects, so that `shard` does what
its users do before the timed call, and its schedule is the one that it follows, from which FLOPs are counted. What it
sends is its own affair, so bytes and phases are unknown. Pure Python; an adapter and its package are imported at the
first call."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention.geometry import layouts, schedules
from attention.geometry.schedules import Problem, Step
from attention.variants.registry import Variant

EXTRA = "pip install '.[peers]'"
SDPA = ("sdpa_cudnn", "sdpa_flash")  # not sdpa_efficient: no GQA, and its dq was wrong over two GPUs (torch 2.11)


@dataclass(frozen=True)
class Peer:
    """`adapter` is a module of this package. `kernels` are those that kernel=auto tries, in this order; with `only` the
    others are refused."""

    variant: Variant
    adapter: str
    kernels: tuple[str, ...]
    needs: str | None = None  # the package to import
    install: str | None = None  # how to get it
    only: bool = False
    cuda: bool = False  # needs CUDA
    half: bool = False  # bf16 and fp16 only: wider, its fp32 sums would be the blocks' own buffers


def missing(name: str, device: str) -> str | None:
    """Why the peer can't run on this machine's `device` ("cpu" or "cuda"), or None; one of our variants always can."""
    if name not in PEERS:
        return None
    peer = PEERS[name]
    if peer.needs is not None and importlib.util.find_spec(peer.needs) is None:
        return f"{name} needs the package {peer.needs}: {peer.install}"
    if peer.cuda and device == "cpu":
        return f"{name} needs CUDA GPUs: {peer.variant.source} has no CPU path"
    return None


PEERS: dict[str, Peer] = {}


def _register(
    name: str,
    summary: str,
    source: str,
    layout: layouts.Layout,
    schedule: schedules.StepsOf,
    adapter: str,
    kernels: tuple[str, ...],
    causal_only: bool = False,
    packs: bool = False,
    options: Mapping[str, Any] | None = None,
    **about: Any,
) -> None:
    variant = Variant(
        name,
        summary,
        source,
        "a comparison in the same run",
        layout,
        schedule,
        "peer",
        causal_only=causal_only,
        windows=False,
        packs=packs,
        options=options or {},
    )
    PEERS[name] = Peer(variant, adapter, kernels, **about)


def _head_tail(problem: Problem, rank: int) -> list[Step]:
    """Causal a zigzag ring; not causal every rank sees everything, in whichever order the tokens lie."""
    return (schedules.zigzag if problem.mask.causal else schedules.ring)(problem, rank)


_register(
    "torch_cp",
    "PyTorch's own ring attention: its context_parallel around scaled_dot_product_attention",
    "torch.distributed.tensor.experimental.context_parallel (PyTorch, 2024)",
    layouts.ZIGZAG,
    _head_tail,
    "torch_cp",
    SDPA,
    options={"rotate": "allgather"},
    only=True,
    cuda=True,
)

RING_FLASH_ATTN: dict[str, Any] = {
    "adapter": "ring_flash_attention",
    "kernels": ("flash2", "sdpa_flash", "math"),
    "needs": "ring_flash_attn",
    "install": f"{EXTRA}, or pip install --no-deps ring-flash-attn==0.1.8",
}
_register(
    "rfa_ring",
    "ring-flash-attn's ring: contiguous shards, causal it is imbalanced; its dq is rounded to bf16 whatever the dtype",
    "ring-flash-attn 0.1.8 (Zhu, 2024)",
    layouts.CONTIGUOUS,
    schedules.ring,
    half=True,
    **RING_FLASH_ATTN,
)
_register(
    "rfa_zigzag",
    "ring-flash-attn's zigzag ring",
    "ring-flash-attn 0.1.8 (Zhu, 2024)",
    layouts.ZIGZAG,
    schedules.zigzag,
    causal_only=True,
    half=True,
    **RING_FLASH_ATTN,
)
_register(
    "rfa_stripe",
    "ring-flash-attn's striped ring",
    "ring-flash-attn 0.1.8 (Zhu, 2024)",
    layouts.STRIPE,
    schedules.stripe,
    causal_only=True,
    half=True,
    **RING_FLASH_ATTN,
)
_register(
    "rfa_llama3",
    "ring-flash-attn's llama3: an equal slice of the packed stream on each rank, keys gathered; a pack, or a batch of 1",
    "ring-flash-attn 0.1.8 (Zhu, 2024)",
    layouts.PACKED,
    schedules.gather,
    packs=True,
    options={"heads_k_stride": 1},
    **RING_FLASH_ATTN,
)
_register(
    "usp_yunchang",
    "yunchang's LongContextAttention: Ulysses within groups of ulysses_size ranks, a zigzag ring across them",
    "yunchang 0.6.4 (Fang and Zhao, 2024)",
    layouts.ZIGZAG,
    schedules.zigzag,
    "yunchang_usp",
    ("flash2", "sdpa_flash", "math"),
    causal_only=True,
    options={"ulysses_size": None},
    half=True,
    needs="yunchang",
    install=f"{EXTRA}, or pip install --no-deps yunchang==0.6.4",
)
_register(
    "transformer_engine",
    "Transformer Engine's DotProductAttention over a context-parallel group, with the kernel that it takes itself",
    "transformer_engine.pytorch.DotProductAttention (NVIDIA, 2023)",
    layouts.ZIGZAG,
    _head_tail,
    "transformer_engine_cp",
    SDPA,
    options={"cp_comm_type": "p2p"},
    needs="transformer_engine",
    install="pip install --no-build-isolation 'transformer_engine[pytorch]'",
    cuda=True,
)
