"""The layout that is made for a mask: even work for every mask and for documents of any lengths, and a quick plan."""

import time

import pytest

import attention
from attention import masks
from attention.geometry.schedules import Problem
from attention.variants.balanced import assigned, balance
from attention.variants.registry import VARIANTS
from runner.config.rules.attention import real_lengths

MOST_RANGES = 4  # of a rank: each is a kernel call or a copy


def problem_of(mask: masks.Mask, tokens: int, world: int, **options) -> Problem:
    return VARIANTS["balanced"].problem((0, tokens), world, mask, {"mask": mask, **options})


def every_mask(tokens: int) -> list[masks.Mask]:
    part = tokens // 16
    return [
        masks.full(),
        masks.causal(),
        masks.sliding_window(part, part // 3),
        masks.chunked(3 * part),
        masks.block_causal_documents([5 * part, part, tokens - 6 * part]),
        masks.prefix_lm_documents([5 * part, tokens - 5 * part], [part, 2 * part]),
        masks.shared_prompt(4 * part, [*[3 * part] * 3, tokens - 13 * part]),
        masks.global_window(part, part // 2),
        masks.block_sparse("dilated_sparse", causal=True),
        masks.dca(2 * part, part // 2, 256, causal=True),
        masks.documents(real_lengths(tokens, 0)),
        masks.documents(real_lengths(tokens, 9), inner=masks.full()),
    ]


@pytest.mark.parametrize("each, world", [(1024, 8), (1021, 3), (1021, 64)])
def test_every_rank_has_as_many_tokens_and_nearly_as_many_pairs(each, world):
    tokens = each * world
    for mask in every_mask(tokens):
        shards = assigned(mask, tokens, world)
        assert {sum(map(len, shard)) for shard in shards} == {each}, mask
        assert sorted(t for shard in shards for r in shard for t in r) == list(range(tokens)), mask
        assert max(map(len, shards)) <= MOST_RANGES, mask
        assert balance(problem_of(mask, tokens, world)) <= 1.05, mask


def test_where_a_few_queries_have_most_pairs_the_result_says_how_uneven_ranks_are():
    mask = masks.global_window(8, 3)  # three queries see all 4096 keys, the others some 20 each
    problem = problem_of(mask, 4096, 64)
    rest = 63 * 20
    assert balance(problem) == pytest.approx((4096 + rest) / (mask.pairs(4096) / 64), rel=0.01)
    assert problem.schedule.note(problem) == "the busiest rank has 3.64 times the mean of the ranks' pairs"


def test_a_million_tokens_for_64_ranks_are_dealt_out_in_a_moment():
    """Aim: 50 ms of an idle core. Ten times as long is allowed here: CPU time on shared cores varies."""
    tokens = 1 << 20
    many = masks.block_sparse("dilated_sparse")  # 573,528 rectangles
    for mask in (masks.documents(real_lengths(tokens, 0)), many, masks.global_window(512, 128)):
        mask.rectangles(tokens)  # building it is counted apart
        taken = []
        for _ in range(3):
            assigned.cache_clear()
            start = time.process_time()
            assigned(mask, tokens, 64)
            taken.append(time.process_time() - start)
        assert min(taken) < 0.5, (mask, taken)


def test_what_does_not_fit_is_refused():
    import torch

    q = torch.randn(1, 64, 2, 16)
    fn = attention.make("balanced", mask=masks.chunked(16), tokens=64)
    fn(q, q, q)  # the mask that it was made for
    fn(q, q, q, mask=masks.chunked(8))  # within it
    with pytest.raises(ValueError, match="was made for chunked"):
        fn(q, q, q, mask=masks.full())
    with pytest.raises(ValueError, match="mask=full: this balanced layout was made for causal; make another"):
        attention.make("balanced")(q, q, q)  # full attention is not made causal in silence
    with pytest.raises(ValueError, match="seq_len=32: this balanced layout was made for tokens=64"):
        fn.shard(q[:, :32])
    with pytest.raises(ValueError, match="mask='causal': must be one of"):
        attention.make("balanced", mask="causal").shard(q)
    with pytest.raises(ValueError, match="tokens=0: must be a whole number of at least 1"):
        attention.make("balanced", tokens=0).shard(q)
