"""Masks over real gloo worlds: every variant, forward and backward, against fp64."""

from __future__ import annotations

import pytest
import torch

import attention
from attention import masks
from attention.variants.registry import VARIANTS
from runner.config.variants import PACKED
from tests.jobs import masks as jobs
from tests.support.masks import U, built

CAUSAL = [
    [(0, 30, 0, 30, -U, 0), (30, 48, 30, 48, -U, 0)],  # two documents
    [(5, 40, 0, 40, -9, 0), (40, 48, 0, 12, -U, U)],  # queries that see nothing
    [(q, q + 4, k, k + 4, -U, U) for q in range(8, 48, 4) for k in range(q % 8, q, 8)],  # tiles
    [],
]
ANY = [
    *CAUSAL,
    [(0, 48, 0, 7, -U, U), (0, 7, 7, 48, -U, U), (7, 48, 7, 48, -3, 3)],  # global tokens and a window
    [(0, 20, 0, 48, 5, U), (20, 48, 0, 48, -U, -10)],
]
TAKE_ANY = [name for name, variant in VARIANTS.items() if variant.any_mask]


def settings(name: str, world: int) -> list[dict]:
    if name == "usp":
        return [{"ring": "contiguous"}, {}, {"ulysses_size": world, "ring": "contiguous"}]
    return [{}, {"heads_k_stride": 1}] if VARIANTS[name].executor == "gather" else [{}]


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("name", TAKE_ANY)
def test_every_mask_matches_fp64(in_world, name, world):
    packed = name in PACKED
    for options in settings(name, world):
        zigzag = VARIANTS[name].causal_only or (name == "usp" and not options)
        masks = CAUSAL if zigzag else ANY
        for packs in ([0, 16, 32, 48], None)[: 1 if packed else 2]:
            found = in_world(
                jobs.compare, world, name=name, options=options, masks=masks, tokens=48, packs=packs, heads=(8, 4)
            )
            assert len(found) == len(masks)
            for mask, each in zip(masks, found, strict=True):
                assert max(each["errors"]) < 1e-5 and each["lse"] < 1e-5, (mask, options, packs, each)


def test_only_needed_keys_travel(in_world):
    """Documents that lie within a rank: nothing is received. In the backward neither."""
    documents = [(a, a + 12, a, a + 12, -U, 0) for a in range(0, 48, 12)]
    for name in ("ring", "llama3"):
        options = {"name": name, "options": {}, "masks": [documents], "tokens": 48}
        if name == "llama3":
            options["packs"] = [0, 48]
        (found,) = in_world(jobs.compare, 4, **options)
        kept = {what: n for each in found["received"] for what, n in each.items() if what not in ("q", "out")}
        assert not any(kept.values()), (name, found["received"])


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if not v.any_mask and n != "grouped"])
def test_other_variants_refuse_in_one_line(name):
    fn = attention.make(name)
    q = torch.randn(1, 48, 4, 16)
    way_out = "leave the mask out" if VARIANTS[name].decode else "ring_allgather"
    with pytest.raises(ValueError, match=rf"mask=Rows\(.*{way_out}") as error:
        fn(q, q, q, mask=built(ANY[0]))
    assert "\n" not in str(error.value)


def test_bands_take_the_closed_forms():
    for mask, is_cut in ((masks.causal(), False), (masks.sliding_window(5), False), (built(ANY[0]), True)):
        assert VARIANTS["ring"].problem((0, 48), 4, mask).is_cut == is_cut
