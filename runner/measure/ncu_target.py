"""The process that ncu profiles: one warm iteration of an experiment on one GPU. `python -m runner.measure.ncu_target
EXPERIMENT`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from attention.runtime import private
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.workloads import WORKLOADS


def main(plain: dict[str, Any]) -> None:
    spec = Experiment.from_plain(plain)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    alone = Rank(0, 1, device, Path(tempfile.gettempdir()), cast(Any, None))  # it talks to nobody
    work = WORKLOADS[spec.model].create(alone, spec)
    for which in work.passes:
        work.run(which)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for which in work.passes:
        private.sleep_cycles(1)
        work.run(which)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
