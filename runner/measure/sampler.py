"""Clocks, power, temperature and throttle reasons of a rank's GPU, sampled during timing by a process beside the rank, so that it
delays no Python of the rank; and the GPU's energy counter, for `runner.measure.energy`. The process uses the standard library only
and starts in some 20 ms."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ANSWER_S = 10.0  # a sampler that answers later is given up
REASONS = (  # NVML's bits, the lowest first
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
)  # fmt: skip
# by kind the seconds between readings, and NVML's function and its argument
CLOCKS: tuple[float, dict[str, tuple[Any, ...]]] = (
    0.1,
    {
        "sm_mhz": ("nvmlDeviceGetClockInfo", 1),
        "memory_mhz": ("nvmlDeviceGetClockInfo", 2),
        "power_w": ("nvmlDeviceGetPowerUsage",),  # mW
        "temperature_c": ("nvmlDeviceGetTemperature", 0),
        "throttle_reasons": ("nvmlDeviceGetCurrentClocksEventReasons",),
    },
)
# mJ since the driver was loaded; counters change every 20 to 100 ms. A GPU that is divided (MIG) counts for all its parts
ENERGY = 0.005, {"energy_mj": ("nvmlDeviceGetTotalEnergyConsumption",)}
KINDS = {"clocks": CLOCKS, "energy": ENERGY}
Series = dict[str, list[Any]]  # the values of each reading; None where the GPU or its driver does not support them


def reasons(bits: int) -> list[str]:
    """The names of a GPU's throttle reasons."""
    return [REASONS[i] if i < len(REASONS) else f"bit {i}" for i in range(bits.bit_length()) if bits >> i & 1]


def summary(series: Series) -> dict[str, Any]:
    """The fields of `Sampled` for a GPU's clocks: the number of samples, the range of each value, and all throttle reasons seen."""
    from runner.record.fields import Range

    fields: dict[str, Any] = {"samples": len(series["sm_mhz"])}
    for key, readings in series.items():
        values = [value / 1000 if key == "power_w" else value for value in readings if value is not None]
        if key == "throttle_reasons":
            fields[key] = sorted({reason for bits in values for reason in reasons(bits)})
        else:
            ends = {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else None
            fields[key] = ends and Range(**ends)
    return fields


def serve(kind: str, uuid: str) -> None:
    """The process: samples until its input ends, then answers with JSON."""
    gpu = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if status := nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(gpu)):
            raise OSError(f"status {status} for {uuid}")
    except (OSError, AttributeError) as error:
        print(json.dumps({"unavailable": f"NVML: {error}"}))
        return
    period, functions = KINDS[kind]
    times: list[float] = []
    series: Series = {key: [] for key in functions}
    ended: Sequence[Any] = ()
    while len(times) < 2 or not ended:
        ended = select.select([sys.stdin], [], [], period if times else 0)[0]
        times.append(time.monotonic())
        for key, (function, *arguments) in functions.items():
            # numbers of 32 bits are the low half of these 64
            value, read = ctypes.c_ulonglong(), getattr(nvml, function, None)
            known = read is not None and read(gpu, *map(ctypes.c_uint, arguments), ctypes.byref(value)) == 0
            series[key].append(value.value if known else None)
    print(json.dumps({"period_ms": period * 1e3, "times": times, "series": series}))


@contextmanager
def sampling(device: Any, kind: str = "clocks") -> Iterator[dict[str, Any]]:
    """Samples a rank's GPU within the context; on a CPU nothing. Afterwards the dict has `period_ms`, the `times` in s and the `series`,
    or `unavailable` with the reason. kind: of `KINDS`."""
    sampled: dict[str, Any] = {}
    if device.type == "cpu":
        yield sampled
        return
    from runner.environment import gpu_uuid

    command = [sys.executable, "-I", "-S", __file__, kind, gpu_uuid(device), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield sampled
        try:
            answer, _ = process.communicate(timeout=ANSWER_S)
            sampled |= json.loads(answer)
        except (ValueError, subprocess.TimeoutExpired):
            sampled["unavailable"] = "the sampler gave no answer"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its rank
    if os.getppid() == int(sys.argv[3]):
        serve(sys.argv[1], sys.argv[2])
