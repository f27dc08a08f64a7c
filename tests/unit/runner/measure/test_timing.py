"""Timing methods on a simulated clock, so that every duration is known; and one real measurement of a sleep."""

import gc
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from attention.profiling import Recorder, phase, recording
from runner.measure import timed, timing
from runner.measure.attention_work import Layers, other_orders
from runner.measure.length import baseline_runs
from runner.measure.statistics import slowest
from runner.measure.stopwatch import CpuStopwatch, CudaStopwatch
from runner.measure.timing import LEAD_MS, Timer, Warmed, leads_ms, overhead_ms, record, simple
from tests.jobs import program
from tests.support.composing import resolved


class Clock:
    """Simulated time in ms, and what happened in it."""

    def __init__(self):
        self.ms = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.ms / 1e3


class Work:
    """Each run of a pass takes the next of its durations, the last one from then on."""

    def __init__(self, clock: Clock, **durations: list[float]):
        self.clock = clock
        self.passes = tuple(durations)
        self.left = {which: list(ms) for which, ms in durations.items()}

    def run(self, which: str) -> None:
        self.clock.log.append(which)
        left = self.left[which]
        self.clock.ms += left.pop(0) if len(left) > 1 else left[0]

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            self.run(which)


class Watch:
    """Aligning and settling take long: neither may show in a sample. A mark costs what is in `costs`."""

    def __init__(self, clock: Clock, costs: tuple[float, ...] = (), settling_ms: float = 1000):
        self.clock, self.costs, self.settling_ms = clock, list(costs), settling_ms
        self.settled = True

    def align(self) -> None:
        self.clock.log.append("align")
        self.clock.ms += 1000

    def mark(self) -> float:
        self.settled = False
        now = self.clock.ms
        self.clock.ms += self.costs.pop(0) if self.costs else 0
        return now

    def elapsed(self, start: float, stop: float) -> float:
        assert self.settled, "read before it happened"
        return stop - start

    def settle(self) -> None:
        self.clock.log.append("settle")
        self.clock.ms += self.settling_ms
        self.settled = True


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Also the host's clock, for the methods that look at it."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_simple_is_the_mean_of_the_runs_after_one_untimed_call(clock):
    work = Work(clock, forward=[500, 1, 2, 6], backward=[700, 10, 20, 60])
    assert simple(work, Watch(clock), 3) == {"forward": [3], "backward": [30]}
    assert [entry for entry in clock.log if entry != "settle"] == [
        "forward", "backward", "align", "forward", "forward", "forward", "align", "backward", "backward", "backward",
    ]  # fmt: skip


def test_sample_keeps_every_duration_in_order(clock):
    work = Work(clock, forward=[3, 1, 2], backward=[30, 10, 20])
    assert Timer(work, Watch(clock)).sample(3) == {"forward": [3, 1, 2], "backward": [30, 10, 20]}


def test_sample_aligns_before_every_pass_and_settles_once_at_the_end(clock):
    Timer(Work(clock, forward=[1], backward=[2]), Watch(clock)).sample(3)
    assert clock.log == ["align", "forward", "align", "backward"] * 3 + ["settle"]


def test_sample_flushes_before_every_pass_outside_its_marks(clock):
    cache = torch.ones(4)
    seen = []

    class Dirties(Work):
        def run(self, which: str) -> None:
            seen.append(float(cache.sum()))
            cache.fill_(1)
            super().run(which)

    Timer(Dirties(clock, forward=[1], backward=[2]), Watch(clock), cache).sample(2)
    assert seen == [0, 0, 0, 0]


def test_sample_announces_its_iterations_and_after_each_that_it_lives_outside_the_marks(clock):
    def announce(runs: int) -> None:
        clock.log.append(f"announce {runs}")
        clock.ms += 1000

    assert Timer(Work(clock, forward=[1, 2]), Watch(clock), announce=announce).sample(2) == {"forward": [1, 2]}
    assert clock.log == ["announce 2", *["align", "forward", "announce 0"] * 2, "settle"]


