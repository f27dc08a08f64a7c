"""Timing methods on a simulated clock, so that every duration is known; and one real measurement of a sleep."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attention.profiling import Recorder
from runner.measure import phases, timing
from runner.measure.attention_work import Layers, other_orders
from runner.measure.duration import baseline_runs
from runner.measure.statistics import slowest
from runner.measure.stopwatch import Stopwatch
from runner.measure.timing import LEAD_MS, Timer, Warmed, overhead_ms, simple
from tests.jobs import program
from tests.support.composing import resolved


def alone(device="cpu"):
    """The only rank of a world."""
    return SimpleNamespace(
        device=torch.device(device), world=1, rank=0, say=lambda *_: None, agree=lambda x: x, gather=lambda x: [x]
    )


class Watch(Stopwatch):
    """Simulated time in ms, of the host's clock too. Aligning and settling take long: neither may show in a sample. A mark costs what
    is in `costs`. others: what the other ranks gathered."""

    ms, settling_ms = 0.0, 1000.0

    def __init__(self, monkeypatch):
        super().__init__(alone())
        self.on_gpu, self.costs, self.log, self.others = True, [], [], lambda mine: []
        self.me.gather = lambda mine: [mine, *self.others(mine)]
        self.me.say = lambda phase, expected_s: self.log.append(f"say {expected_s:g}")
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.ms / 1e3))

    def align(self):
        self.log.append("align")
        self.ms += 1000

    def mark(self):
        now = self.ms
        self.ms += self.costs.pop(0) if self.costs else 0
        return round(now * 1e6)

    def settle(self):
        self.log.append("settle")
        self.ms += self.settling_ms

    def work(self, **durations):
        """A timer of passes that each take the next of their durations, the last one from then on."""

        def run(which):
            self.log.append(which)
            first, *more = durations[which]
            self.ms += first
            durations[which] = more or [first]

        return Timer(timing.Called(tuple(durations), run), self)


@pytest.fixture
def watch(monkeypatch):
    gc.freeze()  # collections before samples then cost little
    yield Watch(monkeypatch)
    gc.unfreeze()


def test_simple_is_the_mean_of_the_runs_after_one_untimed_call(watch):
    work = watch.work(forward=[500, 1, 2, 6], backward=[700, 10, 20, 60]).work
    work.repeat = lambda which, times: [work.run(which) for _ in range(times)]
    assert simple(work, watch, 3) == {"forward": [3], "backward": [30]}


def test_a_sample_keeps_every_duration_and_aligns_flushes_and_announces_outside_its_marks(watch):
    flushed = []
    timer = watch.work(forward=[3, 1, 2], backward=[30, 10, 20])
    timer.flush, run = torch.ones(4), timer.work.run

    def dirty(which):
        flushed.append(not timer.flush.any())
        timer.flush.fill_(1)
        run(which)

    timer.work.run = dirty
    assert timer.sample(3) == {"forward": [3, 1, 2], "backward": [30, 10, 20]}
    assert watch.log == ["say 0", *["align", "forward", "align", "backward"] * 3, "settle"] and all(flushed)
    # where an iteration takes a second, each is announced when it begins
    slow = watch.work(forward=[1])
    slow.iteration_s, watch.log[:] = 2.0, []
    slow.sample(2)
    assert watch.log == ["say 2", "align", "forward", "settle"] * 2


@pytest.mark.parametrize(
    ("runs", "at_least_ms", "settling_ms", "groups"),
    [
        (2, 400, 0, [2, 2, 4, 6]),  # 420 ms: all that lacks at once in the end
        (2, 2500, 1000, [2, 2, 1]),  # with what settling takes 1060 ms, 2120 ms, then 3150 ms
        (0, 0, 0, []),
    ],
)
def test_a_warm_up_reaches_both_limits_in_groups_that_grow(watch, runs, at_least_ms, settling_ms, groups):
    watch.settling_ms = settling_ms
    assert watch.work(forward=[10], backward=[20]).warm(runs, at_least_ms).iterations == sum(groups)
    lengths = "".join(entry[0] for entry in watch.log if not entry.startswith("say")).split("s")
    assert [group.count("fb") for group in lengths if group] == groups


def test_a_warm_up_tells_the_rate_of_its_longest_group_but_the_first(watch):
    watch.settling_ms = 0
    timer = watch.work(forward=[100, 100, 10, 10, 30])
    assert timer.warm(2, 300) == Warmed(7, pytest.approx(20), None)  # 2, 1, 2, 1, 1


@pytest.mark.parametrize(
    ("cap_ms", "each_ms", "durations", "expected"),
    [
        (1e6, 1.0, {"forward": [5.0], "backward": [50.0] * 7 + [5.0]}, (24, True)),
        (30_000, 1.0, {"forward": [1.05**i for i in range(200)]}, (27, False)),  # 12, 12, and the 3 that still fit
        (3.5, 1.0, {"forward": [5.0]}, (3, None)),  # fewer than can say
        (100, None, {"forward": [80_000.0]}, (1, None)),  # not twelve where nothing is known of their length
    ],
)
def test_a_warm_up_goes_on_until_no_pass_rises_or_falls_or_ends_in_time(watch, cap_ms, each_ms, durations, expected):
    assert watch.work(**durations).settle(cap_ms, each_ms) == expected


def test_a_warm_up_settles_on_the_slowest_rank(watch):
    others = iter([[50.0] * 7 + [5.0] * 5, [5.0] * 12])
    watch.others = lambda mine: [{"forward": next(others)}]
    assert watch.work(forward=[4.0]).settle(1e6, 1.0) == (24, True)


# 15 samples of 1 ms and 15 of 9 ms, then always 5: of 40 samples the fives are ranks 16 to 25 and the interval 14 to 27; of 50 they
# are ranks 16 to 35 and the interval 18 to 33
WILD = [1.0, 9.0] * 15 + [5.0]


@pytest.mark.parametrize(
    ("least", "cap_ms", "durations", "samples", "precise"),
    [
        (10, 1e12, {"forward": [5.0], "backward": WILD}, 50, True),
        (1000, 50_000, {"forward": [1.0, 9.0] * 500, "backward": [1.0]}, 23, False),  # 21 s a batch of ten
    ],
)
def test_adaptive_samples_until_every_pass_is_precise_or_the_time_is_over(
    watch, least, cap_ms, durations, samples, precise
):
    taken, met = watch.work(**durations).adaptive(least, 0.01, cap_ms)
    assert ({len(ms) for ms in taken.values()}, met) == ({samples}, precise)


def test_an_iteration_takes_as_long_as_its_slowest_rank():
    # rank 0: 11 and 7, rank 1: 9 and 11; no rank took 3 + 10
    by_rank = [{"forward": [1, 5], "backward": [10, 2]}, {"forward": [3, 4], "backward": [6, 7]}]
    assert slowest(by_rank) == {"forward": [3, 5], "backward": [10, 7], "total": [11, 11]}


def test_a_baseline_is_sampled_as_often_as_the_run_but_of_long_iterations_less():
    assert [baseline_runs(20, iteration_s) for iteration_s in (0.05, 0.1, 0.5, 4.1, 100)] == [20, 10, 5, 4, 1]


def test_overhead_is_the_least_of_what_empty_regions_measure(watch):
    # the cost of the mark that opens a region is in it, that of the closing one is not
    watch.costs = [0.5, 9, 0.2, 9, 0.3, 9, 0.4, 9, 0.6, 9]
    assert overhead_ms(watch) == pytest.approx(0.2)


def test_no_garbage_is_collected_while_timing_and_it_is_again_after_a_failure(watch):
    def run(which):
        assert not gc.isenabled()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        Timer(timing.Called(("forward",), run), watch).sample(3)
    assert gc.isenabled()


class Attention:
    """A backward belongs to the forward whose out is set."""

    passes, backward, cu_seqlens = ("forward", "backward"), True, (0, 3, 4)

    def __init__(self, *overrides):
        self.me, self.log = alone(), []
        self.experiment = resolved("attention=ring hardware=cpu timing.settle_ms=0", *overrides)
        self.options = {"cu_seqlens": self.cu_seqlens}

    def other_packs(self, n):
        return [SimpleNamespace(cu_seqlens=(0, 1, 4)), SimpleNamespace(cu_seqlens=(0, 2, 4))]

    def run(self, which):
        if which == "forward":
            self.out = len(self.log)
        self.log.append((which, self.out, self.options["cu_seqlens"]))


def test_a_models_layers_follow_each_other_each_model_with_the_next_packed_batch():
    work = Attention()
    model = Layers(work, 2, True)
    for _ in range(2):
        timing.iterate(model)
    assert work.log == [
        (which, at + layer, pack if which == "forward" else work.cu_seqlens)
        for at, pack in ((0, (0, 1, 4)), (4, (0, 2, 4)))
        for which, layer in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    ]


def test_other_orders_are_new_packed_batches_of_the_same_lengths():
    lengths = (3, 1, 2, 2)
    orders = other_orders(lengths, 11, seed=4)
    assert len(set(orders)) == 11 and lengths not in orders
    assert {tuple(sorted(order)) for order in orders} == {(1, 2, 2, 3)} and orders == other_orders(lengths, 11, seed=4)


def test_a_models_samples_are_of_one_layer(watch, monkeypatch):
    monkeypatch.setattr(timing, "Stopwatch", lambda *_, **options: watch)
    # of a pair of marks, which a sample of three layers has one of
    monkeypatch.setattr(timing, "overhead_ms", lambda watch: 6.0)
    work = Attention("timing.layers=3", "timing.timing_runs=2")
    work.out, work.run = None, watch.work(forward=[20.0], backward=[50.0]).work.run
    measured, samples, _ = timing.measure(work, 0.04)
    assert watch.log.count("forward") == 3 * (1 + 2)  # a warm-up and samples
    assert samples == [{"forward": [20.0] * 2, "backward": [50.0] * 2}]
    assert measured.overhead_ms == 2.0


def test_what_a_slow_observer_costs_the_host_is_the_lead_that_it_gets(watch, monkeypatch):
    monkeypatch.setattr(phases, "time", timing.time)
    cost_ms = [0.04]

    @contextmanager
    def observed():
        cost_ms[0] += 2
        yield
        cost_ms[0] -= 2

    def run(which):
        watch.ms += cost_ms[0]

    phases.record(timing.Called(("forward",), run), watch, 1, Recorder(watch.me.device), observed)
    assert watch.lead_ms == pytest.approx(LEAD_MS + 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("thread", [False, True])
def test_a_backward_is_timed_without_waking_autograds_thread_unless_that_is_wanted(in_world, thread):
    size = "attention=ring seq_len=256 heads=4 kv_heads=4 head_dim=64 hardware=cuda world_size=1"
    spec = resolved(size, f"timing.autograd_thread={thread}", gpus=1)
    assert in_world(program.backward_here, 1, "cuda", experiment=spec.plain()) is not thread
