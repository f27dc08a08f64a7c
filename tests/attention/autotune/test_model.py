"""What auto chooses: the model's choices on made-up rates and links, and that every choice runs."""

import re
from dataclasses import replace

import pytest
import torch

import attention
from attention.autotune import hardware, model
from attention.autotune.choice import Choice, Duration, Task
from attention.autotune.hardware import Ceilings, Machine
from attention.autotune.model import choose, task_of
from attention.autotune.trials import contenders
from attention.executors import costs
from attention.executors.plan import plan_steps
from attention.executors.timeline import place_work
from attention.geometry.counts import Shapes, forward_flops
from attention.geometry.schedules import length
from attention.kernels.interface import Call
from attention.masks.band import CAUSAL, FULL, Band
from attention.measured import links, rates
from attention.measured.links import Link, Measured, find, parse, through
from attention.measured.rates import CallClass, Rate
from attention.variants.registry import VARIANTS
from tests.jobs import numerics, trials

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
    found = Machine(GPU, lambda masks: "flash4", ("symm", "nccl"), RATES, tuple(table))
    return replace(found, **kept)


def variants(found: Choice) -> set[str]:
    return {e.candidate.variant for e in found.estimates}


def ms(found: Choice, label: str) -> float:
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
        each = costs.of(v, problem, whole.shapes, e.candidate.options, pulls=True)
        return sum(sum(each.bytes_received(0, back).values()) for back in (False, True))

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


def test_head_groups_hide_the_gather_until_launches_take_longer():
    gathered = replace(task(), backward=False)
    found = choose(gathered, machine(50))
    assert ms(found, "zigzag_llama3 heads_k_stride=2, symm") < ms(found, "zigzag_llama3 heads_k_stride=4, symm")
    short = choose(replace(gathered, cu_seqlens=(0, 4096)), machine(400))
    by_label = {e.label: e.forward for e in short.estimates}
    many = by_label["zigzag_llama3 heads_k_stride=1, symm"]
    assert many.ms == pytest.approx(many.cpu, rel=0.01) and many.cpu > many.gpu
    assert short.best.candidate.options.plain().get("heads_k_stride") != 1


def test_a_graph_has_no_launch_overhead():
    short = task(tokens=1024)
    eager, graphed = choose(short, machine()), choose(short, machine(graphed=True))
    assert eager.best.forward.cpu > eager.best.forward.gpu
    assert (
        "bound by CPU launch overhead, which replay=graphs would remove" in eager.why
        and "launch overhead" not in graphed.why
    )
    assert "replay=graphs" not in choose(short, machine(transports=("nccl",))).why  # which is not captured
    assert all(e.forward.cpu == 0 for e in graphed.estimates)
    assert graphed.best.ms < eager.best.ms


def test_graphs_are_taken_where_launches_take_longer():
    for tokens in (2048, 8192, 16384, 131072):
        short = task(tokens=tokens)
        launched, replayed, found = (choose(short, machine(replayed=x)) for x in (False, True, "auto"))
        assert not any(e.graphs for e in launched.estimates) and all(e.graphs for e in replayed.estimates)
        assert {e.label for e in found.estimates} == {e.label for e in launched.estimates + replayed.estimates}
        worth = replayed.best.ms * model.REPLAYED_WORTH < launched.best.ms
        assert found.best == (replayed if worth else launched).best and found.plain()["graphs"] == worth
        assert worth == (tokens <= 8192)
        assert ("launched one by one" if worth else "replayed") in found.why and "replay=graphs" not in found.why


