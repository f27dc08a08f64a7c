"""Other packages' context-parallel attention as variants. Their adapters lie beside this module, and are imported with their package
at the first call. Imports without torch.

The layout is the one that the package expects, so that `shard` does what its users do before the timed call. The
schedule is the one that it follows, from which FLOPs are counted. How it moves data is its own: bytes and phases are
unknown."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from attention.geometry.layouts import CONTIGUOUS, REPLICATED, CuSeqlens
from attention.geometry.options import Options, check_sharing, check_stride, one_of, ulysses_group
from attention.geometry.schedules import GATHER, LOCAL, RING, Problem
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants import stripe, zigzag
from attention.variants.base import Chosen, Variant
from attention.variants.dilated import Dilated, Mixture, PairOptions
from attention.variants.llama3 import PACKED

EXTRA = "pip install '.[peers]'"
SDPA = ("sdpa_cudnn", "sdpa_flash")  # not sdpa_efficient: no GQA, and its dq was wrong over two GPUs (torch 2.11)


@dataclass(frozen=True, kw_only=True)
class Package(Variant[Chosen]):
    """A variant of another package. `adapter` is a module of `runner.peers`. `kernels`: what kernel=auto tries, in this order; with `only`
    others are refused, with `own_kernel` all are, and they are but what a local call is compared with."""

    executor: Any = "external"  # none of ours
    use: str = "a comparison with our variants"
    windows: bool = False
    packs: bool = False
    adapter: str
    function: str | None = None  # the package's, where an adapter has several
    kernels: tuple[str, ...]
    needs: tuple[str, ...] = ()  # the packages to import
    install: str | None = None  # how to get it
    only: bool = False
    own_kernel: bool = False
    one_sequence: bool = False  # takes a packed batch or a batch of 1
    cuda: bool = False  # needs CUDA
    half: bool = False  # bf16 and fp16 only: in wider dtypes its fp32 sums would be the blocks' own buffers

    def missing(self, device: str) -> str | None:
        """Why the package can't run on this machine's `device` ("cpu" or "cuda"), or None."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"{self.name} needs the package {package}: {self.install}"
        if self.cuda and device == "cpu":
            return f"{self.name} needs CUDA GPUs: {self.source} has no CPU path"
        return None

    def refuses(self, problem: Problem, heads: int, kv_heads: int, scaled: bool, backward: bool) -> str | None:
        """Why the package's result is not right for a call, as `value: rule`, or None. scaled: the call has a scale other than
        D^-0.5."""
        return None

    def served(self, kernel: str) -> str:
        """What computed and what moved the data, for the result's reader."""
        if self.only or self.own_kernel:
            return f"{self.source}, {'its own kernel' if self.own_kernel else kernel} and its own exchange"
        return (
            f"{self.source}: its exchange and merging; the flash_attn functions it calls are served by kernel {kernel}"
        )


@dataclass(frozen=True)
class TorchOptions(Options):
    rotate: str = one_of(("allgather", "alltoall"), "allgather")


@dataclass(frozen=True)
class TransformerEngineOptions(Options):
    cp_comm_type: str = one_of(("p2p", "all_gather"), "p2p")


@dataclass(frozen=True)
class RfaLlama3Options(Options):
    heads_k_stride: int | None = 1

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        check_stride(self.heads_k_stride, kv_heads)


@dataclass(frozen=True)
class YunchangOptions(Options):
    ulysses_size: int | None = None

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        check_sharing("usp_yunchang", self.sharing(world), heads, kv_heads, world, replicates=False)

    def sharing(self, world: int) -> int:
        return ulysses_group(self.ulysses_size, world)


class _Dilated(Dilated, Package[PairOptions]):
    def served(self, kernel: str) -> str:
        return (
            "dilated-attention-pytorch 0.2.0 without its division by sums over tokens; the xformers function it calls is served "
            f"by kernel {kernel}"
        )

    def problem(
        self,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Band | Mask,
        options: PairOptions | Mapping[str, Any] | None = None,
        q_tokens: int | None = None,
    ) -> Problem:
        found = super().problem(cu_seqlens, world, mask, options)
        tokens, segments = cu_seqlens[-1], [segment for segment, _ in _mixture(found).pairs]
        if any(tokens % segment for segment in segments):
            shorter = tokens // (unit := lcm(*(x for x in segments if x < tokens))) * unit
            raise ValueError(
                f"seq_len={tokens}: {self.name} needs a multiple of its segments {segments}; "
                f"{shorter or unit} would work, or dilated"
            )
        return found

    def refuses(self, problem: Problem, heads: int, kv_heads: int, scaled: bool, backward: bool) -> str | None:
        pairs = _mixture(problem).pairs
        n = len(pairs)
        if kv_heads != heads:
            return (
                f"heads={heads}, kv_heads={kv_heads}: {self.name} picks KV heads by the number of the query head; use "
                f"kv_heads={heads}, or dilated"
            )
        if heads % n:
            return (
                f"heads={heads}: {self.name} gives {n} segment lengths groups of heads that overlap and leave the last heads "
                f"out; use {-(-heads // n) * n} heads, or dilated"
            )
        if scaled:
            return f"scale: {self.name} ignores it; leave the scale out, or use dilated"
        if backward and n == 1 and pairs[0][1] == 1:
            return f"segments: with one pair of rate 1, {self.name} has no backward; use several pairs, or dilated"
        return None


