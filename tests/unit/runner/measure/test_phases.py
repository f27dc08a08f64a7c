"""Phases: the recorder that the executors call, and the table that its rows become."""

from contextlib import contextmanager
from statistics import pstdev

import pytest
import torch

from attention.profiling import Recorder, layer, phase, record, recording
from runner.measure.phases import on_one_clock, shares, summary, times_of
from runner.record.fields import Clocks, Phase

CPU = torch.device("cpu")


def rows(*by_rank, which="forward", iteration=0):
    """One iteration's rows; a list gives a phase's steps."""
    return [
        {"iteration": iteration, "rank": rank, "pass": which, "phase": name, "step": step, "ms": value}
        for rank, ms in enumerate(by_rank)
        for name, steps in ms.items()
        for step, value in enumerate(steps if isinstance(steps, list) else [steps])
    ]


def summarized(recorded, world=1, which="forward"):
    """The summary of a pass, which adds up row by row and in its sums."""
    entry = summary(times_of(recorded, world)[which])
    shares = sum(phase.share for name, phase in entry.phases.items() if not name.startswith("comm_"))
    assert shares + entry.other_share == pytest.approx(1)
    assert entry.compute_ms + entry.exposed_communication_ms + entry.other_ms == pytest.approx(entry.total_ms)
    return entry


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("comp_block", 1, 4), ("wait_kv", 4, 6), ("comm_kv", 0, 9), ("comp_merge", 7, 8)], [3, 2, 9, 1]),
        # own keys from 0 to 10; the others' keys waited for until 4, computed on until 8
        ([("comp_block", 0, 10), ("wait_kv", 1, 4), ("comp_block", 4, 8)], [8, 0, 2]),
        # nothing computes from 3 to 4, where the wait goes on alone
        ([("wait_kv", 1, 4), ("comp_block", 0, 3)], [1, 3]),
        # a user's block is timed as a whole and takes nothing from its phases
        ([("comp_block", 1, 4), ("mine", 0, 9), ("wait_kv", 4, 6)], [3, 9, 2]),
    ],
)
def test_of_what_goes_on_at_once_every_moment_counts_once(spans, expected):
    assert shares(spans) == expected


def test_the_table_is_the_slowest_ranks_and_transfers_run_beside():
    one = {"pass": 10.0, "comp_block": [3.0, 2.0], "comp_merge": 0.5, "wait_kv": 2.5, "comm_kv": 4.0}
    two = {"pass": 8.0, "comp_block": [2.0, 1.0], "comp_merge": 1.0, "wait_kv": 1.0, "comm_kv": 6.0}
    found = summarized([row for i in range(3) for row in rows(one, two, iteration=i)], 2)
    expected = {
        "rank": 0, "iterations": 3, "total_ms": 10, "compute_ms": 5.5, "exposed_communication_ms": 2.5, "other_ms": 2,
        "compute_share": 0.55, "communication_share": 0.25, "compute_by_rank_ms": [5.5, 4], "exposed_by_rank_ms": [2.5, 1],
    }  # fmt: skip
    assert {key: getattr(found, key) for key in expected} == expected
    # the steps of an iteration are summed
    every = {"mean_ms": 5, "deviation_ms": 0, "total_ms": 15}
    assert found.phases["comp_block"] == Phase(ms=5, share=0.5, by_rank_ms=[5, 3], **every)


def test_sums_are_of_the_middle_half_of_the_iterations_and_spreads_of_all():
    # passes of 10, 20, .. 80 ms: 30 to 60 count
    passes = [80.0, 10.0, 60.0, 20.0, 30.0, 70.0, 40.0, 50.0]
    found = summarized(
        [row for i, ms in enumerate(passes) for row in rows({"pass": ms, "comp_block": ms / 2}, iteration=i)]
    )
    block = found.phases["comp_block"]
    assert (found.total_ms, block.ms, block.total_ms, block.mean_ms) == (45, 22.5, 180, 22.5)
    assert block.deviation_ms == pytest.approx(pstdev(passes) / 2)


