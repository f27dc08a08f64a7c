"""dilated-attention-pytorch, declared as the packages of `external` are. Its problem is that of `dilated` with head groups, so both
are compared on the same pairs. `runner.peers.dilated` says what it computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from math import lcm
from typing import Any

from attention.geometry.layouts import REPLICATED, CuSeqlens
from attention.geometry.mixtures import Mixture
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants.base import register
from attention.variants.dilated import DIVIDED, PairOptions, mixture_problem
from runner.peers.packages import External


class _ExternalDilated(External[PairOptions]):
    def missing(self, device: str) -> str | None:
        reason = super().missing(device)
        if reason is None and importlib.util.find_spec("einops") is None:
            return f"{self.name} needs the package einops: {self.install}"
        return reason

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
        found = mixture_problem(self, cu_seqlens, world, mask, self.parse(options))
        mixture, tokens = _mixture(found), cu_seqlens[-1]
        if len(mixture.sequences) > 2:
            raise ValueError(
                f"a packed batch of {len(mixture.sequences) - 1} sequences: {self.name} takes batches of single sequences; use "
                "seqlens=null, or dilated"
            )
        if mixture.sequences[-1] != tokens:
            raise ValueError(
                f"padding={tokens - mixture.sequences[-1]}: {self.name} would attend it; use padding=0, or dilated"
            )
        segments = [segment for segment, _ in mixture.pairs]
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


register(
    _ExternalDilated(
        name="external_dilated",
        summary="dilated-attention-pytorch's DilatedAttention without its division by sums over tokens: dilated with head groups",
        source="dilated-attention-pytorch 0.2.0 (Odom, 2023), after LongNet (Ding et al., 2023)",
        use="a comparison with dilated",
        executor="external",
        layout=REPLICATED,
        schedule=DIVIDED,
        options=PairOptions,
        windows=False,
        packs=False,
        mixes=True,
        adapter="dilated",
        kernels=("xformers", "flash2", "sdpa_flash", "math"),
        needs="dilated_attention_pytorch",
        install="pip install einops, and pip install --no-deps dilated-attention-pytorch==0.2.0",
    )
)
