"""Jobs that count the bytes a transport receives."""

from __future__ import annotations

from typing import Any

from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork


def counted(me: Rank, experiments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each experiment: the transport, whether it pulls, and the bytes counted into each rank by forward and
    backward."""
    found = []
    for plain in experiments:
        spec = Experiment.from_plain(plain)
        work = AttentionWork(me, spec)
        transport, received = work.plan.transport, {}
        for which in work.passes:
            transport.bytes_received.clear()
            work.run(which)
            received[which] = dict(transport.bytes_received)
        found.append({"name": transport.name, "pulls": transport.pulls, "received": me.gather(received)})
    return found