def warmed(clock: Clock, runs: int, at_least_ms: float, agree=lambda more: more, settling_ms: float = 0) -> list[int]:
    """The lengths of warm-up's stretches, of iterations of 30 ms in two passes, each stretch settled in `settling_ms`."""
    work = Work(clock, forward=[10], backward=[20])
    done = Timer(work, Watch(clock, settling_ms=settling_ms), agree=agree).warm(runs, at_least_ms).iterations
    stretches = "".join("s" if entry == "settle" else entry[0] for entry in clock.log).split("s")
    assert stretches.pop() == "" and all(set(stretch) <= {"f", "b"} for stretch in stretches)
    lengths = [stretch.count("fb") for stretch in stretches]
    assert sum(lengths) == done
    return lengths


def test_warm_runs_at_least_so_often(clock):
    assert warmed(clock, runs=4, at_least_ms=0) == [4]


def test_warm_lasts_at_least_so_long_in_stretches_that_grow(clock):
    assert warmed(clock, runs=2, at_least_ms=400) == [2, 2, 4, 6]  # 420 ms: all that lacks at once in the end
    assert clock.ms == 420


def test_warm_without_a_number_lasts_so_long(clock):
    assert warmed(clock, runs=0, at_least_ms=100) == [1, 1, 2]


def test_warm_counts_the_settling(clock):
    assert warmed(clock, runs=2, at_least_ms=2500, settling_ms=1000) == [2, 2, 1]  # 1060 ms, 2120 ms, then 3150 ms


def test_warm_needs_both_limits(clock):
    assert warmed(clock, runs=5, at_least_ms=1) == [5]


def test_warm_without_limits_does_nothing(clock):
    assert Timer(Work(clock, forward=[10]), Watch(clock)).warm(0, 0) == Warmed(0, None, None)
    assert clock.log == []


def test_warm_tells_the_rate_of_its_longest_stretch_but_the_first(clock):
    slow_at_first = Work(clock, forward=[100, 100, 10, 10, 30])
    watch = Watch(clock, settling_ms=0)
    assert Timer(slow_at_first, watch).warm(2, 300) == Warmed(7, pytest.approx(20), None)  # of 2, 1, 2, 1 and 1
    assert Timer(Work(clock, forward=[10]), watch).warm(3, 0) == Warmed(3, None, None)


def test_warm_obeys_rank_zero_and_not_its_own_clock(clock):
    opinions = []

    def rank_zero(mine: int) -> int:
        opinions.append(mine)
        return 1 if len(opinions) < 3 else 0

    assert warmed(clock, runs=2, at_least_ms=0, agree=rank_zero) == [2, 1, 1]
    assert opinions == [0, 0, 0, 0]  # the last on settling


def settled(
    clock: Clock, cap_ms: float, others=lambda mine: [], agree=lambda more: more, each_ms=1.0, **durations: list[float]
):
    """What settling says, a window of 12 iterations at a time; aligning takes 1000 ms a pass and a stretch's end as long."""
    watch = Watch(clock)
    timer = Timer(Work(clock, **durations), watch, gather=lambda mine: [mine, *others(mine)], agree=agree)
    return timer.settle(cap_ms, each_ms)


@pytest.mark.slow
def test_a_warm_up_goes_on_until_no_pass_rises_or_falls(clock):
    slow_at_first = [50.0] * 7 + [5.0]
    assert settled(clock, 1e6, forward=[5.0], backward=[9.0]) == (12, True)
    assert settled(clock, 1e6, forward=slow_at_first) == (24, True)
    assert settled(clock, 1e6, forward=[5.0], backward=slow_at_first) == (24, True)
    falling = [5.4 - 0.045 * i for i in range(20)]
    assert settled(clock, 1e6, forward=[*falling, 4.5]) == (36, True)


@pytest.mark.slow
def test_a_warm_up_that_does_not_settle_ends_in_time_and_says_so(clock):
    rising = [1.05**i for i in range(200)]
    found = settled(clock, 30_000, forward=rising)
    assert found == (27, False)  # 12, 12, and the 3 that still fit
    assert settled(clock, 9_000, forward=[5.0]) == (12, True)  # as many as were thought to fit
    assert settled(clock, 3.5, forward=[5.0]) == (3, None)  # fewer than can say
    assert settled(clock, 0, forward=[5.0]) == (0, None)


