"""Ranks that ask for different plans are found when the plan is made, on every rank, in real gloo worlds."""

import multiprocessing
import pickle

import pytest

import attention
from attention.agreement import TIMEOUT_S
from tests.jobs import agreement
from tests.support.ports import free_port

PACKED = {"make": {"name": "llama3"}, "x": {"packed": True}, "call": {"cu_seqlens": [0, 10, 32], "causal": True}}
DECODE = {"make": {"name": "tree"}, "x": {"queries": 1}}
STRIDE = {"make": {"name": "llama3", "heads_k_stride": None}}
# by field: (what all ranks but one have, what that one has, what the message says of it)
FIELDS = {
    "variant": ({}, {"make": {"name": "ulysses"}}, "variant: ring on {others}, ulysses on {odd}"),
    "options": (STRIDE, {"make": {"heads_k_stride": 1}}, "{{'heads_k_stride': 1}} on {odd}"),
    "kernel": ({}, {"make": {"kernel": "sdpa_flash"}}, "kernel: math (of math) on {others}, sdpa_flash (of sdpa_flash) on {odd}"),
    "transport": ({}, {"make": {"transport": "symm"}}, "transport: gloo on {others}, symm on {odd}"),
    "deterministic": ({}, {"make": {"deterministic": True}}, "deterministic: False on {others}, True on {odd}"),
    "replay": ({}, {"make": {"replay": "auto"}}, "replay: none on {others}, auto on {odd}"),
    "dtype": ({}, {"x": {"dtype": "float64"}}, "dtype: float32 on {others}, float64 on {odd}"),
    "batch": ({}, {"x": {"batch": 3}}, "batch: 1 on {others}, 3 on {odd}"),
    "heads": ({}, {"x": {"heads": 8}}, "heads: 4 on {others}, 8 on {odd}"),
    "kv_heads": ({}, {"x": {"kv_heads": 4}}, "kv_heads: 2 on {others}, 4 on {odd}"),
    "head_dim": ({}, {"x": {"head_dim": 32}}, "head_dim: 16 on {others}, 32 on {odd}"),
    "tokens": ({}, {"x": {"tokens": 8}}, "tokens of all ranks: "),
    "queries": (DECODE, {"x": {"queries": 2}}, "queries: 1 on {others}, 2 on {odd}"),
    "cu_seqlens": (PACKED, {"call": {"cu_seqlens": [0, 11, 32]}}, "cu_seqlens: (0, 10, 32) on {others}, (0, 11, 32) on {odd}"),
    "causal": ({}, {"call": {"causal": True}}, "causal: False on {others}, True on {odd}"),
    "window": ({}, {"call": {"window": (5, 0)}}, "window: (-1, -1) on {others}, (5, 0) on {odd}"),
    "mask": ({"call": {"mask": [7, 0]}}, {"call": {"mask": [9, 0]}}, "mask: window (7, 0) (hash "),
    "scale": ({}, {"call": {"scale": 0.5}}, "scale: 0.25 on {others}, 0.5 on {odd}"),
    "return_lse": ({}, {"call": {"return_lse": True}}, "return_lse: False on {others}, True on {odd}"),
    "gradient": ({}, {"x": {"gradient": True}}, "gradient: False on {others}, True on {odd}"),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_every_rank_names_the_field_its_values_and_their_ranks(in_world, field):
    base, other, wanted = FIELDS[field]
    found = in_world(agreement.disagree, 2, odd=1, base=base, other=other)
    assert len(set(found["first"])) == 1, found
    assert found["first"][0].startswith("Disagreement: ")
    assert wanted.format(others="rank 0", odd="rank 1") in found["first"][0]
    assert "Give the same on all ranks" in found["first"][0]
    assert found["then"] == ["none"] * 2  # the group can be used after it


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("field", ["dtype", "causal", "transport"])
def test_of_four_ranks_the_one_that_differs_is_named(in_world, field, odd):
    base, other, _ = FIELDS[field]
    found = in_world(agreement.disagree, 4, odd=odd, base=base, other=other)
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)
    for message in found["first"]:
        assert f"{field}: " in message
        assert f"on ranks {others}" in message
        assert f"on rank {odd}" in message
    assert found["then"] == ["none"] * 4


def test_long_packed_batches_are_compared_by_hash(in_world):
    for message in in_world(agreement.differ_in_lengths, 2):
        assert "cu_seqlens: 32 sequences (hash " in message
        assert message.count("hash") == 2


@pytest.mark.parametrize("how", ["skipped", "reused", "off"])
def test_ranks_that_make_no_plan_are_named_within_the_timeout(in_world, how):
    for rank, (message, seconds) in enumerate(in_world(agreement.skip, 4, absent=[1, 2], how=how)):
        if rank in (1, 2):
            continue
        assert "ranks 1, 2 did not make this plan within 1.5 s" in message
        assert "agreement=SECONDS" in message
        assert "Asked for by ranks 0, 3: variant ring" in message
        assert "head_dim 32" in message
        assert 1.4 < seconds < 20