@pytest.mark.parametrize(
    "kept",
    [{"transports": ("nccl",)}, {"graphed": True}, {"device": "cpu"}, {"memory": 1}, {"q_tokens": 1}],
    ids=str,
)
def test_calls_that_cannot_be_replayed_are_launched(kept):
    short, kept = task(tokens=4096, backward=False), dict(kept)
    if "q_tokens" in kept:
        short = replace(short, mask=FULL, q_tokens=kept.pop("q_tokens"))
    if "memory" in kept:  # what its copies take is one byte too much
        best = choose(short, machine(replayed="auto")).best
        v, problem = VARIANTS[best.candidate.variant], best.candidate.problem(short)
        each = costs.of(v, problem, short.shapes, best.candidate.options)
        peaks = [each.peak_bytes(rank, False) for rank in range(4)]
        kept["memory"] = max(peaks) + 1024 * (2 * 32 + 2 * 8) * 128 * 2 - 1
        assert any(e.graphs for e in choose(short, machine(replayed="auto", memory=kept["memory"] + 1)).estimates)
        assert best.label not in {e.label for e in choose(short, machine(replayed="auto", **kept)).estimates}
        return
    found = choose(short, machine(replayed="auto", **kept))
    assert not any(e.graphs for e in found.estimates)
    assert found.estimates == choose(short, machine(**kept)).estimates


def test_trials_compare_launches_with_graphs_where_either_may_be_faster():
    found = choose(task(tokens=4096), machine(replayed="auto"))
    names = list(dict.fromkeys(e.candidate.variant for e in found.estimates))
    tried = contenders(found, 2)
    assert {(e.candidate.variant, e.graphs) for e in tried} == {(n, on) for n in names[:2] for on in (False, True)}
    for e in tried:
        alike = [x for x in found.estimates if (x.candidate.variant, x.graphs) == (e.candidate.variant, e.graphs)]
        assert e.ms == min(x.ms for x in alike)
    long = choose(task(tokens=131072), machine(replayed="auto"))
    assert any(e.graphs for e in long.estimates) and not any(e.graphs for e in contenders(long, 3))
    assert all(e.graphs for e in contenders(choose(task(tokens=131072), machine(replayed=True)), 3))


def test_graphs_cost_copies_and_those_of_an_all_to_all_more():
    def copies(tokens: int, label: str, **kept) -> tuple[float, ...]:
        found = choose(task(tokens=tokens), machine(**(kept or {"graphed": True})))
        best = next(e for e in found.estimates if e.label == label)
        assert ("copies for graphs" in found.why) == bool(kept)
        return tuple(p.copies for p in (best.forward, best.backward))

    assert copies(8192, "zigzag, symm") == (0, 0)
    forward, backward = copies(8192, "zigzag, symm, graphs", replayed=True)
    # 2048 tokens a rank of 32 and 8 heads: q, out, k and v, read and written, at 0.85 of 4 TB/s
    assert forward == pytest.approx(2 * 2048 * (2 * 32 + 2 * 8) * 128 * 2 / 3.4e9)
    assert backward == pytest.approx(2 * forward)
    assert copies(8192, "ulysses, symm, graphs", replayed=True) == pytest.approx((2 * forward, backward))
    assert copies(16384, "zigzag, symm, graphs", replayed=True) == pytest.approx((2 * forward, 2 * backward))


@pytest.mark.parametrize(("gpu", "cpu"), [(1, 1), (1, 2), (2, 1), (3, 0.5), (0.5, 3), (1, 0)])
def test_cpu_and_gpu_hide_each_other_but_not_quite_where_they_take_as_long(gpu, cpu):
    ms = Duration(0.5 * gpu, 0.25 * gpu, 0.25 * gpu, cpu).ms
    assert max(gpu, cpu) <= ms <= gpu + cpu
    if cpu == gpu:
        assert ms > 1.1 * gpu
    if max(cpu, gpu) > 4 * min(cpu, gpu):
        assert ms < 1.01 * max(gpu, cpu)


def test_a_decode_with_fewer_reductions_has_less_launch_overhead():
    found = choose(replace(task(tokens=131072, mask=FULL, backward=False), q_tokens=1), machine())
    by_reduction = [ms(found, f"tree reduce={how}, symm") for how in ("fused", "packed", "two", "three")]
    assert by_reduction == sorted(by_reduction)
    assert by_reduction[0] < by_reduction[-1] / 2


def test_the_causal_mask_is_balanced_and_others_are_not_asked_for():
    found = choose(task(), machine())
    assert found.best.candidate.variant not in ("ring", "llama3")  # imbalanced
    assert ms(found, "ring, symm") > 1.5 * found.best.ms
    full = choose(task(mask=FULL), machine())
    causal_only = {name for name, v in VARIANTS.items() if v.causal_only}
    assert not variants(full) & causal_only
    assert "defined for causal=true only" in full.left_out["zigzag"]
    assert {"ring", "llama3", "ulysses", "usp"} <= variants(full)


