"""Masks by name as a configuration asks for them."""

import pytest

from attention import masks
from runner.measure import metrics
from tests.support.composing import resolved

SIZE = "attention=ring seq_len=128 batch=1 hardware=cpu world_size=2"


@pytest.mark.parametrize("name", masks.names())
def test_every_mask_has_parameters_for_any_number_of_tokens(name):
    for tokens in (128, 1000):
        spec = resolved(SIZE, f"seq_len={tokens} mask={name}")
        assert spec.workload.named_mask is not None
        assert spec.workload.pairs == spec.workload.named_mask.make().pairs(tokens)
        again = type(spec).from_plain(spec.plain())
        assert again == spec and hash(again.workload) == hash(spec.workload)


def test_causal_window_and_sequences_beside_a_mask_hold_too():
    more = "", "causal=true", "causal=true window=[3,0]", "seqlens=[64,64]"
    alone, causal, window, packed = (resolved(SIZE, "mask=global_window", one).workload for one in more)
    assert alone.pairs > causal.pairs > window.pairs and alone.pairs > packed.pairs
    assert window.dense.causal and not alone.dense.causal and packed.dense.seqlens is None
    documents = resolved(SIZE, "mask=documents seqlens=[100,28]").workload.named_mask
    assert documents is not None and documents.parameters["lengths"] == [100, 28]


def test_open_parameters_follow_from_those_that_are_given():
    prompt = resolved(SIZE, "mask=shared_prompt mask.answers=[20,30]").workload.named_mask
    answers = resolved(SIZE, "mask=shared_prompt mask.prompt=28").workload.named_mask
    assert (prompt.parameters["prompt"], answers.parameters["answers"]) == (78, [25] * 4)


def test_the_experiment_of_random_keys_is_sparse_on_short_sequences_too():
    for tokens in (256, 8192):
        spec = resolved("+experiment=sparse_dca", SIZE, f"attention=dense world_size=1 seq_len={tokens}")
        assert metrics.sparsity(spec)["sparsity_ratio"] > 0.4, tokens
    sizes = spec.workload.named_mask.parameters
    assert (sizes["window"], sizes["global_tokens"], sizes["random"]) == (2048, 128, 512)


def test_masks_that_are_bands_are_those_of_causal_and_window_and_remove_nothing_of_dense_attention():
    by_name = resolved(SIZE, "mask=sliding_window mask.left=5").workload
    assert by_name.mask == resolved(SIZE, "causal=true window=[5,0]").workload.mask
    sparsity = metrics.sparsity(resolved(SIZE))
    assert (sparsity["connections"], sparsity["sparsity_ratio"]) == (128 * 129 // 2, 0)
    assert sparsity["dense_flops"] == metrics.flops(resolved(SIZE))