def test_a_warm_up_that_knows_nothing_of_its_length_tries_one_iteration_first(clock):
    assert settled(clock, 100, each_ms=None, forward=[80_000.0]) == (1, None)  # not twelve of them
    assert settled(clock, 1e6, each_ms=None, forward=[5.0]) == (13, True)
    assert settled(clock, 0, each_ms=None, forward=[5.0]) == (0, None)


def test_a_warm_up_settles_on_the_slowest_rank_and_by_rank_zeros_clock(clock):
    others = iter([[50.0] * 7 + [5.0] * 5, [5.0] * 12])
    found = settled(clock, 1e6, lambda mine: [{"forward": next(others)}], forward=[4.0])
    assert found == (24, True)
    assert settled(clock, 0, agree=lambda more: 12, forward=[4.0]) == (12, True)


def adapt(clock: Clock, least: int, cap_s: float, **durations: list[float]):
    return Timer(Work(clock, **durations), Watch(clock)).adaptive(least, 0.01, cap_s)


@pytest.mark.slow
def test_adaptive_stops_at_the_least_number_when_settled(clock):
    samples, met = adapt(clock, 30, 1e9, forward=[5.0])
    assert samples == {"forward": [5.0] * 30}
    assert met


@pytest.mark.slow
def test_adaptive_goes_on_until_settled_and_keeps_what_was_unsettled(clock):
    # 15 samples of 1 ms and 15 of 9 ms, then always 5: of 40 samples the fives are ranks 16 to 25 and the interval 14 to
    # 27; of 50 they are ranks 16 to 35 and the interval 18 to 33
    wild = [1.0, 9.0] * 15
    samples, met = adapt(clock, 10, 1e9, forward=[*wild, 5.0])
    assert met
    assert samples["forward"][:30] == wild
    assert samples["forward"][30:] == [5.0] * 20


@pytest.mark.slow
def test_adaptive_needs_every_pass_settled(clock):
    wild = [1.0, 9.0] * 15
    samples, met = adapt(clock, 10, 1e9, forward=[5.0], backward=[*wild, 5.0])
    assert met
    assert [len(ms) for ms in samples.values()] == [50, 50]


def test_adaptive_stops_at_the_time_cap_and_says_so(clock):
    # 20 runs aligned for 1000 ms each and a settling: 21 s a batch, over 50 s after the third
    samples, met = adapt(clock, 1000, 50, forward=[1.0, 9.0] * 500, backward=[1.0])
    assert [len(ms) for ms in samples.values()] == [30, 30]
    assert not met


def test_adaptive_says_that_precision_was_met_also_when_the_last_batch_passed_the_cap(clock):
    samples, met = adapt(clock, 10, 5, forward=[5.0])
    assert samples == {"forward": [5.0] * 10}
    assert met


def test_adaptive_leaves_the_time_to_rank_zero(clock):
    looked = []

    def rank_zero(over: bool) -> bool:
        looked.append((over, clock.ms))
        return len(looked) == 2

    wild = Work(clock, forward=[1.0, 9.0] * 10)
    samples, met = Timer(wild, Watch(clock), agree=rank_zero).adaptive(10, 0.01, 15)
    assert len(samples["forward"]) == 20 and not met
    # ten aligned runs and a settling: 10 * 1005 + 1000 ms
    assert looked == [(False, 11_050), (True, 22_100)]


def test_an_iteration_takes_as_long_as_its_slowest_rank():
    by_rank = [{"forward": [1, 5], "backward": [10, 2]}, {"forward": [3, 4], "backward": [6, 7]}]
    found = slowest(by_rank)
    assert found["forward"] == [3, 5]
    assert found["backward"] == [10, 7]
    # rank 0: 11 and 7, rank 1: 9 and 11; no rank took 3 + 10
    assert found["total"] == [11, 11]


@pytest.mark.parametrize(
    ("iteration_s", "samples"), [(0.002, 20), (0.05, 20), (0.1, 10), (0.5, 5), (3.9, 5), (4.1, 4), (15, 1), (100, 1)]
)
def test_a_baseline_is_sampled_as_often_as_the_run_but_of_long_iterations_less(iteration_s, samples):
    assert baseline_runs(20, iteration_s) == samples
    assert baseline_runs(3, iteration_s) == min(3, samples)