def test_a_rank_that_comes_too_late_is_told_and_later_calls_agree(in_world):
    for late, then in in_world(agreement.late, 2):
        assert "rank 0 did not make this plan within 1.5 s" in late
        assert then == "none", then


@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_some_ranks_refuse_ends_on_all_ranks_with_a_reason(in_world, late):
    first, then, seconds = zip(*in_world(agreement.refused_by_some, 4, late=late), strict=True)
    for rank in (1, 2):
        assert "raised an error" not in first[rank]  # its own error
    for rank in (0, 3):
        assert "rank 1 raised an error in call " in first[rank]
        assert first[1].partition(": ")[2] in first[rank]
    assert then == ("none",) * 4
    assert max(seconds) < 15


@pytest.mark.parametrize(("bad", "transport"), [(0, "gloo"), (1, "gloo"), (1, "symm")])
def test_batches_of_different_steps_never_meet_where_one_rank_skips_one(in_world, bad, transport):
    others, skipping = in_world(agreement.skips_a_batch, 2, bad=bad, transport=transport)
    why = f"rank 1 raised an error in call {bad + 1}, which other ranks made: softcap=-1.0"
    for step, (other, mine) in enumerate(zip(others, skipping, strict=True)):
        if step == bad:
            assert why in other
            assert mine.startswith("own: softcap=-1.0")
        elif step > bad > 0:  # the others' transfers of the bad step can't be taken back
            assert why in other
            assert why in mine
            assert "start all ranks again" in mine
        else:
            assert other == mine == [step]


def test_a_mask_that_fits_the_layout_on_one_rank_only_is_named_on_both(in_world):
    base, other = {"make": {"name": "balanced"}, "call": {"causal": True}}, {"call": {"causal": False}}
    found = in_world(agreement.disagree, 2, odd=1, base=base, other=other)
    for message in found["first"]:
        assert "mask=full: this balanced layout was made for causal" in message
    assert "rank 1 raised an error in call " in found["first"][0], found
    assert found["then"] == ["none"] * 2


def test_a_pattern_that_one_rank_cannot_do_is_refused_before_any_rank_communicates(in_world):
    first, then = zip(*in_world(agreement.refuses_its_pattern, 2), strict=True)
    assert "rank 1 raised an error in call " in first[0]
    assert all("not this pattern" in message for message in first)
    assert then == ("none", "none")


def test_an_error_within_a_call_is_named_by_the_ranks_that_wait(in_world):
    *others, own = in_world(agreement.raises_within, 4)
    assert "raised an error" not in own[0]
    for message, seconds in others:
        assert "rank 3 raised an error in call 2, which other ranks made: AttributeError: " in message
        assert seconds < 15


@pytest.mark.parametrize("then", ["waits", "calls"])
def test_a_backward_that_one_rank_skips_is_named(in_world, then):
    skipping, waiting = in_world(agreement.skips_a_backward, 2, then=then)
    of_backward = "rank 0 did not reach the transfers of the backward of call 1 within 2 s"
    of_call = "rank 1 did not reach the transfers of call 2 within 2 s"
    if then == "waits":
        assert of_backward in waiting
        assert skipping == "none"
    else:  # whichever gives up first
        assert all(of_backward in message or of_call in message for message in (waiting, skipping)), skipping


@pytest.mark.parametrize(
    ("how", "reason"), [("differ", "scale: 0.5 on rank 0, 1.5 on rank 1"), ("refuse", "softcap=-1.0")]
)
def test_every_rank_names_the_reason_where_the_rank_with_the_store_leaves_first(how, reason):
    context = multiprocessing.get_context("spawn")
    messages, port = context.Queue(), free_port()
    ranks = [context.Process(target=agreement.leaves_first, args=(rank, port, how, messages)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for _, message in [messages.get(timeout=100) for _ in ranks]:
        assert reason in message
    for rank in ranks:
        rank.join()


def test_what_all_ranks_refuse_is_no_disagreement(in_world):
    for first, then in in_world(agreement.refused_by_all, 2):
        assert "window=" in first
        assert "rank" not in first
        assert then == "none"


def test_groups_agree_separately(in_world):
    found = in_world(agreement.in_subgroups, 4)
    assert [len(messages) for messages in found] == [3, 2, 3, 2]
    assert {message for messages in found for message in messages} == {"none"}


def test_many_packed_batches_leave_no_keys_in_the_store(in_world):
    before, after = in_world(agreement.keys_in_store, 2, packs=40)
    assert after <= before + 2  # where each rank waited for long, if it did


def test_without_agreement_ranks_are_not_compared(in_world):
    assert in_world(agreement.off, 2) == [0, 0]


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), "yes", None])
def test_an_agreement_that_is_no_time_is_refused(wrong):
    with pytest.raises(ValueError, match=r"agreement=.*: must be true, false, or the seconds to wait"):
        attention.make("ring", agreement=wrong)


@pytest.mark.parametrize(("given", "waits_s"), [(True, TIMEOUT_S), (False, 0.0), (5, 5.0)])
def test_the_option_survives_copies(given, waits_s):
    fn = attention.make("ring", agreement=given)
    assert pickle.loads(pickle.dumps(fn)).settings.agreement_s == fn.settings.agreement_s == waits_s
