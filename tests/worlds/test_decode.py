"""Tree and ring decode over real gloo worlds: KV really sharded, uneven and empty shards, GQA, speculative queries."""

import pytest
import torch

import attention
from tests.jobs import numerics

Q, K, P = torch.zeros(3, 1, 4, 8), torch.zeros(3, 8, 2, 8), torch.zeros(5, 2, 8)


REFUSED = [
    ({"kv_lengths": [3, 4]}, "kv_lengths has 2 lengths.*one for each of the 3 batch elements"),
    ({"kv_lengths": [3, 4, 9]}, r"kv_lengths\[2\]=9.*from 0 to the 8 keys.*kv_tokens"),
    ({"kv_lengths": [1.5, 4, 8]}, r"kv_lengths=\[1.5, 4, 8\].*must be integers"),
    ({"kv_lengths": torch.ones(3)}, r"torch.float32.*integer tensor \[3\].*to\(torch.int32\)"),
    ({"kv_tokens": 5}, "k has 8 tokens: rank 0 of 1 holds 5 of 5"),
    ({"prefix": (P, P), "window": (4, 0)}, r"window=\(4, 0\).*prefix see all of it.*leave the window out"),
    ({"prefix": P}, r"prefix: Tensor given.*a pair \(k, v\)"),
    ({"prefix": (P, P[..., :4])}, r"v of the prefix has shape \[1, 5, 2, 4\].*\[1, N_p, 2, 8\]"),
    ({"prefix": (P.expand(3, 5, 2, 8), P)}, r"k of the prefix has shape \[3, 5, 2, 8\].*one sequence"),
    ({"prefix": (P, P), "prefix_tokens": 9}, "k has 5 tokens: rank 0 of 1 holds 9 of 9"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_lengths_and_prefixes_that_do_not_fit_are_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as refusal:
        attention.make("tree")(Q, K, K, **given)
    assert "\n" not in str(refusal.value)


def test_lengths_and_prefixes_are_for_decodes():
    for given, message in (
        ({"kv_lengths": [1, 4, 8]}, "kv_lengths: ring is no decode.*take ring_decode or tree.*cu_seqlens"),
        ({"prefix": (P, P)}, "prefix: ring is no decode.*ring_decode or tree.*shared_prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.make("ring")(K, K, K, **given)


@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize(
    ("name", "options", "transport", "window"),
    [
        ("tree", {"reduce": "packed"}, "auto", (5, 0)),
        ("ring_decode", {}, "symm", (7, 0)),
    ],
    ids=str,
)
def test_a_decode_whose_keys_grow_is_planned_once(in_world, name, options, transport, window, world):
    how = {"name": name, "options": options, "transport": transport, "window": window, "most": 24}
    found = in_world(numerics.growing, world, **how)
    assert found["error"] < 1e-5
    assert found["kept"] == 1
