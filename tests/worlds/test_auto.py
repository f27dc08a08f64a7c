"""What `auto` times and takes. That what it takes runs is tested with runs."""

import pytest
import torch

import attention
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.registry import SHORTLIST, VARIANTS, shortlist
from tests.jobs import trials

SIZES = {"tokens": 64, "heads": 4, "head_dim": 16}
SHORT = {"tokens": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "causal": True}  # an iteration takes some ms


@pytest.mark.parametrize(
    "given, message",
    [
        ({"heads": 4}, "tokens or else cu_seqlens, head_dim: must be given"),
        ({"toknes": 3}, r"toknes=3: auto has no such option; its options: tokens, cu_seqlens"),
        ({**SIZES, "kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"cu_seqlens": [0, 9, 8], "heads": 4, "head_dim": 16}, r"cu_seqlens=\(0, 9, 8\): must rise from 0"),
        ({**SIZES, "replay": "perhaps"}, "replay='perhaps': must be one of none, graphs, auto"),
        ({**SIZES, "replay": "launches"}, r"replay='launches': is gone, .*; use none, or graphs for short calls"),
        ({**SIZES, "graphs": True}, "graphs=True: is now an option of replay: give replay='graphs'"),
    ],
)
def test_make_says_what_is_missing_or_gone(given, message):
    with pytest.raises(ValueError, match=message):
        attention.make("auto", **given)


def test_a_single_candidate_is_taken_untimed():
    fn = attention.make("auto", dtype=torch.float32, causal=True, **SIZES)
    assert fn.variant.name == "dense" and not fn.choice.tried_ms
    assert repr(fn.choice) == "dense: the only candidate"
    assert attention.make("ring").choice is None


def test_graphs_are_tried_beside_eager_calls_where_either_may_be_faster():
    fn = attention.make("auto", replay="auto", dtype=torch.float32, device="cpu", **SIZES)  # a CPU has no graphs
    assert fn.settings.replay == "none" and list(fn.choice.tried_ms) == ["dense"]
    assert fn.choice.left_out["dense, graphs"].startswith("replay=graphs: a cpu has no CUDA graphs")
    assert repr(fn.choice).startswith("dense: tried: dense ")
    with pytest.raises(attention.UnsupportedCall, match="no candidate runs: dense: kernel=flash4"):
        attention.make("auto", kernel="flash4", replay="auto", device="cpu", **SIZES)


def able(cu=(0, 1024), world=4, mask=CAUSAL, heads=8, q_tokens=None) -> set[str]:
    return set(shortlist(cu, world, mask, heads, heads, q_tokens)[0])


def test_candidates_are_those_that_can_do_the_call():
    gathers = {"zigzag_llama3", "llama3", "ring_allgather"}
    assert able() == {"ulysses", "zigzag"} | gathers
    assert able(heads=6) == able()  # which the world does not divide
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
