"""Sequences that do not divide, padded by the library, and what is refused. Their numbers are with the variants'."""

import pytest
import torch

import attention
from attention import masks
from attention.masks.band import Band
from attention.variants.registry import VARIANTS


def test_nothing_is_added_where_everything_divides():
    fn = attention.make("zigzag")
    x = torch.randn(1, 8, 2, 4)
    part, added = fn.shard(x, pad=True)
    assert added == 0 and torch.equal(part, x)
    labels, added = fn.shard(torch.arange(7)[None], pad=True)
    assert added == 1 and labels.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert fn.unshard(labels, padding=added).tolist() == [list(range(7))]


def test_a_refusal_names_what_the_caller_gave_and_all_that_would_work():
    fn, x, packed = attention.make("zigzag"), torch.randn(1, 7, 2, 4), torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match=r"seq_len=7: .* 8 would work, or fn.shard\(x, pad=True\)"):
        fn.shard(x)
    with pytest.raises(ValueError, match=r"padding=-1: .*fn.shard"):
        fn.unshard(x, padding=-1)
    rule = r"mask=prefix_lm\(prefix=2\), full attention with cu_seqlens=\[0, 4, 8\]: .*; use balanced, llama3, ring, "
    with pytest.raises(ValueError, match=rule):
        fn(packed, packed, packed, cu_seqlens=[0, 4, 8], mask=masks.prefix_lm(2))
    fn.world, cu = 2, (0, 100, 137, 256)
    for refused in (lambda: VARIANTS["zigzag"].problem(cu, 2, Band(-1, 0)), lambda: fn.shard(torch.zeros(256), cu)):
        with pytest.raises(
            ValueError, match=r"length=37: .* 36 would work; .* and balanced, llama3 or ulysses would take"
        ):
            refused()


def test_the_keys_of_a_decode_are_not_padded():
    decode, x = attention.make("tree"), torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match="pad=True: the keys of tree, a decode, need not divide; use pad=False"):
        decode.shard(x, role="kv", pad=True)
    with pytest.raises(ValueError, match="padding=2: the keys of a decode need not divide; leave padding out"):
        decode(x, x, x, padding=2)