def test_heads_that_the_world_does_not_divide_leave_ulysses_out():
    found = choose(task(world=8, heads=4, kv_heads=4), machine())
    assert "ulysses" not in variants(found)
    assert "the same number of heads" in found.left_out["ulysses"]
    assert "usp" in variants(found)  # within groups of 2 or 4


def test_packed_batches_leave_candidates_that_their_lengths_allow():
    even = Task((0, 4096, 32768), 4, CAUSAL, shapes(), packed=True)
    assert {"llama3", "zigzag_llama3", "ring_varlen", "zigzag_varlen"} <= variants(choose(even, machine()))
    odd = Task((0, 4097, 32768), 4, CAUSAL, shapes(), packed=True)
    found = choose(odd, machine())
    assert variants(found) == {"llama3", "ulysses"}  # which cut the stream, not the sequences
    assert "zigzag_llama3" in found.left_out


@pytest.mark.parametrize("tokens", [16368, 16384, 65536])
def test_a_packed_batch_of_one_sequence_costs_about_as_much_as_the_sequence(tokens):
    """On both sides of what counts as a long shard."""
    here = Machine(H200, lambda masks: "flash4", ("symm",), rates.table(), links.table(), graphed=True)
    dense, pack = (choose(replace(task(tokens), packed=packed), here) for packed in (False, True))
    for name, packed_name in (("zigzag", "zigzag_varlen"), ("ring", "ring_varlen"), ("ulysses", "ulysses")):
        assert ms(pack, f"{packed_name}, symm") == pytest.approx(ms(dense, f"{name}, symm"), rel=0.2)


def test_a_limit_of_memory_leaves_the_gathers_out():
    asked = task(tokens=1 << 20, kv_heads=32)
    wide = choose(asked, machine())
    gathers = {name for name, v in VARIANTS.items() if v.executor == "gather"}
    assert variants(wide) & gathers
    zigzag = VARIANTS["zigzag"]
    each = costs.of(zigzag, zigzag.problem(asked.cu_seqlens, 4, CAUSAL), asked.shapes)
    peak = max(each.peak_bytes(rank, asked.backward) for rank in range(4))
    tight = choose(asked, machine(memory=peak))
    whole = {e.label for e in tight.estimates if e.candidate.options.plain().get("heads_k_stride", 0) is None}
    assert "zigzag" in variants(tight)
    assert not whole
    assert re.search(r"holds .* GiB beside the inputs, of .* allowed", tight.left_out["zigzag_llama3"])
    with pytest.raises(ValueError, match="no variant can do this: holds"):
        choose(asked, machine(memory=1))


def test_the_faster_transport_is_taken():
    slow_pulls = [replace(m, link=Link(1, 10)) if m.transport == "symm" else m for m in machine().links]
    assert choose(task(), machine()).best.transport == "symm"
    assert choose(task(), machine(links=tuple(slow_pulls))).best.transport == "nccl"


def test_a_kernel_that_refuses_leaves_the_candidate_out():
    window = Band(4096, 0)

    def refuses(masks: tuple[Band, ...]) -> str:
        if any(mask.windowed and mask != window for mask in masks):
            raise ValueError("a part of a window: not here")
        return "flash4"

    found = choose(task(mask=window), machine(kernel=refuses))
    assert "ring" not in variants(found)
    assert found.left_out["ring"] == "a part of a window: not here"
    assert "ulysses" in variants(found)


def test_a_decode_is_reduced_rather_than_sent_round():
    asked = Task((0, 1 << 20), 8, FULL, shapes(), backward=False, q_tokens=1)
    found = choose(asked, machine())
    assert (found.best.candidate.variant, found.best.candidate.options.reduce) == ("tree", "fused")
    assert variants(found) == {name for name, v in VARIANTS.items() if v.decode}
    nccl = choose(asked, machine(transports=("nccl",)))
    assert nccl.best.candidate.options.reduce != "fused"
    assert "symmetric memory" in nccl.left_out["tree reduce=fused"]


