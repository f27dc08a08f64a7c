"""docs/support.md says what the library does."""

import pytest
import torch

import attention
from attention import masks
from attention.kernels import KERNELS
from attention.variants.registry import VARIANTS
from runner import catalog, support


def test_the_page_is_as_generated():
    assert support.PAGE.read_text() == support.page(), "run `python -m runner.support`"


def test_every_mask_variant_and_kernel_is_on_the_page_and_no_cell_is_silent(capsys):
    assert catalog.main(["support"]) == 0
    page = capsys.readouterr().out
    assert set(support.EXAMPLES) == set(masks.names())
    for name in [*KERNELS, *support.EXAMPLES, *VARIANTS]:
        assert name in page
    notes = page.partition("## Notes")[2].strip().splitlines()
    cells = [x.strip() for line in page.splitlines() if line.startswith("| ") for x in line.split("|")[2:-1]]
    numbers = {int(x.strip("()")) for x in cells if x.startswith("(")}
    assert numbers == set(range(1, len(notes) + 1))
    assert all(x == "yes" or x.startswith("(") or x in {*support.EXAMPLES, *support.FEATURES} for x in cells)


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_are_refused_where_the_page_says_so(name, monkeypatch):
    """With the kernel math, which does everything, and all ranks in one."""
    monkeypatch.setattr(support, "WORLD", 1)
    variant = VARIANTS[name]
    for mask in support.EXAMPLES:
        expected = support.why_not(variant, KERNELS["math"], support.Setting(mask))
        chosen = support.EXAMPLES[mask]
        options = {"mask": chosen} if "mask" in variant.options.from_call() else {}
        q, k = torch.zeros(1, 1 if variant.decode else support.TOKENS, 1, 8), torch.zeros(1, support.TOKENS, 1, 8)
        fn = attention.make(name, kernel="math", **options)
        try:
            fn.plan(q, k, k, mask=chosen)
            assert expected is None, (mask, expected)
        except ValueError as error:
            assert str(error) == expected, mask
