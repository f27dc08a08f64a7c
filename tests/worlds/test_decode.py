"""Tree and ring decode over real gloo worlds: KV really sharded, uneven and empty shards, GQA, speculative queries."""

import pytest
import torch

import attention
from tests.jobs import numerics

Q, K, P = torch.zeros(3, 1, 4, 8), torch.zeros(3, 8, 2, 8), torch.zeros(5, 2, 8)


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("tree", {"kv_lengths": [3, 4]}, ("kv_lengths has 2 lengths", "one for each of the 3 batch elements")),
        ("tree", {"kv_lengths": [3, 4, 9]}, ("kv_lengths[2]=9", "from 0 to the 8 keys", "kv_tokens")),
        ("ring_decode", {"kv_lengths": [1.5, 4, 8]}, ("kv_lengths=[1.5, 4, 8]", "must be integers")),
        ("tree", {"kv_lengths": torch.ones(3)}, ("torch.float32", "integer tensor [3]", "to(torch.int32)")),
        (
            "ring",
            {"kv_lengths": [1, 4, 8]},
            ("kv_lengths: ring is no decode", "take ring_decode or tree", "cu_seqlens"),
        ),
        ("tree", {"kv_tokens": 5}, ("k has 8 tokens: rank 0 of 1 holds 5 of 5",)),
        (
            "tree",
            {"prefix": (P, P), "window": (4, 0)},
            ("window=(4, 0)", "prefix see all of it", "leave the window out"),
        ),
        ("tree", {"prefix": P}, ("prefix: Tensor given", "a pair (k, v)")),
        ("tree", {"prefix": (P, P[..., :4])}, ("v of the prefix has shape [1, 5, 2, 4]", "[1, N_p, 2, 8]")),
        ("tree", {"prefix": (P.expand(3, 5, 2, 8), P)}, ("k of the prefix has shape [3, 5, 2, 8]", "one sequence")),
        ("tree", {"prefix": (P, P), "prefix_tokens": 9}, ("k has 5 tokens: rank 0 of 1 holds 9 of 9",)),
        ("ring", {"prefix": (P, P)}, ("prefix: ring is no decode", "ring_decode or tree", "shared_prompt")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lengths_and_prefixes_that_do_not_fit_are_refused_in_one_line(name, given, parts):
    fn = attention.make(name)
    with pytest.raises(ValueError) as refusal:
        fn(K if name == "ring" else Q, K, K, **given)
    assert "\n" not in str(refusal.value) and all(part in str(refusal.value) for part in parts), refusal.value


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
