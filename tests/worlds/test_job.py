"""One run within a world, as the launcher sees it."""

import pickle

import pytest

from runner.launch.files import WorldSpec
from tests.jobs import program
from tests.support.composing import python, resolved
from tests.support.gpus import result_of

SIZES = ("hardware=cpu", "dtype=fp32", "seq_len=128", "heads=4", "head_dim=64", "phases=false")
SHORT = ("timing.timing_runs=1", "timing.warmup_runs=1", "timing.warmup_ms=0")


def experiment(world_size, *overrides, seed=7):
    return resolved(*SIZES, *SHORT, f"world_size={world_size}", *overrides, seed=seed).plain()


def measured(pool, world_size, *overrides, **given):
    return result_of(pool, program.run_of, world_size, experiment=experiment(world_size, *overrides, **given))


def test_what_a_job_returns_is_read_without_torch(pool, tmp_path):
    """As the process that started the world reads it."""
    plain = experiment(1, "batch=1", "baseline=none")
    outcome = pool.get(WorldSpec(1, "cpu")).call("runner.job:run", {"result": program.begun(plain)})
    assert outcome.status == "ok", outcome.reason
    (tmp_path / "reply").write_bytes(pickle.dumps(outcome))
    reads = "import pickle, sys; pickle.load(open('reply', 'rb')); assert 'torch' not in sys.modules"
    assert not python("-c", reads, cwd=tmp_path).stderr


def test_equal_runs_in_one_world_take_equally_much_memory(pool):
    """What earlier runs left, such as references of other seeds that are kept, is no part of a run's own."""
    peaks = []
    for seed in range(3):
        (rank,) = measured(pool, 1, "batch=16", "baseline=none", "timing.settle_ms=0", seed=seed)["memory"]["by_rank"]
        assert rank["peak_resident"] > rank["inputs"]
        peaks.append(rank["peak_resident"])
    assert max(peaks) < 1.05 * min(peaks), peaks


@pytest.mark.parametrize("new_packs", [False, True])
def test_the_last_timed_iteration_is_compared_or_it_is_said_why_not(pool, new_packs):
    pack = ("attention=balanced", "batch=1", "seqlens=[2,6,8,16,24,32,40]", "baseline=none")
    correctness = measured(pool, 1, *pack, f"timing.new_packs={new_packs}")["correctness"]
    tensors = {"out", "dq", "dk", "dv"}
    assert correctness["timed"]["last"].keys() == ({"why"} if new_packs else tensors)
    for check in (correctness, correctness["timed"]):
        assert check["new_pack"].keys() == (tensors if new_packs else set())


@pytest.mark.parametrize(
    ("size", "share"),
    [
        (["attention=zigzag", "batch=1", "kv_heads=1", "seq_len=512"], 1.0),  # the ranks share a piece of the reference
        (["attention=ulysses", "batch=2", "kv_heads=2", "check.max_tflop=1e-9"], 0.5),  # a head of both batch elements
    ],
    ids=["shared", "sampled"],
)
def test_what_a_call_has_beyond_plain_attention_is_checked_counted_and_in_the_baseline(pool, size, share):
    result = measured(pool, 2, *size, "sinks=true", "softcap=1.5", "scale=-0.2", "v_head_dim=24")
    correctness = result["correctness"]
    assert correctness["checked_share"] == share and correctness["lse"]["checked"]
    for tensors in (correctness["tensors"], correctness["timed"]["last"], correctness["timed"]["negated"]):
        assert tensors.keys() == {"out", "dq", "dk", "dv", "dsinks"}
        assert all(0 < error["worst_row"] < 1e-5 for error in tensors.values()) or tensors is not correctness["tensors"]
    tokens, batch = result["metrics"]["connections"], 1 if share == 1 else 2
    pair = 2 * batch * 4 * tokens
    assert result["metrics"]["flops"]["forward"] == pair * (64 + 24)
    assert result["metrics"]["flops"]["backward"] == pair * (3 * 64 + 2 * 24)
    assert result["baseline"]["kernel"] == "math" and "speedup" in result["baseline"]


def test_a_rank_that_hangs_in_the_baseline_is_named_within_the_usual_limit():
    """Only rank 0 works there: the others are waiting, and as such never late by themselves."""
    from runner.launch.worlds import Pool

    with Pool() as pool:
        given = {"experiment": experiment(2, "batch=1", "launch.fault=0:baseline:hang")}
        outcome = pool.get(WorldSpec(2, "cpu")).call(program.run_of, given, timeout_s=5.0)
    assert (outcome.status, outcome.rank, outcome.phase) == ("timeout", 0, "baseline"), outcome.reason
    assert "silent for more than 5 s" in outcome.reason