def test_a_world_of_one_is_dense():
    assert variants(choose(task(world=1), machine())) == {"dense"}


def test_the_measured_order_on_four_h200_is_kept_to_five_percent():
    """What auto takes there is within 5% of the fastest measured: total ms of 32768 tokens, 32:8 heads, D 128, causal."""
    measured = {"zigzag_llama3": 13.46, "ulysses": 13.07, "zigzag": 13.98}
    here = Machine(H200, lambda masks: "flash4", ("symm", "nccl"), rates.table(), links.table())
    found = choose(task(), here)
    fastest = {v: min(e.ms for e in found.estimates if e.candidate.variant == v) for v in measured}
    assert measured[min(fastest, key=lambda v: fastest[v])] <= 1.05 * min(measured.values())
    for name, total in measured.items():
        assert fastest[name] == pytest.approx(total, rel=0.05)
    assert found.best.transport == "symm"
    assert found.basis == "rates: measured on NVIDIA H200; links: measured on NVIDIA H200"


MEASURED = {  # total ms, flash4, of results/h200-x4/speed, speed_mha, speed_gqa8 and window
    (131072, 32, 8, CAUSAL): {"zigzag": 206.85, "zigzag_llama3": 202.99, "ulysses": 202.80},
    (32768, 32, 32, CAUSAL): {"zigzag": 14.21, "zigzag_llama3": 14.50, "ulysses": 13.21},
    (32768, 64, 8, CAUSAL): {"zigzag": 27.29, "zigzag_llama3": 26.73, "ulysses": 25.76},
    (131072, 32, 8, Band(4096, 0)): {"ring": 14.72, "ring_allgather": 14.57, "ulysses": 15.90, "zigzag_llama3": 14.85},
}


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_fastest_measured_is_taken_to_five_percent(sizes):
    tokens, heads, kv_heads, mask = sizes
    measured = MEASURED[sizes]
    here = Machine(H200, lambda masks: "flash4", ("symm", "nccl"), rates.table(), links.table())
    found = choose(task(tokens, mask=mask, heads=heads, kv_heads=kv_heads), here)
    fastest = {v: min(e.ms for e in found.estimates if e.candidate.variant == v) for v in measured}
    assert measured[min(fastest, key=lambda v: fastest[v])] <= 1.05 * min(measured.values())
    for name, total in measured.items():
        assert fastest[name] == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("options", [{}, {"own_first": True}, {"grouping": "packed"}], ids=str)
@pytest.mark.parametrize("name", ["zigzag_llama3", "zigzag_varlen", "llama3", "ring_varlen"])
@pytest.mark.parametrize("n", [1, 4, 8, 9, 12])
def test_packed_calls_copy_the_tokens_that_the_plan_copies(name, n, options):
    """Queries and keys that lie in several intervals are copied together for a call."""
    if options and name != "zigzag_llama3":
        pytest.skip("an option of zigzag_llama3")
    cu = tuple(8 * i for i in range(n + 1))
    problem = VARIANTS[name].problem(cu, 4, CAUSAL, options)
    for rank in range(4):
        planned = plan_steps(problem, rank, Call(1.0), True, torch.device("cpu"))
        for step, work in zip(planned, place_work(problem, rank), strict=True):
            taken = [
                sum(length(x) for x in found if len(x) > 1)
                for found in zip(*((c.q, c.k) for c in step.calls), strict=True)
            ]
            assert (taken or [0, 0]) == [work.stretched_queries, work.stretched_keys]


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
    found = choose(task(), unknown)
    assert found.basis == "rates: this machine's ceilings; links: this machine's ceilings"
    assert unknown.speeds("flash4", CAUSAL, 128, True, False, 8192)[0].flops == 1000e12 * hardware.KERNEL_SHARE
    assert choose(task(), machine(gpu="another")).basis == "rates: defaults; links: defaults"
    assert Ceilings(1, 1, Link(1, 0)).source == "defaults"