def test_passes_are_summarized_apart_and_a_phase_that_the_slowest_rank_lacks_is_left_out():
    ranks = {"pass": 30.0, "comp_block": 20.0, "wait_dkv": 4.0}, {"pass": 31.0, "comp_block": 25.0}
    found = summarized(rows({"pass": 50.0}, {"pass": 1.0}) + rows(*ranks, which="backward"), 2, "backward")
    assert (found.rank, found.total_ms, [*found.phases]) == (1, 31, ["comp_block"])
    assert found.skew == pytest.approx(5 / 22.5)  # the range over the median


def test_phases_outside_of_a_run_have_a_table():
    with record() as phases:
        for _ in range(2):
            with phase("mine"), phase("comp_block"):
                pass
    assert 0 < sum(phases.ms["comp_block"]) <= sum(phases.ms["mine"]) <= phases.total_ms
    table = [line.split()[:2] for line in str(phases).splitlines()[1:]]
    assert table == [["comp_block", "2"], ["mine", "2"], ["whole", "block"]]


def test_a_layers_backward_is_a_phase_that_others_interrupt():
    x = torch.ones(4, requires_grad=True)

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            with phase("wait_kv"):
                return 2 * grad

    recorder = Recorder(CPU)
    with recording(recorder):
        first = layer("comp_first", lambda x: (3 * Recomputed.apply(x), x + 1), x * 1)
        layer("comp_second", torch.sum, first[0] * first[1]).backward()
    names = [span.name for span in recorder.spans]
    assert names == ["comp_first", "comp_second", "comp_second", "comp_first", "wait_kv", "comp_first"]
    ends = [end for span in recorder.spans for end in span.since(0)]
    assert recorder.layer is None and ends == sorted(ends)  # no two at one time
    assert x.grad.tolist() == [18.0] * 4  # of 6 x (x + 1)


def test_phases_are_recorded_by_the_innermost_recorder_with_ranges_around_them_also_when_they_end_in_an_error():
    ranges = []

    @contextmanager
    def named(name):
        ranges.append(name)
        yield
        ranges.append(f"end of {name}")

    outer, inner = Recorder(CPU, named), Recorder(CPU)
    with recording(outer):
        with phase("comp_a", 3), phase("mine"):
            pass
        with recording(inner), pytest.raises(RuntimeError), phase("comp_b"):
            raise RuntimeError
        with phase("comm_c"):
            pass
    with phase("comp_d"):
        pass
    assert [(span.name, span.step) for span in outer.spans] == [("mine", -1), ("comp_a", 3), ("comm_c", -1)]
    assert ranges[:4] == ["comp_a", "mine", "end of mine", "end of comp_a"]
    (span,) = inner.spans
    start, stop = span.since(0)
    assert span.name == "comp_b" and start < stop


@pytest.mark.parametrize("name", ["", "pass", "a,b"])
def test_a_name_that_the_table_cannot_hold_is_refused(name):
    with recording(Recorder(CPU)), pytest.raises(ValueError, match="is no name of a phase"):
        phase(name)


@pytest.mark.parametrize(
    ("starts", "clocks", "aligned"),
    [
        # once, rank 1 starts late
        ([[100, 110, 120], [5100.25, 5110, 5120]], (0, 1), [0, 10, 20, 0.25, 10, 20]),
        # two hosts of two ranks; rank 1 always starts 1 ms after rank 0
        ([[100, 110], [101, 111], [7000, 7010], [7003, 7013]], "aabb", [0, 10, 1, 11, 0, 10, 3, 13]),
    ],
)
def test_clocks_are_aligned_by_what_ranks_start_together(starts, clocks, aligned):
    recorded = [
        {"iteration": i, "rank": rank, "pass": "forward", "phase": "pass", "start_ms": ms, "stop_ms": ms + 2}
        for rank, own in enumerate(starts)
        for i, ms in enumerate(own)
    ]
    assert on_one_clock(recorded, clocks) == Clocks(count=2, error_ms=0.0)
    assert [(row["start_ms"], row["stop_ms"]) for row in recorded] == [(ms, ms + 2) for ms in aligned]