def _mixture(problem: Problem) -> Mixture:
    assert isinstance(problem.schedule, Mixture)
    return problem.schedule


_RFA = Package(
    name="rfa_ring",
    function="ring_flash_attn_func",
    summary="ring-flash-attn's ring: contiguous shards, causal it is imbalanced; its dq is rounded to bf16 whatever the dtype",
    source="ring-flash-attn 0.1.8 (Zhu, 2024)",
    layout=CONTIGUOUS,
    schedule=RING,
    options=Options,
    adapter="ring_flash_attention",
    kernels=("flash2", "sdpa_flash", "math"),
    needs=("ring_flash_attn",),
    install=f"{EXTRA}, or pip install --no-deps ring-flash-attn==0.1.8",
    half=True,
)
PEERS: dict[str, Package[Any]] = {
    package.name: package
    for package in (
        Package(
            name="torch_cp",
            summary="PyTorch's own ring attention: its context_parallel around scaled_dot_product_attention",
            source="torch.distributed.tensor.experimental.context_parallel (PyTorch, 2024)",
            layout=zigzag.ZIGZAG,
            schedule=RING,
            options=TorchOptions,
            adapter="torch_cp",
            kernels=SDPA,
            only=True,
            cuda=True,
        ),
        _RFA,
        replace(
            _RFA,
            name="rfa_zigzag",
            function="zigzag_ring_flash_attn_func",
            summary="ring-flash-attn's zigzag ring",
            layout=zigzag.ZIGZAG,
            schedule=RING,
            causal_only=True,
        ),
        replace(
            _RFA,
            name="rfa_stripe",
            function="stripe_flash_attn_func",
            summary="ring-flash-attn's striped ring",
            layout=stripe.STRIPE,
            schedule=RING,
            causal_only=True,
        ),
        replace(
            _RFA,
            name="rfa_llama3",
            function="llama3_flash_attn_varlen_func",
            summary="ring-flash-attn's llama3: an equal slice of the packed stream on each rank, keys gathered; a pack, or a "
            "batch of 1",
            layout=PACKED,
            schedule=GATHER,
            options=RfaLlama3Options,
            packs=True,
            one_sequence=True,
            half=False,
        ),
        Package(
            name="usp_yunchang",
            summary="yunchang's LongContextAttention: Ulysses within groups of ulysses_size ranks, a zigzag ring across them",
            source="yunchang 0.6.4 (Fang and Zhao, 2024)",
            layout=zigzag.ZIGZAG,
            schedule=RING,
            options=YunchangOptions,
            causal_only=True,
            adapter="yunchang_usp",
            kernels=("flash2", "sdpa_flash", "math"),
            needs=("yunchang",),
            install=f"{EXTRA}, or pip install --no-deps yunchang==0.6.4",
            half=True,
        ),
        Package(
            name="transformer_engine",
            summary="Transformer Engine's DotProductAttention over a context-parallel group, with the kernel that it takes itself",
            source="transformer_engine.pytorch.DotProductAttention (NVIDIA, 2023)",
            layout=zigzag.ZIGZAG,
            schedule=RING,
            options=TransformerEngineOptions,
            adapter="transformer_engine_cp",
            kernels=SDPA,
            needs=("transformer_engine",),
            install="pip install --no-build-isolation 'transformer_engine[pytorch]'",
            own_kernel=True,
            cuda=True,
        ),
        _Dilated(
            name="external_dilated",
            summary="dilated-attention-pytorch's DilatedAttention without its division by sums over tokens: dilated with head groups",
            source="dilated-attention-pytorch 0.2.0 (Odom, 2023), after LongNet (Ding et al., 2023)",
            use="a comparison with dilated",
            layout=REPLICATED,
            schedule=LOCAL,
            options=PairOptions,
            mixes=True,
            adapter="dilated",
            kernels=("xformers", "flash2", "sdpa_flash", "math"),
            needs=("dilated_attention_pytorch", "einops"),
            install="pip install einops, and pip install --no-deps dilated-attention-pytorch==0.2.0",
        ),
    )
}