def test_a_link_goes_through_the_two_messages_it_was_measured_with():
    link = through((1e6, 2e-5), (1e8, 4e-4))
    assert link.seconds(1e6) == pytest.approx(2e-5)
    assert link.seconds(1e8) == pytest.approx(4e-4)
    assert link.seconds(0) == 0
    with pytest.raises(ValueError, match="more bytes and take longer"):
        through((1e8, 4e-4), (1e6, 2e-5))


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


def test_a_table_of_links_with_other_columns_or_no_bandwidth_is_refused():
    with pytest.raises(ValueError, match=r"columns gpu, world: must be gpu, world, transport"):
        parse("gpu,world\n")
    header = ",".join(links.COLUMNS)
    with pytest.raises(ValueError, match="must be above 0"):
        parse(f"{header}\nx,4,symm,pull,0,1,\n")


def test_the_choice_says_why_and_is_plain():
    plain = choose(task(), machine()).plain()
    label, first = next(iter(plain["estimates_ms"].items()))
    assert plain["why"].startswith(f"{label}: ")
    assert "exposed communication" in plain["why"]
    assert first == min(plain["estimates_ms"].values())
    assert plain["left_out"]["dense"] == "nothing is sharded"


def test_make_says_what_is_missing():
    with pytest.raises(ValueError, match="tokens or else cu_seqlens, head_dim: must be given"):
        attention.make("auto", heads=4)
    with pytest.raises(ValueError, match=r"toknes=3: auto has no such option; its options: tokens, cu_seqlens"):
        attention.make("auto", toknes=3)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        attention.make("auto", tokens=64, heads=4, kv_heads=3, head_dim=16)
    assert "auto" in attention.names()


def test_make_gives_the_variant_that_was_chosen():
    fn = attention.make("auto", tokens=64, heads=4, head_dim=16, causal=True, dtype=torch.float32)
    assert fn.variant.name == "dense" == fn.choice.best.candidate.variant
    assert attention.make("ring").choice is None


def test_auto_is_eager_where_graphs_are_not_faster():
    given = {"tokens": 64, "heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    fn = attention.make("auto", replay="auto", **given)  # a CPU has no graphs
    assert fn.replay == "none" and not fn.choice.best.graphs


@pytest.mark.parametrize("name, more", [("zigzag", {}), ("auto", {"tokens": 64, "heads": 2, "head_dim": 16})])
def test_replay_is_one_of_three_and_launches_and_graphs_are_no_more(name, more):
    with pytest.raises(ValueError, match="replay='perhaps': must be one of none, graphs, auto"):
        attention.make(name, replay="perhaps", **more)
    with pytest.raises(ValueError, match=r"replay='launches': is gone, .*; use none, or graphs for short calls"):
        attention.make(name, replay="launches", **more)
    for old, new in ((True, "graphs"), (False, "none"), ("auto", "auto")):
        with pytest.raises(ValueError, match=f"graphs={old!r}: is now an option of replay: give replay='{new}'"):
            attention.make(name, graphs=old, **more)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "more",
    [{}, {"cu_seqlens": [0, 100, 512], "tokens": None}, {"backward": False}, {"window": (40, 0)}, {"q_tokens": 2}],
    ids=str,
)
def test_trials_take_the_fastest_of_those_in_front_on_all_ranks_alike(in_world, more, deterministic):
    given = {
        "tokens": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "causal": "q_tokens" not in more,
        "trials": 3,
    } | more
    first, *others = in_world(trials.auto_by_trial, 2, deterministic=deterministic, **given)
    assert others == [first] and first["random"]
    tried = first["tried_ms"]
    leading = list(dict.fromkeys(label.split()[0].rstrip(",") for label in first["estimates_ms"]))[:3]
    assert sorted(label.split()[0].rstrip(",") for label in tried) == sorted(leading)
    assert list(tried.values()) == sorted(tried.values()) and min(tried.values()) > 0
    assert next(iter(tried)).startswith(first["variant"])
    assert first["why"].startswith(next(iter(tried))) and "; tried: " in first["why"]


SHORT = {"tokens": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "causal": True}  # an iteration takes some ms