def test_a_single_pass_has_no_total():
    assert slowest([{"forward": [1, 5]}, {"forward": [3, 4]}]) == {"forward": [3, 5]}


def test_ranks_with_different_numbers_of_samples_are_an_error():
    with pytest.raises(ValueError):
        slowest([{"forward": [1, 5]}, {"forward": [3]}])


def test_overhead_is_the_least_of_what_empty_regions_measure(clock):
    # the cost of the mark that opens a region is in it, that of the closing one is not
    assert overhead_ms(Watch(clock, costs=(0.5, 9, 0.2, 9, 0.3, 9, 0.4, 9, 0.6, 9))) == pytest.approx(0.2)


@pytest.fixture
def collecting():
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("method", [lambda work, watch, runs: Timer(work, watch).sample(runs), simple])
def test_no_garbage_is_collected_while_timing(clock, collecting, before, method):
    states = []

    class Looks(Work):
        def run(self, which: str) -> None:
            super().run(which)
            states.append(gc.isenabled())

    (gc.enable if before else gc.disable)()
    method(Looks(clock, forward=[1]), Watch(clock), 2)
    assert states[-2:] == [False, False]
    assert gc.isenabled() == before


def test_collection_comes_back_after_a_failure(clock, collecting):
    class Fails(Work):
        def run(self, which: str) -> None:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        Timer(Fails(clock, forward=[1]), Watch(clock)).sample(1)
    assert gc.isenabled()


def test_a_real_stopwatch_measures_a_sleep():
    class Sleeps:
        passes = ("forward", "backward")

        def run(self, which: str) -> None:
            time.sleep(0.002 if which == "forward" else 0.006)

        def repeat(self, which: str, times: int) -> None:
            for _ in range(times):
                self.run(which)

    watch = CpuStopwatch(None)
    found = Timer(Sleeps(), watch).sample(9)
    assert [len(ms) for ms in found.values()] == [9, 9]
    assert 2 <= min(found["forward"]) < 5
    assert 6 <= min(found["backward"]) < 12
    assert 0 <= overhead_ms(watch) < 1
    start = time.perf_counter()
    (mean,) = simple(Sleeps(), watch, 5)["forward"]
    assert 2 <= mean <= (time.perf_counter() - start) * 1e3 / 5


def test_recorded_passes_have_their_own_phases_and_the_order_of_the_samples():
    class Sleeps:
        passes = ("forward", "backward")

        def run(self, which: str) -> None:
            with phase(f"comp_{which}"):
                time.sleep(0.002)
            if which == "backward":
                with phase("wait_dkv", 1):
                    time.sleep(0.004)

        def repeat(self, which: str, times: int) -> None:
            raise AssertionError("not asked for")

    watch, recorder = CpuStopwatch(None), Recorder(torch.device("cpu"))
    assert leads_ms(Sleeps(), watch, nullcontext) == {}  # a CPU computes itself
    found, _ = record(Sleeps(), watch, 3, recorder, lambda: recording(recorder))
    assert [each.which for each in found] == ["forward", "backward"] * 3
    assert recorder.spans == []
    for each in found:
        names = [span.name for span in each.spans]
        assert names == (["comp_forward"] if each.which == "forward" else ["comp_backward", "wait_dkv"])
        total = watch.elapsed(each.start, each.stop)
        lengths = [stop - start for start, stop in (span.since(each.start) for span in each.spans)]
        assert (2 if each.which == "forward" else 6) <= sum(lengths) <= total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_a_slow_observer_costs_the_host_is_the_lead_that_it_gets():
    class Launches:
        passes = ("forward",)
        late = 0.0

        def run(self, which: str) -> None:
            until = time.perf_counter() + 100e-6 + self.late
            while time.perf_counter() < until:
                pass

    work = Launches()

    @contextmanager
    def observed():
        work.late = 2e-3
        yield
        work.late = 0.0

    device = torch.device("cuda", torch.cuda.current_device())
    leads = leads_ms(work, CudaStopwatch(device, together=False), observed)
    assert leads["forward"] - LEAD_MS == pytest.approx(2, abs=0.5)


