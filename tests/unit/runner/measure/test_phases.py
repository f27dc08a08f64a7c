"""Phases: the recorder that the executors call, and the table that its rows become."""

import time
from contextlib import contextmanager
from statistics import pstdev

import pytest
import torch

from attention.profiling import Recorder, layer, phase, record, recording
from runner.launch.files import WorldSpec
from runner.measure.phases import bandwidths, by_iteration, on_one_clock, shares, summary
from runner.output import display
from runner.output.fields import PassPhases
from runner.output.parsing import parsed
from tests.jobs import own_block
from tests.support.composing import resolved

CPU = torch.device("cpu")


def rows(rank: int, which: str, iteration: int, **ms: float | list[float]) -> list[dict]:
    """One iteration's rows on one rank; a list gives a phase's steps."""
    return [
        {"iteration": iteration, "rank": rank, "pass": which, "phase": name, "step": step, "ms": value}
        for name, steps in ms.items()
        for step, value in enumerate(steps if isinstance(steps, list) else [steps])
    ]


def summarize(found: list[dict], world: int) -> dict:
    return {which: summary(iterations) for which, iterations in by_iteration(found, world).items()}


def adds_up(entry: dict) -> bool:
    """Row by row, and the sums."""
    on_stream = [phase for name, phase in entry["phases"].items() if not name.startswith("comm_")]
    return (
        sum(phase["ms"] for phase in on_stream) + entry["other_ms"] == pytest.approx(entry["total_ms"])
        and sum(phase["share"] for phase in on_stream) + entry["other_share"] == pytest.approx(1)
        and entry["compute_ms"] + entry["exposed_communication_ms"] + entry["other_ms"]
        == pytest.approx(entry["total_ms"])
    )


STEADY = [
    row
    for i in range(3)
    for row in (
        *rows(0, "forward", i, **{"pass": 10.0}, comp_block=[3.0, 2.0], comp_merge=0.5, wait_kv=2.5, comm_kv=4.0),
        *rows(1, "forward", i, **{"pass": 8.0}, comp_block=[2.0, 1.0], comp_merge=1.0, wait_kv=1.0, comm_kv=6.0),
    )
]


def test_what_lies_one_after_another_takes_what_it_took():
    assert shares([("comp_block", 1, 4), ("wait_kv", 4, 6), ("comm_kv", 0, 9), ("comp_merge", 7, 8)]) == [3, 2, 9, 1]
    assert shares([]) == []


def test_of_what_goes_on_at_once_every_moment_counts_once():
    # own keys from 0 to 10; the others' keys waited for until 4, computed on until 8
    found = shares([("comp_block", 0, 10), ("wait_kv", 1, 4), ("comp_block", 4, 8)])
    assert found == [8, 0, 2]
    # nothing computes from 3 to 4, where the wait goes on alone
    assert shares([("wait_kv", 1, 4), ("comp_block", 0, 3)]) == [1, 3]
    assert shares([("wait_room_dkv", 0, 2), ("wait_kv", 0, 4)]) == [1, 3]
    assert shares([("comp_block", 2, 2), ("comp_merge", 2, 3)]) == [0, 1]


def test_the_slowest_ranks_phases_and_their_shares():
    found = summarize(STEADY, 2)["forward"]
    assert (found["rank"], found["total_ms"]) == (0, 10)
    phases = found["phases"]
    assert set(phases) == {"comp_block", "comp_merge", "wait_kv", "comm_kv"}
    # the steps of an iteration are summed
    every = {"mean_ms": 5, "deviation_ms": 0, "total_ms": 15}
    assert phases["comp_block"] == {"ms": 5, "share": 0.5, "median_ms": 5, "by_rank_ms": [5, 3], **every}
    every = {"mean_ms": 2.5, "deviation_ms": 0, "total_ms": 7.5}
    assert phases["wait_kv"] == {"ms": 2.5, "share": 0.25, "median_ms": 2.5, "by_rank_ms": [2.5, 1], **every}


def test_compute_exposed_communication_and_the_rest_are_the_whole_and_transfers_run_beside():
    found = summarize(STEADY, 2)["forward"]
    assert (found["compute_ms"], found["exposed_communication_ms"], found["other_ms"]) == (5.5, 2.5, 2)
    assert adds_up(found)
    assert (found["compute_share"], found["communication_share"]) == (0.55, 0.25)
    assert found["transfer_ms"] == 4
    assert found["compute_by_rank_ms"] == [5.5, 4]
    assert found["exposed_by_rank_ms"] == [2.5, 1]


