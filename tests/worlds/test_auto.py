"""What `auto` times and takes, and that every choice runs."""

import pytest
import torch

import attention
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.registry import SHORTLIST, VARIANTS, shortlist
from tests.jobs import numerics, trials

SIZES = {"tokens": 64, "heads": 4, "head_dim": 16}
SHORT = {"tokens": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "causal": True}  # an iteration takes some ms


def test_make_says_what_is_missing():
    with pytest.raises(ValueError, match="tokens or else cu_seqlens, head_dim: must be given"):
        attention.make("auto", heads=4)
    with pytest.raises(ValueError, match=r"toknes=3: auto has no such option; its options: tokens, cu_seqlens"):
        attention.make("auto", toknes=3)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        attention.make("auto", tokens=64, heads=4, kv_heads=3, head_dim=16)
    with pytest.raises(ValueError, match=r"cu_seqlens=\(0, 9, 8\): must rise from 0"):
        attention.make("auto", cu_seqlens=[0, 9, 8], heads=4, head_dim=16)
    assert "auto" in attention.names()


@pytest.mark.parametrize("name, more", [("zigzag", {}), ("auto", SIZES)])
def test_replay_is_one_of_three_and_launches_and_graphs_are_no_more(name, more):
    with pytest.raises(ValueError, match="replay='perhaps': must be one of none, graphs, auto"):
        attention.make(name, replay="perhaps", **more)
    with pytest.raises(ValueError, match=r"replay='launches': is gone, .*; use none, or graphs for short calls"):
        attention.make(name, replay="launches", **more)
    for old, new in ((True, "graphs"), (False, "none"), ("auto", "auto")):
        with pytest.raises(ValueError, match=f"graphs={old!r}: is now an option of replay: give replay='{new}'"):
            attention.make(name, graphs=old, **more)


def test_a_single_candidate_is_taken_untimed():
    fn = attention.make("auto", dtype=torch.float32, causal=True, **SIZES)
    assert fn.variant.name == "dense" and not fn.choice.tried_ms
    assert repr(fn.choice) == "dense: the only candidate"
    assert attention.make("ring").choice is None


def test_graphs_are_tried_beside_eager_calls_where_either_may_be_faster():
    fn = attention.make("auto", replay="auto", dtype=torch.float32, device="cpu", **SIZES)  # a CPU has no graphs
    assert fn.settings.replay == "none" and list(fn.choice.tried_ms) == ["dense"]
    assert fn.choice.left_out["dense, graphs"].startswith("replay=graphs: ")
    assert repr(fn.choice).startswith("dense: tried: dense ")
    with pytest.raises(attention.UnsupportedCall, match="no candidate runs: dense: kernel=flash4"):
        attention.make("auto", kernel="flash4", replay="auto", device="cpu", **SIZES)


def able(cu=(0, 1024), world=4, mask=CAUSAL, heads=8, q_tokens=None) -> set[str]:
    return set(shortlist(cu, world, mask, heads, heads, q_tokens)[0])


def test_candidates_are_those_that_can_do_the_call():
    gathers = {"zigzag_llama3", "llama3", "ring_allgather"}
    assert able() == {"ulysses", "zigzag"} | gathers
    assert able(heads=6) == {"zigzag"} | gathers  # which the world does not divide
    assert able(mask=Band(64, 0)) == {"ulysses", "zigzag"} | gathers
    assert able(mask=FULL) == {"ulysses", "llama3", "ring_allgather"}
    assert able((0, 512, 1024)) >= {"zigzag", "llama3"}
    assert able((0, 511, 1024)) == {"ulysses", "llama3"}  # which cut the stream, not the sequences
    assert able(mask=FULL, q_tokens=1) == {"tree"}
    assert able(world=1) == {"dense"}
    with pytest.raises(ValueError, match=r"no variant can do this: .*1000 would work"):
        able((0, 1001))


@pytest.mark.parametrize("more", [{}, {"cu_seqlens": [0, 100, 512], "tokens": None, "deterministic": True}], ids=str)
def test_the_fastest_trial_is_taken_on_all_ranks_alike(in_world, more):
    sizes = {"tokens": 512, "heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True} | more
    first, *others = in_world(trials.auto_by_trial, 2, **sizes)
    assert others == [first] and first["random"]
    tried = first["tried_ms"]
    assert len(tried) >= 4 and {*tried, *first["left_out"]} == {*SHORTLIST}
    assert list(tried.values()) == sorted(tried.values()) and min(tried.values()) > 0
    assert next(iter(tried)) == first["variant"] == first["made"]


@pytest.mark.parametrize("error, late", [*((error, False) for error in trials.ERRORS), ("RuntimeError", True)])
def test_a_trial_that_fails_is_recorded_and_passed_over_on_all_ranks(in_world, error, late):
    sizes = SHORT | {"backward": not late}
    choice, other = in_world(trials.auto_by_trial, 2, broken=["gather"], error=error, late=late, **sizes)
    assert choice == other
    reason = "RuntimeError: broken here" if error == "RuntimeError" else "broken here"
    failed = {label for label, why in choice["left_out"].items() if why == reason}
    assert failed == {name for name in able((0, 128), 2) if VARIANTS[name].executor == "gather"}
    assert {*choice["tried_ms"]} == able((0, 128), 2) - failed


CASES = [
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": False},
    {"tokens": 96, "heads": 8, "kv_heads": 8, "head_dim": 16, "causal": True, "window": [10, 0]},
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True, "packs": [0, 13, 96]},
]


def test_the_choice_runs_and_matches_fp64(in_world):
    for case in CASES:
        size = {"cu_seqlens": case["packs"]} if "packs" in case else {"tokens": case["tokens"], "batch": 2}
        options = {key: case[key] for key in ("heads", "kv_heads", "head_dim", "causal", "window") if key in case}
        (numbers,) = in_world(numerics.compare, 2, name="auto", options=size | options, cases=[case])
        assert numbers["errors"][0] < 1e-6, numbers
        assert max(numbers["errors"][1:]) < 1e-5, numbers
