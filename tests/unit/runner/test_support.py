"""`python -m runner.catalog support` says what the library does."""

import pytest
import torch

import attention
from attention import masks
from attention.kernels import KERNELS
from attention.variants.registry import VARIANTS
from runner import catalog, support


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
    assert all(
        x in ("yes", "padded") or x.startswith("(") or x in {*support.EXAMPLES, *support.FEATURES} for x in cells
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_sinks_softcap_and_values_of_another_size_are_honoured_or_refused_as_the_page_says(name, monkeypatch):
    """With the kernels math, which has all of them, and sdpa_flash, which has no softcap and pads, and all ranks in one."""
    monkeypatch.setattr(support, "WORLD", 1)
    tokens = 1 if VARIANTS[name].decode else support.TOKENS, support.TOKENS
    q, k = (torch.zeros(1, n, support.HEADS, support.HEAD_DIM, dtype=torch.bfloat16) for n in tokens)
    options = {"mask": masks.causal()} if "mask" in VARIANTS[name].options.from_call else {}
    calls = {"sinks": {"sinks": torch.zeros(support.HEADS)}, "softcap": {"softcap": 1.0}, "v_head_dim": {}}
    for kernel in ("math", "sdpa_flash"):
        fn = attention.make(name, kernel=kernel, **options)
        for feature, more in calls.items():
            expected = support.why_not(VARIANTS[name], KERNELS[kernel], support.FEATURES[feature])
            v = k[..., : support.VALUE_DIM] if feature == "v_head_dim" else k
            try:
                note = getattr(fn.plan(q, k, v, causal=True, **more).kernel, "note", "")
                assert expected == (support.PADDED if "values padded" in (note or "") else None), (feature, note)
            except ValueError as error:
                assert expected is not None and expected in str(error), (feature, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_are_refused_where_the_page_says_so(name, monkeypatch):
    """With the kernel math, which does everything, and all ranks in one."""
    monkeypatch.setattr(support, "WORLD", 1)
    variant = VARIANTS[name]
    for mask in support.EXAMPLES:
        expected = support.why_not(variant, KERNELS["math"], support.Setting(mask))
        chosen = support.EXAMPLES[mask]
        options = {"mask": chosen} if "mask" in variant.options.from_call else {}
        q, k = torch.zeros(1, 1 if variant.decode else support.TOKENS, 1, 8), torch.zeros(1, support.TOKENS, 1, 8)
        fn = attention.make(name, kernel="math", **options)
        try:
            fn.plan(q, k, k, mask=chosen)
            assert expected is None, (mask, expected)
        except ValueError as error:
            assert str(error) == expected, mask
