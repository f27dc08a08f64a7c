"""A run whose kernel has a block of a user's."""

import time
from typing import Any

from attention.kernels.math import Math
from attention.profiling import phase
from runner import job
from runner.launch.rank import Rank
from runner.record.result import Result, Tables
from tests.jobs.program import begun


def run(me: Rank, experiment: dict[str, Any], name: str, late_s: float = 0.0) -> tuple[Result, Tables]:
    """The run, with the forward of the kernel `math` in a block `name`, which takes `late_s` longer on rank 1."""
    plain = Math.attend

    def attend(*arguments: Any) -> Any:
        with phase(name):
            time.sleep(late_s if me.rank == 1 else 0.0)
            return plain(*arguments)

    Math.attend = attend  # type: ignore[method-assign]
    try:
        return job.run(me, begun(experiment))
    finally:
        Math.attend = plain  # type: ignore[method-assign]
