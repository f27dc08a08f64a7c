"""A reference that several ranks share is the one that each would compute alone, and covers every token once."""

import pytest
import torch

from runner.check import pieces
from runner.check.pieces import pieces_of
from runner.check.reference import Reference
from tests.jobs import program
from tests.support.composing import resolved


@pytest.mark.parametrize(
    ("world", "kv_heads", "wanted", "overrides"),
    [
        (2, 1, 1, "attention=ring causal=true"),
        (4, 2, 1, "attention=ring_allgather causal=false window=[70,30]"),
        (4, 2, 2, "attention=ring causal=true mode=forward"),
        (3, 1, 1, "attention=tree causal=true q_len=1200"),
    ],
)
def test_ranks_share_what_is_fewer_than_they(in_world, world, kv_heads, wanted, overrides):
    size = f"batch=1 heads={2 * kv_heads} kv_heads={kv_heads} head_dim=16 seq_len=1200 world_size={world}"
    spec = resolved(overrides, size)
    ranks = in_world(program.shared_reference, world, experiment=spec.plain(), number=wanted)
    assert {rank["shared"] for rank in ranks} == {wanted}
    tokens = [tuple(token) for rank in ranks for token in rank["tokens"]]
    assert len(tokens) == len(set(tokens)) == 1200 * wanted
    for rank in ranks:
        assert not rank["tokens"] or rank["errors"].keys() >= {"lse", "out", "out2"}
        assert max(rank["errors"].values(), default=0.0) < 1e-13


@pytest.mark.parametrize("size", ["attention=ring seq_len=96", "attention=ring_varlen seq_len=1024 seqlens=[1000,24]"])
def test_short_sequences_and_packed_batches_are_not_shared(size):
    spec = resolved(size, "batch=1 heads=2 kv_heads=1 head_dim=16 world_size=2")
    found = [pieces_of(spec, 2, rank, float("inf")) for rank in range(2)]
    assert [(len(mine), share, shared) for mine, share, shared in found] == [(1, 1.0, 0), (0, 1.0, 0)]


def test_references_are_kept_until_others_need_their_room(monkeypatch):
    monkeypatch.setattr(pieces, "_kept", {})
    of_100_bytes = Reference({"out": torch.zeros(100, dtype=torch.uint8)})
    for name in "abc":
        pieces.keep(name, of_100_bytes, 300)
    pieces.keep("a", pieces.kept("a"), 300)  # needed again, so b is the oldest
    pieces.keep("d", of_100_bytes, 300)
    assert list(pieces._kept) == ["c", "a", "d"]
    pieces.keep("e", of_100_bytes, 0)
    assert not pieces._kept


@pytest.mark.parametrize(("kv_heads", "computed"), [(2, [[1, 0, 0], [1, 0, 1]]), (1, [[1, 0, 1], [1, 0, 1]])])
def test_a_later_check_of_the_same_workload_computes_no_reference(in_world, kv_heads, computed):
    """Each rank its own piece, or one that both share: that is computed by both again when one has lost it."""
    size = f"attention=ring batch=1 heads=4 kv_heads={kv_heads} head_dim=16 seq_len=256 world_size=2"
    ranks = in_world(program.checked_again, 2, experiment=resolved(size).plain())
    assert [[count for *_, count in rank] for rank in ranks] == computed
    assert all(passed for rank in ranks for passed, *_ in rank)
    assert len({error for rank in ranks for _, error, _ in rank}) == 1
