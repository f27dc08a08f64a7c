"""The model of time on made-up rates and links."""

import re
from dataclasses import replace

import pytest

from attention.geometry.counts import Shapes, forward_flops
from attention.masks.band import CAUSAL, FULL
from attention.variants.registry import VARIANTS
from runner.costs import dry_run, hardware, links, rates
from runner.costs.choice import Duration, Estimates, Task
from runner.costs.hardware import Machine
from runner.costs.links import Link, Measured, find
from runner.costs.model import choose
from runner.costs.rates import CallClass, Rate

GPU = "NVIDIA Test 1"
H200 = "NVIDIA H200"
RATES = tuple(
    Rate(GPU, CallClass(128, "gqa", mask, "dense", "long"), "flash4", 600, 600) for mask in ("causal", "full", "window")
)


def shapes(heads=32, kv_heads=8, batch=1) -> Shapes:
    return Shapes(batch, heads, kv_heads, 128, 2)


def task(tokens=32768, world=4, mask=CAUSAL, backward=True, **heads) -> Task:
    return Task((0, tokens), world, mask, shapes(**heads), backward=backward)


def machine(gb_s=400.0, latency_us=10.0, **kept) -> Machine:
    """Every pattern alike, but for a copy, which is fast."""
    patterns = [("symm", "pull"), ("symm", "pull_all"), ("symm", "slots"), ("nccl", "p2p"), ("nccl", "all_gather")]
    table = [Measured(GPU, 4, transport, pattern, Link(gb_s, latency_us)) for transport, pattern in patterns]
    table.append(Measured(GPU, 1, "memory", "copy", Link(4000, 0)))
    found = Machine(GPU, "flash4", ("symm", "nccl"), RATES, tuple(table))
    return replace(found, **kept)


def variants(found: Estimates) -> set[str]:
    return {e.candidate.variant for e in found.estimates}


def ms(found: Estimates, label: str) -> float:
    return next(e.ms for e in found.estimates if e.label == label)


def test_a_link_that_costs_nothing_leaves_the_compute_alone():
    found = choose(task(), machine(1e9, 0))
    flops = forward_flops(shapes(), CAUSAL.pairs(32768, 32768)) / 4
    balanced = [e for e in found.estimates if e.candidate.variant in ("zigzag", "zigzag_llama3", "ulysses")]
    for e in balanced:
        assert e.forward.exposed < 1e-3
        # half a tile on the diagonal, of which the rate has its share, and the calls' tails are all that comes to the FLOPs
        assert flops / 603e9 <= e.forward.compute < 1.05 * flops / 600e9
        assert e.backward.compute / e.forward.compute == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(("kv_heads", "fewest"), [(32, "ulysses"), (1, "ring")])
def test_a_slow_link_favours_the_fewest_bytes(kv_heads, fewest):
    """All heads' queries go round in the all-to-all, all keys in the ring: few KV heads favour the ring."""
    whole = task(world=8, mask=FULL, kv_heads=kv_heads)
    found = choose(whole, machine(0.5))

    def received(e) -> int:
        v, problem = VARIANTS[e.candidate.variant], e.candidate.problem(whole)
        passes = dry_run(v, problem, whole.shapes, e.candidate.options, rank=0, pulls=True, backward=True)
        return sum(sum(x.received.values()) for x in passes)

    assert received(found.best) <= 1.05 * min(received(e) for e in found.estimates)
    assert (found.best.candidate.variant == "ulysses") == (fewest == "ulysses")


def test_a_ring_hides_what_an_all_to_all_exposes():
    long = task(tokens=1 << 20, kv_heads=1)
    found = {e.label: e for e in choose(long, machine(20)).estimates}
    assert found["zigzag, symm"].forward.exposed < 0.01 * found["zigzag, symm"].forward.compute
    assert found["ulysses, symm"].forward.exposed > 0.02 * found["ulysses, symm"].forward.compute


@pytest.mark.parametrize("gb_s", [1, 30, 100, 400])
def test_a_faster_link_is_never_slower(gb_s):
    slow, fast = ({e.label: e.ms for e in choose(task(), machine(rate)).estimates} for rate in (gb_s, 2 * gb_s))
    assert slow.keys() == fast.keys()
    assert all(fast[label] <= slow[label] for label in slow)


def test_a_graph_has_no_launch_overhead():
    short = task(tokens=1024)
    eager, graphed = choose(short, machine()), choose(short, machine(graphed=True))
    assert eager.best.forward.cpu > eager.best.forward.gpu
    assert all(e.forward.cpu == 0 for e in graphed.estimates)
    assert graphed.best.ms < eager.best.ms


def test_graphs_cost_copies_and_those_of_an_all_to_all_more():
    def copies(tokens: int, label: str, **kept) -> tuple[float, ...]:
        found = choose(task(tokens=tokens), machine(**(kept or {"graphed": True})))
        best = next(e for e in found.estimates if e.label == label)
        return tuple(p.copies for p in (best.forward, best.backward))

    assert copies(8192, "zigzag, symm") == (0, 0)
    forward, backward = copies(8192, "zigzag, symm, graphs", graphed=True, replayed=True)
    # 2048 tokens a rank of 32 and 8 heads: q, out, k and v, read and written, at 0.85 of 4 TB/s
    assert forward == pytest.approx(2 * 2048 * (2 * 32 + 2 * 8) * 128 * 2 / 3.4e9)
    assert backward == pytest.approx(2 * forward)
    assert copies(8192, "ulysses, symm, graphs", graphed=True, replayed=True) == pytest.approx((2 * forward, backward))
    assert copies(16384, "zigzag, symm, graphs", graphed=True, replayed=True) == pytest.approx(
        (2 * forward, 2 * backward)
    )


