"""The phases of a run in which one rank is late."""

from runner.record.fields import Clocks
from tests.jobs import own_block
from tests.support.composing import resolved

LATE_S = 0.3  # rank 1's kernel calls, by far more than a busy machine delays rank 0


def test_a_rank_is_seen_waiting_for_a_late_one_on_the_shared_clock_and_a_users_block_is_in_the_tables(in_world):
    sizes = ["attention=ulysses", "kernel=math", "hardware=cpu", "dtype=fp32", "seq_len=256", "heads=2", "head_dim=64"]
    spec = resolved(*sizes, "world_size=2", "baseline=none", "timing.timing_runs=1", "timing.warmup_ms=0")
    result, tables = in_world(own_block.run, 2, experiment=spec.plain(), name="mine", late_s=LATE_S)
    phases, rows = result.phases["forward"].phases, tables.phases
    assert 0 < phases["mine"].ms <= phases["comp_block"].ms
    assert result.comm.clocks == Clocks(count=1, error_ms=0.0)
    first = [row for row in rows if (row["pass"], row["iteration"]) == ("forward", 0)]
    (late,) = [row for row in first if row["rank"] == 1 and row["phase"] == "mine"]
    assert late["stop_ms"] - late["start_ms"] >= LATE_S * 1e3
    waits = [row for row in first if row["rank"] == 0 and row["phase"] == "wait_out"]
    # the outputs of rank 1 come when its kernel is done; causality holds across the two processes
    assert waits[-1]["stop_ms"] >= late["stop_ms"]
    both = (min(row["stop_ms"], late["stop_ms"]) - max(row["start_ms"], late["start_ms"]) for row in waits)
    assert sum(max(0.0, ms) for ms in both) > LATE_S * 1e3 / 10
    # phases lie within their pass
    wholes = {(row["rank"], row["pass"], row["iteration"]): row for row in rows if row["phase"] == "pass"}
    for row in rows:
        whole = wholes[row["rank"], row["pass"], row["iteration"]]
        assert 0 <= whole["start_ms"] <= row["start_ms"] <= row["stop_ms"] <= whole["stop_ms"]
