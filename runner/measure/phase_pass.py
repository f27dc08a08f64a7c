"""A pass of its own in which each phase is recorded and each byte that arrives is counted."""

from __future__ import annotations

from typing import Any

from attention.profiling import Recorder, recording
from runner.launch.rank import Rank
from runner.measure import phases, timing
from runner.measure.timing import Stopwatch
from runner.measure.workload import Workload

MOST_RUNS = 15
SECONDS = 0.2  # a slow run records fewer


def runs(iteration_s: float) -> int:
    return max(1, min(MOST_RUNS, int(SECONDS / iteration_s)))


class _Counted:
    """A workpiece, with the bytes that the transport moved into this rank in each pass, as last run. Replayed passes count
    nothing; while phases are recorded nothing is replayed."""

    def __init__(self, work: Workload):
        self.work, self.passes = work, work.passes
        self.received: dict[str, dict[str, int]] = {}

    def run(self, which: str) -> None:
        counter = self.work.transport.bytes_received
        counter.clear()
        self.work.run(which)
        self.received[which] = dict(counter)


def measure(me: Rank, work: Workload, watch: Stopwatch, runs: int) -> dict[str, Any]:
    """`phase_rows`, `phases` and `comm` of the result, from all ranks."""
    recorder = Recorder(me.device)
    counted = _Counted(work)
    leads = timing.leads_ms(counted, watch, lambda: recording(recorder))
    recorder.spans.clear()
    with recording(recorder):
        passes = timing.record(counted, watch, runs, recorder, leads)
    work.release()
    mine: list[dict[str, Any]] = []
    for number, each in enumerate(passes):
        here = {"iteration": number // len(work.passes), "rank": me.rank, "pass": each.which}
        mine.append({**here, "phase": "pass", "step": -1, "ms": watch.elapsed(each.start, each.stop)})
        lengths = phases.shares([(s.name, *s.since(each.start)) for s in each.spans])
        mine += [{**here, "phase": s.name, "step": s.step, "ms": ms} for s, ms in zip(each.spans, lengths, strict=True)]
    everyone = me.gather((mine, counted.received))
    rows, received = [row for rows, _ in everyone for row in rows], [received for _, received in everyone]
    return {
        "phase_rows": rows,
        "phases": phases.summarize(rows, me.world),
        "comm": {
            "transport": work.transport.name,
            "bytes_received_by_rank": received,
            "bandwidth": phases.bandwidths(rows, received),
        },
    }