def test_phases_are_medians_over_the_iterations():
    found = summarize(
        [
            *rows(0, "forward", 0, **{"pass": 10.0}, comp_block=[1.0, 1.0]),
            *rows(0, "forward", 1, **{"pass": 12.0}, comp_block=[90.0, 1.0]),
            *rows(0, "forward", 2, **{"pass": 50.0}, comp_block=[2.0, 3.0]),
        ],
        1,
    )["forward"]
    assert (found["total_ms"], found["iterations"]) == (12, 3)
    block = found["phases"]["comp_block"]  # 2, 91 and 5
    assert (block["median_ms"], block["total_ms"]) == (5, 98)
    assert block["ms"] == 91  # of the pass of 12
    assert (block["mean_ms"], block["deviation_ms"]) == pytest.approx((98 / 3, 41.27), abs=0.01)


def test_sums_are_of_the_middle_half_of_the_iterations():
    # passes of 10, 20, .. 80 ms: 30 to 60 count
    passes = [80.0, 10.0, 60.0, 20.0, 30.0, 70.0, 40.0, 50.0]
    found = summarize(
        [
            row
            for i, ms in enumerate(passes)
            for row in rows(0, "forward", i, **{"pass": ms}, comp_block=ms / 2, wait_kv=ms / 5)
        ],
        1,
    )["forward"]
    assert (found["total_ms"], found["compute_ms"]) == (45, 22.5)
    assert found["exposed_communication_ms"] == pytest.approx(9)
    assert adds_up(found)


def test_the_table_adds_up_when_the_iterations_differ():
    # compute and waiting trade places from one iteration to the next, within every pass
    found = summarize(
        [
            *rows(0, "forward", 0, **{"pass": 8.0}, comp_block=1.0, wait_kv=6.0),
            *rows(0, "forward", 1, **{"pass": 8.0}, comp_block=6.0, wait_kv=1.0),
            *rows(0, "forward", 2, **{"pass": 13.0}, comp_block=6.0, wait_kv=6.0),
        ],
        1,
    )["forward"]
    assert adds_up(found)
    assert found["compute_share"] + found["communication_share"] <= 1


def test_passes_are_summarized_apart():
    backward = rows(0, "backward", 0, **{"pass": 30.0}, comp_block=20.0, wait_dkv=4.0)
    found = summarize(STEADY + backward + rows(1, "backward", 0, **{"pass": 31.0}, comp_block=25.0), 2)
    assert list(found) == ["forward", "backward"]
    assert (found["backward"]["rank"], found["backward"]["total_ms"]) == (1, 31)
    assert found["backward"]["phases"].keys() == {"comp_block"}  # of the slowest rank, which never waits
    assert adds_up(found["backward"])


def of_compute(*by_rank: float) -> dict:
    return summarize(
        [row for rank, ms in enumerate(by_rank) for row in rows(rank, "forward", 0, **{"pass": 20.0}, comp_block=ms)],
        len(by_rank),
    )["forward"]


def test_skew_is_the_range_of_compute_over_its_median():
    assert of_compute(8.0, 10.0, 12.0)["skew"] == pytest.approx(0.4)
    assert of_compute(10.0, 10.0)["skew"] == 0
    assert of_compute(9.0, 11.0)["skew"] == pytest.approx(0.2)


def test_stragglers_compute_more_than_ten_percent_over_the_median():
    assert of_compute(10.0, 10.0, 11.0)["stragglers"] == []
    assert of_compute(10.0, 11.5, 10.0, 9.0, 14.0)["stragglers"] == [1, 4]  # of a median of 10
    assert of_compute(0.0, 0.0)["stragglers"] == []


def test_nothing_is_recorded_without_a_recorder():
    recorder = Recorder(CPU)
    with phase("comp_block", 0):
        pass
    with recording(recorder):
        pass
    with phase("comp_block", 1):
        pass
    assert recorder.spans == []


