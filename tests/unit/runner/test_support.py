"""`python -m runner.catalog support` says what the library does."""

import re

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
    for name in [*KERNELS, *masks.names(), *VARIANTS]:
        assert name in page
    notes = page.partition("## Notes")[2].strip().splitlines()
    assert {int(x) for x in re.findall(r"\| \((\d+)\) ", page)} == set(range(1, len(notes) + 1))
    assert not re.search(r"\|  *\|", page.replace("\n| |", "\n"))


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_are_honoured_or_refused_as_the_page_says(name, monkeypatch):
    """With the kernel math, which does everything, and all ranks in one; with sdpa_flash, which pads and has no softcap."""
    monkeypatch.setattr(support, "WORLD", 1)
    variant, tokens = VARIANTS[name], support.TOKENS
    q, k = (
        torch.zeros(1, n, support.HEADS, 128, dtype=torch.bfloat16) for n in (1 if variant.decode else tokens, tokens)
    )
    takes_mask = "mask" in variant.options.from_call
    causal = {"causal": True} if not takes_mask else {}
    calls = [(support.Setting(mask), "math", {"mask": x}) for mask, x in support.EXAMPLES.items()]
    more = {"softcap": {"softcap": 1.0}, "v_head_dim": causal}
    calls += [(support.FEATURES[x], kernel, causal | more[x]) for x in more for kernel in ("math", "sdpa_flash")]
    for setting, kernel, arguments in calls:
        reason = support.why_not(variant, KERNELS[kernel], setting)
        options = {"mask": support.EXAMPLES[setting.mask]} if takes_mask else {}
        fn = attention.make(name, kernel=kernel, **options)
        try:
            note = fn.plan(q, k, k[..., : setting.v_head_dim], **arguments).kernel.note or ""
            assert reason == (support.PADDED if "values padded" in note else None), setting
        except ValueError as error:
            assert reason is not None and reason in str(error), (setting, reason)
