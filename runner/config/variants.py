"""What benchmarks know of variants beyond the library: options that are "best", and variants with a workload of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

from attention.geometry.layouts import CuSeqlens
from attention.geometry.options import divisors
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants.base import Variant

BEST = "best"  # of an option on the command line: the fastest of its choices
MODULES = ("dilated_multihead",)  # measured with the projections and the LayerNorm around them
# options that divide a number
DIVISORS = {"head_parts": "KV heads", "heads_k_stride": "KV heads", "ulysses_size": "ranks"}
UNTRIED = ("mixing", "weights")  # options that change the result
PACKED = ("llama3", "ring_varlen", "zigzag_varlen")  # measured with packed batches, by default
ONE_RANK = ("grouped",)  # one rank's share of a larger world: for world_size=1 only
# the one-device baseline, by whether a variant is a decode and whether it mixes
ON_ONE_DEVICE = {(False, False): "dense", (True, False): "tree", (False, True): "dilated_improved"}


def settings(
    variant: Variant[Any],
    options: Mapping[str, Any],
    heads: int,
    kv_heads: int,
    cu_seqlens: CuSeqlens,
    world: int,
    mask: Band | Mask,
    q_tokens: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The options with "best" replaced, for each combination of choices that the variant can do; for each other one, by
    `setting_label`, the reason. Raises ValueError if it can do none."""
    names = [name for name, value in options.items() if value == BEST]
    able: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    choices = {name: best_values(variant, name, kv_heads, world) for name in names}
    if unlisted := [name for name in names if not choices[name]]:
        raise ValueError(f"{unlisted[0]}={BEST}: {variant.name} has no list of its values; give one")
    for values in product(*choices.values()):
        setting = {**options, **dict(zip(names, values, strict=True))}
        try:
            parsed = variant.parse(setting)
            variant.problem(cu_seqlens, world, mask, parsed, q_tokens)
            parsed.check(heads, kv_heads, world)
            able.append(setting)
        except ValueError as error:
            left_out[setting_label(setting, names)] = str(error)
    if not able:
        raise ValueError(next(iter(left_out.values())))
    return able, left_out


def best_values(variant: Variant[Any], option: str, kv_heads: int, world: int) -> list[Any]:
    """The values of an option among which "best" decides; none for an option that has no list of them."""
    if option in variant.options.names() and option in DIVISORS:
        return divisors(kv_heads if DIVISORS[option] == "KV heads" else world)
    if option in UNTRIED:
        return []
    return [y for x in fields(variant.options) if x.name == option for y in x.metadata.get("values", ())]


def setting_label(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return " ".join(f"{name}={options[name]}" for name in names)
