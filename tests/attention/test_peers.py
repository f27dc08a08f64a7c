"""The peers: what runs without a GPU really runs, over gloo; the rest says why it can't."""

import pytest

from attention.peers import PEERS, missing
from runner.launch import WorldSpec

WORLDS = (1, 2, 4)
INSTALLED = [name for name in PEERS if missing(name, "cpu") is None]


@pytest.fixture
def in_world(pool):
    def call(job, world, **arguments):
        outcome = pool.get(WorldSpec(world, "cpu")).call(f"tests.peer_jobs:{job}", arguments, 120.0)
        assert outcome.status == "ok", f"{outcome.reason}\n" + "\n".join(outcome.log_tail)
        return outcome.result

    return call


def cases(name, world):
    tokens = 24 * world
    base = {"tokens": tokens, "heads": 16, "kv_heads": 4, "head_dim": 32, "causal": True, "batch": 1}
    found = [base, base | {"kv_heads": 16}, base | {"kv_heads": 4, "head_dim": 80}]
    if name != "usp_yunchang":
        found += [base | {"kv_heads": 1}]
    if not PEERS[name].variant.causal_only:
        found += [base | {"causal": False}]
    if PEERS[name].variant.packs:
        packs = [0, 1, 2 * world, 12 * world + 1, tokens]
        found += [base | {"packs": packs}, base | {"packs": packs, "causal": False, "kv_heads": 1}]
    else:
        found += [base | {"batch": 3}]
    return found


def options(name, world):
    return {
        "rfa_llama3": [{}, {"heads_k_stride": None}],
        "usp_yunchang": [{}, {"ulysses_size": 1}, {"ulysses_size": world}],
    }.get(name, [{}])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_peers_error_stays_near_that_of_one_local_call(in_world, name, world):
    for chosen in options(name, world):
        for found in in_world("compare", world, name=name, options=chosen, cases=cases(name, world), dtype="bf16"):
            assert found["kernel"] == "sdpa_flash"
            for theirs, local in zip(found["errors"], found["local"], strict=True):
                assert theirs < 2 * local, found


@pytest.mark.parametrize("world", WORLDS)
def test_ring_flash_attns_llama3_matches_fp64(in_world, world):
    for chosen in options("rfa_llama3", world):
        for found in in_world("compare", world, name="rfa_llama3", options=chosen, cases=cases("rfa_llama3", world)):
            assert found["errors"][0] < 1e-6, found
            assert max(found["errors"][1:]) < 1e-5, found