@pytest.mark.slow
def test_trials_leave_the_models_choice_where_it_is_slow_here(in_world):
    (usual, _) = in_world(trials.auto_by_trial, 2, **SHORT)
    exchange = VARIANTS[usual["variant"]].executor
    (found, _) = in_world(trials.auto_by_trial, 2, slowed=exchange, trials=4, **SHORT)
    assert next(iter(found["estimates_ms"])) == next(iter(usual["estimates_ms"]))
    assert VARIANTS[found["variant"]].executor != exchange
    assert usual["tried_ms"] is None


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_candidate_that_fails_in_a_trial_is_left_out_on_all_ranks_alike(in_world, all_of_them):
    (usual, _) = in_world(trials.auto_by_trial, 2, **SHORT)
    broken = {v.executor for v in VARIANTS.values()} if all_of_them else {VARIANTS[usual["variant"]].executor}
    found, other = in_world(trials.auto_by_trial, 2, broken=sorted(broken), trials=4, **SHORT)
    assert found == other
    refused = [label for label, why in found["left_out"].items() if why == "broken here"]
    assert refused and set(refused) < set(found["estimates_ms"])
    if all_of_them:  # then by the model, and the call says why it can't be
        assert len(refused) == 4 and found["tried_ms"] is None and found["variant"] == usual["variant"]
    else:
        assert found["tried_ms"] and not set(refused) & set(found["tried_ms"])
        assert VARIANTS[found["variant"]].executor not in broken


@pytest.mark.parametrize("late", [False, True], ids=["on all ranks", "on one rank alone"])
def test_a_trial_that_fails_by_any_error_is_recorded_and_passed_over_on_all_ranks(in_world, late):
    given = SHORT | {"trials": 4, "backward": not late}
    (usual, _) = in_world(trials.auto_by_trial, 2, **(given | {"trials": None}))
    broken = VARIANTS[usual["variant"]].executor
    found, other = in_world(trials.auto_by_trial, 2, broken=[broken], unexpected=True, late=late, **given)
    assert found == other
    failed = [label for label, why in found["left_out"].items() if why == "RuntimeError: broken here"]
    assert failed and not set(failed) & set(found["tried_ms"])
    assert VARIANTS[found["variant"]].executor != broken


def test_trials_that_cannot_be_say_why():
    given = {"tokens": 64, "heads": 4, "head_dim": 16}
    for wrong in (1, -1, 2.0, "two", True):
        with pytest.raises(ValueError, match=f"trials={wrong!r}: must be .* whole number of at least 2"):
            attention.make("auto", trials=wrong, **given)
    with pytest.raises(ValueError, match="trials=2: calls are tried as launched one by one"):
        attention.make("auto", trials=2, graphed=True, **given)
    assert not attention.make("auto", trials=2, **given).choice.tried  # dense alone


CASES = [
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True},
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": False},
    {"tokens": 96, "heads": 8, "kv_heads": 8, "head_dim": 16, "causal": True, "window": [10, 0]},
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True, "packs": [0, 16, 96]},
    {"tokens": 96, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True, "packs": [0, 13, 96]},
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_choice_runs_and_matches_fp64(in_world, world):
    for case in CASES:
        size = {"cu_seqlens": case["packs"]} if "packs" in case else {"tokens": case["tokens"], "batch": 2}
        given = {key: case[key] for key in ("heads", "kv_heads", "head_dim", "causal", "window") if key in case}
        (found,) = in_world(numerics.compare, world, name="auto", options=size | given, cases=[case])
        assert found["errors"][0] < 1e-6, found
        assert max(found["errors"][1:]) < 1e-5, found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_candidate_runs_and_matches_fp64(in_world, case):
    packs = case.get("packs")
    asked = task_of(
        packs or (0, case["tokens"]),
        4,
        Shapes(2, case["heads"], case["kv_heads"], case["head_dim"], 4),
        case["causal"],
        case.get("window", (-1, -1)),
        packs is not None,
    )
    able, _ = model.candidates(asked)
    assert able
    for each in able:
        if each.options.plain().get("grouping") == "fused":
            continue  # left out where its kernel has no rate
        (found,) = in_world(numerics.compare, 4, name=each.variant, options=each.options.plain(), cases=[case])
        assert max(found["errors"]) < 1e-5, (each.label, found)
