"""Which masks calls take."""

import pytest
import torch

import attention
from attention import masks
from attention.variants.registry import VARIANTS
from tests.support.masks import U, built

DOCUMENTS = [(0, 30, 0, 30, -U, 0), (30, 48, 30, 48, -U, 0)]


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if not v.any_mask and n != "grouped"])
def test_other_variants_refuse_in_one_line(name):
    fn = attention.make(name)
    q = torch.randn(1, 48, 4, 16)
    way_out = "leave the mask out" if VARIANTS[name].decode else "ring_allgather"
    with pytest.raises(ValueError, match=rf"mask=Rows\(.*{way_out}") as error:
        fn(q, q, q, mask=built(DOCUMENTS))
    assert "\n" not in str(error.value)


def test_bands_take_the_closed_forms():
    for mask, is_cut in ((masks.causal(), False), (masks.sliding_window(5), False), (built(DOCUMENTS), True)):
        assert VARIANTS["ring"].problem((0, 48), 4, mask).is_cut == is_cut