def test_phases_outside_of_a_run_have_a_table():
    with record() as phases:
        for ms in (2, 6):
            with phase("mine"), phase("comp_block"):
                time.sleep(ms / 1e3)
    assert [*map(len, phases.ms.values())] == [2, 2]
    assert 8 <= sum(phases.ms["comp_block"]) <= sum(phases.ms["mine"]) <= phases.total_ms
    titles, *lines = str(phases).splitlines()
    assert titles.split() == ["phase", "count", "mean", "ms", "deviation", "total", "ms", "share"]
    assert [line.split()[0] for line in lines] == ["comp_block", "mine", "whole"]
    _, count, mean, deviation, total, share = lines[1].split()
    assert (count, float(total)) == ("2", pytest.approx(2 * float(mean), abs=2e-3))
    assert float(deviation) == pytest.approx(pstdev(phases.ms["mine"]), abs=1e-3)
    assert 0 < float(share.rstrip("%")) <= 100
    assert lines[-1].endswith("100.0%")


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

    def two(x, factor):
        return Recomputed.apply(x) * factor, x + 1

    recorder = Recorder(CPU)
    with recording(recorder):
        first = layer("comp_first", two, x * 1, 3.0)
        out = layer("comp_second", torch.sum, first[0] * first[1])
        out.backward()
    assert [span.name for span in recorder.spans] == [
        *("comp_first", "comp_second"), "comp_second", "comp_first", "wait_kv", "comp_first",
    ]  # fmt: skip
    assert recorder.layer is None
    ends = [end for span in recorder.spans for end in span.since(0)]
    assert ends == sorted(ends)  # no two at one time
    assert x.grad.tolist() == [18.0] * 4  # of 6 x (x + 1)
    assert layer("comp_first", two, x, 3.0)[0]._backward_hooks is None


def test_spans_come_in_the_order_in_which_they_ended():
    recorder = Recorder(CPU)
    with recording(recorder):
        with phase("comp_block", 3):
            pass
        with phase("comm_kv"):
            pass
    assert [(span.name, span.step) for span in recorder.spans] == [("comp_block", 3), ("comm_kv", -1)]


def test_a_nested_recording_gives_back_to_the_outer_one():
    outer, inner = Recorder(CPU), Recorder(CPU)
    with recording(outer):
        with phase("comp_a"):
            pass
        with recording(inner), phase("comp_b"):
            pass
        with pytest.raises(RuntimeError), recording(inner):
            raise RuntimeError
        with phase("comp_c"):
            pass
    with phase("comp_d"):
        pass
    assert [span.name for span in outer.spans] == ["comp_a", "comp_c"]
    assert [span.name for span in inner.spans] == ["comp_b"]


def test_a_span_measures_a_sleep_also_when_it_ends_in_an_error():
    recorder = Recorder(CPU)
    started = time.perf_counter()
    with recording(recorder):
        with phase("comp_block"):
            time.sleep(0.005)
        with pytest.raises(RuntimeError), phase("wait_kv"):
            time.sleep(0.01)
            raise RuntimeError
    both = (time.perf_counter() - started) * 1e3
    block, wait = (stop - start for start, stop in (span.since(0) for span in recorder.spans))
    assert block >= 5
    assert wait >= 10
    assert block + wait <= both


def test_a_block_of_a_users_is_timed_as_a_whole_and_takes_nothing_from_its_phases():
    assert shares([("comp_block", 1, 4), ("mine", 0, 9), ("wait_kv", 4, 6)]) == [3, 9, 2]


@pytest.mark.parametrize("name", ["", "pass", "a,b", "a\nb"])
def test_a_name_that_the_table_cannot_hold_is_refused(name):
    with recording(Recorder(CPU)), pytest.raises(ValueError, match="is no name of a phase"):
        phase(name)


LATE_S = 0.1  # rank 1's kernel calls


@pytest.fixture(scope="module")
def late_rank(pool):
    """A run with a block `mine` around the kernel, which is late on rank 1."""
    sizes = ["attention=ulysses", "kernel=math", "hardware=cpu", "dtype=fp32", "seq_len=256", "heads=2", "head_dim=64"]
    spec = resolved(*sizes, "world_size=2", "baseline=none", "timing.timing_runs=1", "timing.warmup_ms=0")
    arguments = {"experiment": spec.plain(), "name": "mine", "late_s": LATE_S}
    outcome = pool.get(WorldSpec(2, "cpu")).call(own_block.run, arguments)
    assert outcome.status == "ok", outcome.reason
    return outcome.result


def test_a_block_of_a_users_is_in_the_tables_of_a_run_on_each_rank(late_rank, capsys):
    mine = [row for row in late_rank["phase_rows"] if row["phase"] == "mine"]
    assert {(row["rank"], row["pass"]) for row in mine} == {(0, "forward"), (1, "forward")}
    found = late_rank["phases"]["forward"]
    assert 0 < found["phases"]["mine"]["ms"] <= found["phases"]["comp_block"]["ms"]
    display._phases("forward", parsed(PassPhases, found), True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("mine")]
    assert "overlaps" in line


