"""Clocks, power, temperature and throttle reasons, sampled during timing by a separate process, one per node, so that it
delays no rank's Python; and the GPUs' energy counters, for `runner.measure.energy`. It uses the standard library only and
starts in some 20 ms."""

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
# by kind the seconds between readings, and of a GPU: NVML's function and its argument
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
Series = dict[str, list[Any]]  # of a GPU: the values of each reading; None where it does not support them


def reasons(bits: int) -> list[str]:
    """The names of a GPU's throttle reasons."""
    return [REASONS[i] if i < len(REASONS) else f"bit {i}" for i in range(bits.bit_length()) if bits >> i & 1]


def summary(series: Series) -> dict[str, Any]:
    """Of a GPU's clocks: the number of samples, min, median and max of each value, and all throttle reasons seen."""
    fields: dict[str, Any] = {"samples": len(series["sm_mhz"])}
    for key, readings in series.items():
        values = [value / 1000 if key == "power_w" else value for value in readings if value is not None]
        if key == "throttle_reasons":
            fields[key] = sorted({reason for bits in values for reason in reasons(bits)})
        else:
            spread = values and {"min": min(values), "median": statistics.median(values), "max": max(values)}
            fields[key] = spread or None
    return fields


class Nvml:
    """NVIDIA's driver, by the library NVML. Raises OSError where it is missing or does not start."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        if status := self.library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2: status {status}")
        self.gpus: dict[str, ctypes.c_void_p] = {}
        for index in range(self.number("nvmlDeviceGetCount_v2") or 0):
            if handle := self.number("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)):
                gpu, uuid = ctypes.c_void_p(handle), ctypes.create_string_buffer(96)
                self.library.nvmlDeviceGetUUID(gpu, uuid, ctypes.c_uint(len(uuid)))
                self.gpus[uuid.value.decode()] = gpu

    def number(self, function: str, *arguments: Any) -> int | None:
        """The value that the function writes into its last argument; None if this GPU or driver does not support it. The
        numbers of 32 bits are the low half of the 64 bits here."""
        value = ctypes.c_ulonglong()
        call = getattr(self.library, function, None)
        return value.value if call is not None and call(*arguments, ctypes.byref(value)) == 0 else None


def serve(kind: str) -> None:
    """The process: samples until its input ends, then answers with JSON."""
    try:
        nvml = Nvml()
    except (OSError, AttributeError) as error:
        print(json.dumps({"unavailable": f"NVML: {error}"}))
        return
    period, functions = KINDS[kind]
    times: list[float] = []
    gpus: dict[str, Series] = {uuid: {key: [] for key in functions} for uuid in nvml.gpus}
    ended: Sequence[Any] = ()
    while len(times) < 2 or not ended:
        ended = select.select([sys.stdin], [], [], period if times else 0)[0]
        times.append(time.monotonic())
        for uuid, gpu in nvml.gpus.items():
            for key, (function, *arguments) in functions.items():
                gpus[uuid][key].append(nvml.number(function, gpu, *map(ctypes.c_uint, arguments)))
    print(json.dumps({"period_ms": period * 1e3, "times": times, "gpus": gpus}))


@contextmanager
def sampling(device: str, kind: str = "clocks") -> Iterator[dict[str, Any]]:
    """Samples a node's GPUs within the context, in its first rank of several; on a CPU nothing. Afterwards the dict has `period_ms`, the
    `times` in s and by UUID the `gpus` with their series, or `unavailable` with the reason. kind: of `KINDS`."""
    sampled: dict[str, Any] = {}
    if device == "cpu" or os.environ.get("LOCAL_RANK", "0") != "0":
        yield sampled
        return
    command = [sys.executable, "-I", "-S", __file__, kind, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield sampled
        answer, _ = process.communicate(timeout=ANSWER_S)
        sampled |= json.loads(answer)
    except (ValueError, subprocess.TimeoutExpired):
        sampled["unavailable"] = "the sampler gave no answer"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its rank
    if os.getppid() == int(sys.argv[2]):
        serve(sys.argv[1])
