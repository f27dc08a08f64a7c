"""The bytes that a run's kernels moved, by the GPU's counters (`timing.counters=true`). NVIDIA's `ncu` runs one more
iteration in a separate process, each kernel alone and with cold caches, so the timing is not affected. Only that process
(`python -m runner.measure.ncu EXPERIMENT`) imports torch."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from runner.config.experiment import Experiment
from runner.launch.processes import search_path
from runner.measure.statistics import Fields
from runner.record.fields import Counters

SECTOR = 32  # bytes
COUNTERS = {  # ncu's name: ours
    "dram__bytes_read.sum": "memory_read_bytes",
    "dram__bytes_write.sum": "memory_written_bytes",
    "lts__t_sectors_op_read.sum": "l2_read_bytes",
    "lts__t_sectors_op_write.sum": "l2_written_bytes",
    "lts__t_sectors_lookup_hit.sum": "l2_hit_bytes",  # over hits and misses: the hit rate
    "lts__t_sectors_lookup_miss.sum": "l2_missed_bytes",
}
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
OPTIONS = "--profile-from-start off --csv --print-units base --metrics"
PROFILED = "-P -m runner.measure.ncu"  # of Python
MARK = "spin_kernel"  # the kernel of torch.cuda._sleep, launched before each pass
TIMEOUT_S = 300.0


def count(spec: Experiment) -> Counters:
    """By pass, the bytes of all kernels and of each; or why there are none."""
    tool = shutil.which("ncu") or next((place for place in PLACES if Path(place).exists()), None)
    if tool is None:
        return Counters(unavailable="ncu (NVIDIA Nsight Compute) is not installed")
    command = [tool, *OPTIONS.split(), ",".join(COUNTERS), sys.executable, *PROFILED.split(), json.dumps(spec.plain())]
    environment = os.environ | {"PYTHONPATH": search_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return Counters(unavailable=f"ncu took more than {TIMEOUT_S:.0f} s")
    passes = parse(done.stdout.splitlines(), spec.mode)
    if done.returncode or not passes:
        output = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
        errors = [line for line in output if "ERR" in line or "Error" in line]
        return Counters(unavailable=f"ncu ended with {done.returncode}: {(errors or output)[-1][:300]}")
    return Counters(tool=f"ncu ({tool})", passes=passes)


def parse(lines: Iterable[str], mode: str) -> dict[str, Fields]:
    """Parses ncu's CSV, one line per kernel and metric; other lines are skipped."""
    kernels: dict[str, Fields] = {}
    passes: dict[str, list[Fields]] = {}
    wanted = iter(mode.split("_"))
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"] not in kernels:
            kernels[row["ID"]] = kernel = {"kernel": row["Kernel Name"]}
            if MARK in row["Kernel Name"]:
                ran = passes[next(wanted)] = []
            elif passes:
                ran.append(kernel)
        unit, number = SECTOR if "sectors" in row["Metric Name"] else 1, float(row["Metric Value"].replace(",", ""))
        kernels[row["ID"]][COUNTERS[row["Metric Name"]]] = int(number) * unit
    return {
        which: {name: sum(kernel[name] for kernel in ran) for name in COUNTERS.values()} | {"kernels": ran}
        for which, ran in passes.items()
    }


def _profiled(plain: Fields) -> None:
    """The process that ncu profiles: one iteration of an experiment on one GPU, after one that it does not see."""
    import torch

    from attention.gpu import private
    from runner.launch.rank import Rank
    from runner.measure.timing import iterate
    from runner.measure.workloads import workload

    spec, device = Experiment.from_plain(plain), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    alone = Rank(0, 1, device, Path(tempfile.gettempdir()), cast(Any, None))  # a world of one needs no process group
    work = workload(spec)(alone, spec)
    iterate(work)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for which in work.passes:
        private.sleep_cycles(1)
        work.run(which)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    _profiled(json.loads(sys.argv[1]))