def test_a_rank_is_seen_waiting_for_a_late_one_on_the_shared_clock(late_rank):
    forward = [row for row in late_rank["phase_rows"] if row["pass"] == "forward" and row["iteration"] == 0]
    (late,) = [row for row in forward if row["rank"] == 1 and row["phase"] == "mine"]
    assert late["stop_ms"] - late["start_ms"] >= LATE_S * 1e3
    waits = [row for row in forward if row["rank"] == 0 and row["phase"] == "wait_out"]
    # the outputs of rank 1 come when its kernel is done; causality holds across the two processes
    assert waits[-1]["stop_ms"] >= late["stop_ms"] and waits[0]["start_ms"] < late["stop_ms"]
    together = sum(
        max(0.0, min(row["stop_ms"], late["stop_ms"]) - max(row["start_ms"], late["start_ms"])) for row in waits
    )
    assert together > LATE_S * 1e3 / 2
    assert late_rank["comm"]["clocks"] == {"count": 1, "error_ms": 0.0}


def test_phases_lie_within_their_pass_and_passes_follow_each_other(late_rank):
    ends = dict.fromkeys((0, 1), 0.0)
    for row in late_rank["phase_rows"]:
        if row["phase"] == "pass":
            whole = row
            assert row["start_ms"] >= ends[row["rank"]]
            assert row["stop_ms"] - row["start_ms"] == pytest.approx(row["ms"], abs=1e-5)
            ends[row["rank"]] = row["stop_ms"]
        else:
            assert (row["rank"], row["pass"]) == (whole["rank"], whole["pass"])
            assert whole["start_ms"] <= row["start_ms"] <= row["stop_ms"] <= whole["stop_ms"]
    assert min(row["start_ms"] for row in late_rank["phase_rows"]) == 0


def on_clocks(starts: list[list[float]]) -> list[dict]:
    """Passes of 2 ms; starts: by rank, on its clock."""
    return [
        {"iteration": i, "rank": rank, "pass": "forward", "phase": "pass", "start_ms": ms, "stop_ms": ms + 2}
        for rank, each in enumerate(starts)
        for i, ms in enumerate(each)
    ]


def test_clocks_are_aligned_by_what_ranks_start_together():
    found = on_clocks([[100, 110, 120, 130], [5100.25, 5110, 5120, 5130]])  # once, rank 1 starts late
    assert on_one_clock(found, [0, 1]) == {"count": 2, "error_ms": 0.0}
    assert [row["start_ms"] for row in found] == [0, 10, 20, 30, 0.25, 10, 20, 30]
    assert [row["stop_ms"] - row["start_ms"] for row in found] == [2] * 8
    found = on_clocks([[100, 110, 120], [5100.5, 5110, 5119.5]])
    assert on_one_clock(found, [0, 1]) == {"count": 2, "error_ms": 0.5}
    assert [row["start_ms"] for row in found] == [0, 10, 20, 0.5, 10, 19.5]


def test_ranks_of_one_clock_keep_what_lies_between_them():
    # two hosts of two ranks; rank 1 always starts 1 ms after rank 0
    found = on_clocks([[100, 110], [101, 111], [7000, 7010], [7003, 7013]])
    assert on_one_clock(found, ["a", "a", "b", "b"])["count"] == 2
    assert [row["start_ms"] for row in found] == [0, 10, 1, 11, 0, 10, 3, 13]


def test_annotated_phases_are_ranges_around_their_spans():
    begun = []

    @contextmanager
    def named(name):
        begun.append(name)
        yield
        begun.append(f"end of {name}")

    recorder = Recorder(CPU, named)
    with recording(recorder), phase("comp_block"), phase("mine"):
        pass
    assert begun == ["comp_block", "mine", "end of mine", "end of comp_block"]


def test_bandwidths_are_those_of_the_transfer_on_the_rank_that_receives_most():
    received = [{"forward": {"kv": 30_000_000}}, {"forward": {"kv": 10_000_000}}, {"forward": {"kv": 20_000_000}}]
    recorded = [row for i in range(2) for row in rows(0, "forward", i, comm_kv=1.5)]
    found = bandwidths(by_iteration(recorded, 3), received)
    # 30 MB in 1.5 ms are 20 GB/s; with three ranks the gathered whole is half as much again
    assert found == {"forward": {"kv": {"rank": 0, "bytes": 30_000_000, "ms": 1.5, "busbw_gb_s": 20, "algbw_gb_s": 30}}}