@pytest.mark.parametrize(("gpu", "cpu"), [(1, 1), (1, 2), (2, 1), (3, 0.5), (0.5, 3), (1, 0)])
def test_cpu_and_gpu_hide_each_other_but_not_quite_where_they_take_as_long(gpu, cpu):
    ms = Duration(0.5 * gpu, 0.25 * gpu, 0.25 * gpu, cpu).ms
    assert max(gpu, cpu) <= ms <= gpu + cpu
    if cpu == gpu:
        assert ms > 1.1 * gpu
    if max(cpu, gpu) > 4 * min(cpu, gpu):
        assert ms < 1.01 * max(gpu, cpu)


def test_the_causal_mask_is_balanced_and_others_are_not_asked_for():
    found = choose(task(), machine())
    assert found.best.candidate.variant not in ("ring", "llama3")  # imbalanced
    assert ms(found, "ring, symm") > 1.5 * found.best.ms
    full = choose(task(mask=FULL), machine())
    causal_only = {name for name, v in VARIANTS.items() if v.causal_only}
    assert not variants(full) & causal_only
    assert "is for causal masks" in full.left_out["zigzag"]
    assert {"ring", "llama3", "ulysses", "usp"} <= variants(full)


def test_a_limit_of_memory_leaves_the_gathers_out():
    asked = task(tokens=1 << 20, kv_heads=32)
    wide = choose(asked, machine())
    gathers = {name for name, v in VARIANTS.items() if v.executor == "gather"}
    assert variants(wide) & gathers
    peak = max(e.peak_bytes for e in wide.estimates if e.candidate.variant == "zigzag")
    tight = choose(asked, machine(memory=peak))
    whole = {e.label for e in tight.estimates if e.candidate.options.plain().get("heads_k_stride", 0) is None}
    assert "zigzag" in variants(tight)
    assert not whole
    assert re.search(r"holds .* GiB beside the inputs, of .* allowed", tight.left_out["zigzag_llama3"])
    with pytest.raises(ValueError, match="no variant can do this: holds"):
        choose(asked, machine(memory=1))


def test_the_faster_transport_is_taken():
    for slow, fast in (("symm", "nccl"), ("nccl", "symm")):
        links = [replace(m, link=Link(1, 10)) if m.transport == slow else m for m in machine().links]
        assert choose(task(), machine(links=tuple(links))).best.transport == fast


def test_a_decode_is_reduced_rather_than_sent_round():
    asked = Task((0, 1 << 20), 8, FULL, shapes(), backward=False, q_tokens=1)
    found = choose(asked, machine())
    assert (found.best.candidate.variant, found.best.candidate.options.reduce) == ("tree", "fused")
    assert variants(found) == {name for name, v in VARIANTS.items() if v.decode}
    nccl = choose(asked, machine(transports=("nccl",)))
    assert nccl.best.candidate.options.reduce != "fused"
    assert "symmetric memory" in nccl.left_out["tree reduce=fused"]


def test_the_cost_of_an_edge_follows_from_long_and_short_sequences():
    """Of a kernel that does 500 TFLOP/s and takes each causal query as long as 100 keys more would."""

    def rate(length: str, heads: str = "gqa") -> Rate:
        tokens = rates.TOKENS[length]
        whole = 500 * CAUSAL.pairs(tokens, tokens) / (CAUSAL.pairs(tokens, tokens) + 100 * tokens)
        return Rate(GPU, CallClass(128, heads, "causal", "dense", length), "flash4", whole, whole / 2)

    table = [rate("long"), rate("short"), rate("long", "mha")]
    for speed, flops in zip(rates.speeds(table, table[0]), (500e12, 250e12), strict=True):
        assert speed.flops == pytest.approx(flops) and speed.edge == pytest.approx(100)
    alone = rates.speeds(table[2:], table[2])[0]  # no short one: half a tile
    assert alone.edge == rates.HALF_TILE and table[2].forward * 1e12 < alone.flops < 500e12
    packed = replace(table[2], call=replace(table[2].call, layout="packed"))
    assert rates.speeds([*table, packed], packed)[0].edge == pytest.approx(100)  # as of other heads
    full = Rate(GPU, CallClass(128, "gqa", "full", "dense", "long"), "flash4", 600, 500)
    assert rates.speeds([full], full)[0].flops == 600e12  # on no edge


def test_an_unmeasured_machine_goes_by_its_ceilings():
    own = hardware.ceilings({"matmul_tflops": 1000, "copy_gb_s": 3000, "link_gb_s": 50}, "cuda")
    unknown = machine(gpu="another", ceilings=own)
    assert unknown.speeds(CAUSAL, 128, True, False, 8192)[0].flops == 1000e12 * hardware.KERNEL_SHARE
    assert unknown.link("symm", "one", 4).gb_s == 50
    assert machine(gpu="another").fallback == hardware.DEFAULTS["cuda"]


def test_the_packages_links_are_those_measured():
    """GB/s of 128 MB and 16 MB a rank in a world of four."""
    for pattern, transport, ranks, large, small in (
        ("pull", "symm", 1, 359, 280),
        ("pull_all", "symm", 3, 367, 262),
        ("p2p", "nccl", 1, 152, 70),
        ("all_gather", "nccl", 3, 311, 237),
    ):
        link = find(links.table(), H200, 4, transport, pattern)
        for mb, gb_s in ((128, large), (16, small)):
            size = ranks * mb * 2**20
            assert size / link.seconds(size) / 1e9 == pytest.approx(gb_s, rel=0.02)
    assert find(links.table(), H200, 2, "symm", "pull") == find(links.table(), H200, 4, "symm", "pull")
    assert find(links.table(), "another", 4, "symm", "pull") is None
