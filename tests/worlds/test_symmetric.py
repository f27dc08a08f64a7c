"""The transport that pulls, over real worlds: on a CPU its memory is shared memory."""

import pytest

from tests.jobs import shared_memory, training


@pytest.mark.parametrize(("name", "calls"), [("zigzag", 110), ("ulysses", 60)])
def test_many_calls_of_changing_shapes_stay_right_and_hold_no_more_memory(in_world, name, calls):
    found = in_world(shared_memory.many_calls, 2, name=name, calls=calls, transport="symm")
    assert found["error"] < 1e-5
    assert found["held"][0] == found["held"][1] > 0
    assert found["files"] == 0, "shared memory left behind"


@pytest.mark.parametrize("name", ("zigzag_llama3", "ulysses"))
def test_an_exception_in_between_leaves_the_next_call_right(in_world, name):
    assert in_world(shared_memory.after_an_exception, 2, name=name, transport="symm") < 1e-6


@pytest.mark.parametrize("before", ("zigzag", "ring_allgather"))
def test_a_call_of_another_variant_ends_what_an_exception_left(in_world, before):
    assert in_world(shared_memory.after_an_exception, 2, name="ulysses", before=before, transport="symm") < 1e-6


@pytest.mark.parametrize("name, transport", [("zigzag", "symm"), ("ulysses", "symm"), ("zigzag", "gloo")])
def test_a_group_that_began_under_inference_mode_trains(in_world, name, transport):
    assert in_world(training.trained_after_inference, 2, name=name, transport=transport) == [None, None]


def test_memory_that_was_given_back_is_taken_again(in_world):
    assert in_world(shared_memory.after_a_release, 2) == [None, None]


@pytest.mark.parametrize("failing", (0, 2))
def test_a_rank_without_shared_memory_makes_every_rank_fall_back_for_the_same_reason(in_world, failing):
    found = in_world(shared_memory.without_shared_memory, 3, failing=failing, timeout_s=30)
    (note,) = set(found["notes"])
    assert note.startswith(f"symm: no symmetric memory here: rank {failing}: [Errno 24] Too many open files")
    assert set(found["later"]) == {None}
    assert found["error"] < 1e-6


def test_shared_memory_that_cannot_grow_on_one_rank_is_an_error_on_every_rank(in_world):
    found = in_world(shared_memory.outgrown, 3, failing=1, timeout_s=30)
    (said,) = set(found["messages"])
    assert said == "rank 1: [Errno 27] File too large"
    assert found["error"] < 1e-6
    assert found["files"] == 0, "shared memory left behind"


@pytest.mark.parametrize(
    "name, options, packed, dtype",
    [
        ("ring", {}, True, "bf16"),  # own parts lie in the results, as they don't in a dtype that sums are kept in
        ("zigzag", {}, False, "fp32"),
        ("stripe", {}, False, "bf16"),
        ("zigzag_llama3", {"own_first": True, "heads_k_stride": 1}, False, "fp32"),
        ("zigzag_llama3", {"own_first": True}, True, "fp32"),
    ],
    ids=str,
)
def test_own_keys_apart_give_right_results(in_world, name, options, packed, dtype):
    given = {"name": name, "options": options, "kernel": "math", "packed": packed, "dtype": dtype}
    assert not any(in_world(shared_memory.local_kv_apart, 4, **given))
