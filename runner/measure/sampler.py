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

PERIOD_S = {"clocks": 0.1, "energy": 0.005}  # counters change every 20 to 100 ms
ANSWER_S = 10.0  # a sampler that answers later is given up
REASONS = (  # NVML's bits, the lowest first
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
)  # fmt: skip
READ: dict[str, tuple[Any, ...]] = {  # of a GPU: NVML's function and its argument
    "sm_mhz": ("nvmlDeviceGetClockInfo", 1),
    "memory_mhz": ("nvmlDeviceGetClockInfo", 2),
    "power_w": ("nvmlDeviceGetPowerUsage",),  # mW
    "temperature_c": ("nvmlDeviceGetTemperature", 0),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksEventReasons",),
}
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
Reading = dict[str, dict[str, Any]]  # by GPU: the values read at one time


def reasons(bits: int) -> list[str]:
    """The names of a GPU's throttle reasons."""
    return [REASONS[i] if i < len(REASONS) else f"bit {i}" for i in range(bits.bit_length()) if bits >> i & 1]


def summary(times: Sequence[float], readings: Sequence[Reading]) -> dict[str, dict[str, Any]]:
    """For each GPU: the number of samples, min, median and max of each value, and all throttle reasons seen."""
    by_gpu: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for reading in readings for name in reading):
        taken = [reading[name] for reading in readings if name in reading]
        by_gpu[name] = {"samples": len(taken)}
        for key in READ:
            values = [values[key] for values in taken if values[key] is not None]
            if key == "throttle_reasons":
                by_gpu[name][key] = sorted({reason for bits in values for reason in reasons(bits)})
            elif values:
                by_gpu[name][key] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            else:
                by_gpu[name][key] = None
    return by_gpu


def changes(times: Sequence[float], readings: Sequence[dict[str, int]]) -> dict[str, list[tuple[float, int]]]:
    """For each GPU the times at which its energy counter was found changed, with its value in mJ, and the first reading."""
    by_gpu: dict[str, list[tuple[float, int]]] = {}
    for at, reading in zip(times, readings, strict=True):
        for gpu, value in reading.items():
            seen = by_gpu.setdefault(gpu, [])
            if not seen or seen[-1][1] != value:
                seen.append((at, value))
    return by_gpu


class Nvml:
    """Readings from NVIDIA's driver, by the library NVML. Raises OSError where NVML is missing or does not start."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        if status := self.library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2: status {status}")
        self.gpus: dict[str, ctypes.c_void_p] = {}
        for index in range(self._number("nvmlDeviceGetCount_v2") or 0):
            if handle := self._number("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)):
                gpu, uuid = ctypes.c_void_p(handle), ctypes.create_string_buffer(96)
                self.library.nvmlDeviceGetUUID(gpu, uuid, ctypes.c_uint(len(uuid)))
                self.gpus[uuid.value.decode()] = gpu

    def _number(self, function: str, *arguments: Any) -> int | None:
        """The value that the function writes into its last argument; None if this GPU or driver does not support it. The
        numbers of 32 bits are the low half of the 64 bits here."""
        value = ctypes.c_ulonglong()
        call = getattr(self.library, function, None)
        return value.value if call is not None and call(*arguments, ctypes.byref(value)) == 0 else None

    def read(self) -> Reading:
        """MHz, W, degrees Celsius and the throttle reasons of every GPU."""
        return {uuid: self._of(gpu) for uuid, gpu in self.gpus.items()}

    def energy(self) -> dict[str, int]:
        """mJ since the driver was loaded, of each GPU that counts them. One that is divided (MIG) counts for all its parts."""
        by_uuid = {uuid: self._number(ENERGY, gpu) for uuid, gpu in self.gpus.items()}
        return {uuid: value for uuid, value in by_uuid.items() if value is not None}

    def _of(self, gpu: ctypes.c_void_p) -> dict[str, float | None]:
        values: dict[str, float | None] = {
            key: self._number(function, gpu, *map(ctypes.c_uint, arguments))
            for key, (function, *arguments) in READ.items()
        }
        milliwatts = values["power_w"]
        return values | {"power_w": milliwatts and milliwatts / 1000}


def serve(kind: str) -> None:
    """The process: samples until its input ends, then answers with JSON."""
    times: list[float] = []
    readings: list[Any] = []
    try:
        nvml = Nvml()
    except (OSError, AttributeError) as error:
        print(json.dumps({"unavailable": f"NVML: {error}"}))
        return
    period = PERIOD_S[kind]
    ended: list[Any] = []
    while len(times) < 2 or not ended:
        ended = select.select([sys.stdin], [], [], period if times else 0)[0]
        times.append(time.monotonic())
        readings.append(nvml.energy() if kind == "energy" else nvml.read())
    answer = changes if kind == "energy" else summary
    print(json.dumps({"period_ms": period * 1e3, "of": answer(times, readings)}))


@contextmanager
def sampling(device: str, kind: str = "clocks") -> Iterator[dict[str, Any]]:
    """Samples a node's GPUs within the context, in its first rank of several; on a CPU nothing. Afterwards the dict has `period_ms` and `of`, or `unavailable` with the
    reason. kind: clocks, of which `of` is a `summary`, or energy, of which it is the `changes`."""
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
