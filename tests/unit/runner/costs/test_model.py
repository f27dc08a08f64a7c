"""The model of time on made-up rates and links."""

from dataclasses import replace

import pytest

from attention.geometry.counts import Shapes, forward_flops
from attention.masks.band import CAUSAL, FULL
from attention.variants.registry import VARIANTS
from runner.costs import rates
from runner.costs.hardware import Machine
from runner.costs.links import Link, Measured
from runner.costs.model import Task
from runner.costs.rates import CallClass, Rate
from runner.predict.estimates import choose

GPU = "NVIDIA Test 1"
RATES = tuple(
    Rate(GPU, CallClass(128, "gqa", mask, "dense", "long"), "flash4", 600, 600) for mask in ("causal", "full", "window")
)


def task(tokens=32768, world=4, mask=CAUSAL, heads=32, kv_heads=8, **more):
    return Task((0, tokens), world, mask, Shapes(1, heads, kv_heads, 128, 2), **more)


def machine(gb_s=400.0, latency_us=10.0, **more):
    """Every pattern alike, but for a copy, which is fast."""
    patterns = [("symm", "pull"), ("symm", "pull_all"), ("symm", "slots"), ("nccl", "p2p"), ("nccl", "all_gather")]
    table = [Measured(GPU, 4, transport, pattern, Link(gb_s, latency_us)) for transport, pattern in patterns]
    table.append(Measured(GPU, 1, "memory", "copy", Link(4000, 0)))
    return replace(Machine(GPU, "flash4", ("symm", "nccl"), RATES, tuple(table)), **more)


def by_label(*call):
    """Estimates, the fastest first, by what they are of."""
    estimates, _ = choose(*call)
    return {f"{e.candidate.label}, {e.transport}": e for e in sorted(estimates, key=lambda e: e.ms)}


def best(*call):
    return next(iter(by_label(*call).values()))


def test_a_link_that_costs_nothing_leaves_the_compute_alone():
    flops = forward_flops(task().shapes, CAUSAL.pairs(32768, 32768)) / 4
    for e in choose(task(), machine(1e9, 0), ["zigzag", "zigzag_llama3", "ulysses"])[0]:
        forward, backward = e.passes
        assert forward.exposed < 1e-3
        # half a tile on the diagonal, of which the rate has its share, and the calls' tails are all that comes to the FLOPs
        assert flops / 603e9 <= forward.compute < 1.05 * flops / 600e9
        assert backward.compute / forward.compute == pytest.approx(2.5, rel=0.1)


def test_a_ring_hides_what_an_all_to_all_exposes_and_a_faster_link_is_never_slower():
    long = task(tokens=1 << 20, kv_heads=1)
    slow, fast = (by_label(long, machine(gb_s)) for gb_s in (20, 40))
    ring, all_to_all = (slow[f"{name}, symm"].passes[0] for name in ("zigzag", "ulysses"))
    assert ring.exposed < 0.01 * ring.compute and all_to_all.exposed > 0.02 * all_to_all.compute
    assert all(fast[label].ms <= e.ms for label, e in slow.items())


def test_the_causal_mask_is_balanced_and_others_are_not_asked_for():
    estimates = by_label(task(), machine())
    assert estimates["ring, symm"].ms > 1.5 * next(iter(estimates.values())).ms
    full, reasons = choose(task(mask=FULL), machine())
    assert not {e.candidate.variant for e in full} & {name for name, v in VARIANTS.items() if v.causal_only}
    assert "is for causal masks" in reasons["zigzag"]


def test_a_limit_of_memory_leaves_the_gathers_out():
    asked = task(tokens=1 << 20, kv_heads=32)
    peak = max(e.peak_bytes for e in choose(asked, machine(), ["zigzag"])[0])
    estimates, reasons = choose(asked, machine(memory=peak), ["zigzag", "llama3"])
    assert {e.candidate.variant for e in estimates} == {"zigzag", "llama3"}
    assert all(e.candidate.options.heads_k_stride for e in estimates if e.candidate.variant == "llama3")
    assert "GiB beside the inputs, of " in reasons["llama3"]


def test_a_decode_is_reduced_rather_than_sent_round():
    asked = task(1 << 20, 8, FULL, backward=False, q_tokens=1)
    fastest = best(asked, machine())
    assert (fastest.candidate.variant, fastest.candidate.options.reduce) == ("tree", "fused")
    estimates, reasons = choose(asked, machine(transports=("nccl",)))
    assert "fused" not in {getattr(e.candidate.options, "reduce", None) for e in estimates}
    assert "symmetric memory" in reasons["tree"]


def test_the_cost_of_an_edge_follows_from_long_and_short_sequences():
    """Of a kernel that does 500 TFLOP/s and takes each causal query as long as 100 keys more would."""

    def rate(length, heads="gqa", layout="dense"):
        tokens = rates.TOKENS[length]
        pairs = CAUSAL.pairs(tokens, tokens)
        whole = 500 * pairs / (pairs + 100 * tokens)
        return Rate(GPU, CallClass(128, heads, "causal", layout, length), "flash4", whole, whole / 2)

    table = [rate("long"), rate("short"), other := rate("long", "mha")]
    for speed, flops in zip(rates.speeds(table, table[0]), (500e12, 250e12), strict=True):
        assert speed.flops == pytest.approx(flops) and speed.edge == pytest.approx(100)
    assert rates.speeds([other], other)[0].edge == rates.HALF_TILE  # no short one: half a tile
    packed = rate("long", "mha", "packed")
    assert rates.speeds([*table, packed], packed)[0].edge == pytest.approx(100)  # as of other heads