class Attention:
    """A pass takes 20 ms; a backward belongs to the forward whose out is set."""

    passes = ("forward", "backward")
    backward = True
    cu_seqlens = (0, 3, 4)

    def __init__(self):
        self.options = {"cu_seqlens": self.cu_seqlens}
        self.log: list[tuple] = []
        self.out = None

    def layered(self, layers: int, new_packs: bool) -> Layers:
        return Layers(self, layers)

    def run(self, which: str) -> None:
        if which == "forward":
            self.out = len(self.log)
        self.log.append((which, self.out, self.options["cu_seqlens"]))
        time.sleep(0.02)


def test_a_models_layers_follow_each_other_each_model_with_the_next_packed_batch():
    work = Attention()
    model = Layers(work, 2, [(0, 1, 4), (0, 2, 4)])
    for _ in range(2):
        for which in model.passes:
            model.run(which)
    assert [which for which, *_ in work.log] == ["forward", "forward", "backward", "backward"] * 2
    assert [out for _, out, _ in work.log] == [0, 1, 1, 0, 4, 5, 5, 4]
    assert [cu_seqlens for which, _, cu_seqlens in work.log if which == "forward"] == [(0, 1, 4)] * 2 + [(0, 2, 4)] * 2
    assert work.options == {"cu_seqlens": work.cu_seqlens}
    model.run("forward")
    assert work.log[-1][2] == (0, 1, 4)
    plain = Attention()
    Layers(plain, 1).run("forward")
    assert plain.log == [("forward", 0, plain.cu_seqlens)]


def test_other_orders_are_new_packed_batches_of_the_same_lengths():
    lengths = (3, 1, 2, 2)
    found = other_orders(lengths, 11, seed=4)
    assert len(set(found)) == 11 and (0, 3, 4, 6, 8) not in found
    assert {tuple(sorted(b - a for a, b in pairwise(batch))) for batch in found} == {(1, 2, 2, 3)}
    assert found == other_orders(lengths, 11, seed=4) != other_orders(lengths, 11, seed=5)


def test_a_models_samples_are_of_one_layer(monkeypatch):
    spec = resolved("attention=ring", "timing.layers=3", "timing.timing_runs=2", "timing.settle_ms=0", "hardware=cpu")
    alone = SimpleNamespace(
        device=torch.device("cpu"), world=1, say=lambda *_: None, agree=lambda x: x, gather=lambda x: [x]
    )
    work = Attention()
    found, _ = timed.measure(alone, spec, work, CpuStopwatch(None), 0.04)
    assert len(work.log) == 2 * 3 * (1 + 2)  # passes, layers, a warm-up and samples
    for which in work.passes:
        seconds = [ms / 1e3 for ms in found["samples"][0][which]]
        assert 0.02 <= min(seconds) < 0.055
    assert found["timing"]["layers"] == 3 and found["timing"]["new_packs"] is False
    monkeypatch.setattr(
        timing, "overhead_ms", lambda watch: 6.0
    )  # of a pair of marks, which a sample of three layers has one of
    found, _ = timed.measure(alone, spec, work, CpuStopwatch(None), 0.04)
    least = min(passed["median"] for passed in found["timing"]["passes"].values())
    assert found["timing"]["overhead_ms"] == 2.0 and found["timing"]["overhead_share"] == pytest.approx(2.0 / least)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("thread", [False, True])
def test_a_backward_is_timed_without_waking_autograds_thread_unless_that_is_wanted(in_world, thread):
    size = ["seq_len=256", "heads=4", "kv_heads=4", "head_dim=64", "hardware=cuda", "world_size=1"]
    spec = resolved("attention=ring", *size, *([f"timing.autograd_thread={thread}"] if thread else []), gpus=1)
    assert in_world(program.backward_here, 1, "cuda", experiment=spec.plain()) is not thread


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_stopwatch_that_lets_the_host_get_ahead_leaves_its_lateness_out():
    class Late:
        passes = ("forward",)

        def run(self, which: str) -> None:
            until = time.perf_counter() + 40e-6  # the host's, before it launches anything
            while time.perf_counter() < until:
                pass

    device = torch.device("cuda", torch.cuda.current_device())

    def best(ahead: bool) -> float:
        return min(
            Timer(Late(), CudaStopwatch(device, together=False, lead_ms=LEAD_MS if ahead else 0)).sample(30)["forward"]
        )

    best(True)
    assert best(True) < 0.02
    assert best(False) > 0.03
