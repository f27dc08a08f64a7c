"""What every variant and every kernel does under every mask, asked of the library itself: honoured, or refused and why.
`python -m runner.catalog support` prints it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from attention import masks
from attention.geometry.schedules import Problem, steps
from attention.geometry.schedules import masks as bands_of
from attention.kernels import KERNELS, Call, Kernel, Shape, made_for
from attention.kernels.interface import lacks
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.masks.band import FULL
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.masks.sequences import mask_of
from attention.variants.base import Variant
from attention.variants.registry import MIXTURES, VARIANTS
from runner.config.experiment import MODULES
from runner.config.rules.attention import ONE_RANK

TOKENS, WORLD, HEADS, HEAD_DIM, VALUE_DIM = 1024, 4, 8, 128, 64
LENGTHS = (256, 512, 256)
EXAMPLES: dict[str, Mask] = {
    "full": masks.full(),
    "causal": masks.causal(),
    "sliding_window": masks.sliding_window(128),
    "chunked": masks.chunked(256),
    "prefix_lm": masks.prefix_lm(200),
    "documents": masks.documents(LENGTHS),
    "prefix_lm_documents": masks.prefix_lm_documents(LENGTHS, (50, 60, 0)),
    "block_causal_documents": masks.block_causal_documents(LENGTHS),
    "shared_prompt": masks.shared_prompt(256, (512, 256)),
    "global_window": masks.global_window(128, 16),
    "dca": masks.dca(128, 16, 128),
    "block_sparse": masks.block_sparse("local_window"),
    "rectangles": masks.rectangles([((0, 512), (0, 256), (-1, -1)), ((512, 1024), (256, 768), (-1, 0))]),
}


@dataclass(frozen=True)
class Setting:
    """A call on GPUs: what of it is not the usual."""

    mask: str = "causal"
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = HEADS
    deterministic: bool = False
    sinks: bool = False
    softcap: bool = False
    v_head_dim: int | None = None


PADDED = "padded"  # honoured, with values that are filled up with zeros
FEATURES = {
    "packed": Setting(packed=True),
    "packed, window": Setting("sliding_window", packed=True),
    "fp16": Setting(dtype=torch.float16),
    "fp32": Setting(dtype=torch.float32),
    "fp64": Setting(dtype=torch.float64),
    "GQA": Setting(kv_heads=4),
    "sinks": Setting(sinks=True),
    "softcap": Setting(softcap=True),
    "v_head_dim": Setting(v_head_dim=VALUE_DIM),
    "deterministic": Setting(deterministic=True),
}


def why_not(variant: Variant[Any], kernel: Kernel, setting: Setting) -> str | None:
    """Why a call is refused, or None: with every package installed, over symmetric memory. `PADDED`: it is not, but the kernel's values
    are padded."""
    try:
        problem = _problem(variant, setting)
        options = variant.parse({})
        options.check(HEADS, setting.kv_heads, problem.ranks)
        shape = Shape("cuda", setting.dtype, HEADS, setting.kv_heads, HEAD_DIM, setting.packed, not variant.decode)
        shape = replace(shape, value_dim=setting.v_head_dim, softcap=setting.softcap)
        kernel = made_for(kernel.name, shape)
        refused = _kernel_refuses(kernel, shape, problem, setting)
        return refused or (PADDED if isinstance(kernel, PaddedValues) else None)
    except ValueError as error:
        return str(error)


def _problem(variant: Variant[Any], setting: Setting) -> Problem:
    mask = EXAMPLES[setting.mask]
    cu = (0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS)))) if setting.packed else (0, TOKENS)
    if variant.decode and setting.packed:
        raise ValueError("cu_seqlens: a decode takes a batch of single sequences")
    world = 1 if variant.name in ONE_RANK else WORLD
    options = {"mask": mask} if "mask" in variant.options.from_call else {}
    return variant.problem(cu, world, mask_of(FULL, cu, mask), options, 1 if variant.decode else None)


def _kernel_refuses(kernel: Kernel, shape: Shape, problem: Problem, setting: Setting) -> str | None:
    """As `kernels.select` and `select_for_patterns` decide, had every kernel its package."""
    if setting.deterministic and shape.backward and (reason := kernel.any_order):
        return f"deterministic=True: {reason}"
    for c in problem.schedule.parts(problem, shape.heads, shape.kv_heads):
        of = replace(shape, heads=c.heads, kv_heads=c.kv_heads, packed=False)
        if reason := _kernel_refuses(kernel, of, c.problem, setting):
            return reason
    if problem.is_cut:
        shape = replace(shape, packed=True)
    if reason := lacks(kernel, shape):
        return reason
    for band in bands_of(problem):
        if reason := kernel.refuses(shape, band):
            return reason
    for rank in range(problem.world):
        for pattern in (b.mask for step in steps(problem, rank) for b in step.blocks if isinstance(b.mask, Pattern)):
            ForPatterns(kernel, shape).check(Call(1.0, deterministic=setting.deterministic, pattern=pattern))
    return None


def _general(reason: str, variant: Variant[Any], setting: Setting) -> str:
    """A reason without the names of this variant and mask and without counts, so that many cells share a note."""
    reason = reason.replace(str(EXAMPLES[setting.mask]), "MASK")
    reason = re.sub(rf"\b{variant.name} (?=is|has|takes|works|brings|runs|balances)", "VARIANT ", reason)
    reason = re.sub(r"\d+ tiles", "some tiles", reason)
    return re.sub(r"window(=| )\(-?\d+, -?\d+\)|mask=(full|causal)\b", "BAND", reason)


@lru_cache(maxsize=1)
def page() -> str:
    """The page as markdown: a table of variants and one of kernels, their reasons as numbered notes."""
    notes: dict[str, int] = {}
    columns = {**{name: Setting(mask=name) for name in EXAMPLES}, **FEATURES}
    math, ring = KERNELS["math"], VARIANTS["ring"]
    variants = [*VARIANTS.values(), *(v for name, v in MIXTURES.items() if name not in MODULES)]
    lines = [INTRODUCTION]
    for title, rows in (
        ("Variants, with the kernel math", {v.name: (v, math) for v in variants}),
        ("Kernels, with the variant ring", {kernel.name: (ring, kernel) for kernel in KERNELS.values()}),
    ):
        lines.append(f"## {title}\n")
        for names in (EXAMPLES, FEATURES):
            lines += [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
            for name, (variant, kernel) in rows.items():
                cells = (_cell(variant, kernel, columns[column], notes) for column in names)
                lines.append(f"| {name} | {' | '.join(cells)} |")
            lines.append("")
    lines += ["## Notes\n", *(f"{number}. {reason}" for reason, number in notes.items())]
    return "\n".join(lines) + "\n"


def _cell(variant: Variant[Any], kernel: Kernel, setting: Setting, notes: dict[str, int]) -> str:
    reason = why_not(variant, kernel, setting)
    if reason in (None, PADDED):
        return reason or "yes"
    reason = _general(str(reason), variant, setting)
    return f"({notes.setdefault(reason, len(notes) + 1)})"


INTRODUCTION = f"""# Support

Asked of the library by `python -m runner.catalog support`.

Each cell is a call on {WORLD} GPUs with {TOKENS:,} tokens, {HEADS} heads of {HEAD_DIM} in bf16, forward and backward, with
default options, every package installed and the transport symm.

- `yes`: honoured; `padded`: honoured with values of {VALUE_DIM} filled up to {HEAD_DIM} (column v_head_dim). A number: refused, for the reason in the notes, where MASK, BAND and VARIANT stand for those of the cell.
- The first table of a section has the masks, the second has other properties of a causal call. A decode has one query.
- A variant under another kernel also lacks what the kernel lacks. {" ".join(f"`{name}` is for one GPU." for name in ONE_RANK)}
- `kv_lengths` and `prefix` are for decodes, `replay=graphs` is for all others. Modules: docs/dilated.md. External packages: docs/external.md.
"""


if __name__ == "__main__":
    raise SystemExit("error: python -m runner.support is gone; use python -m runner.catalog support")
