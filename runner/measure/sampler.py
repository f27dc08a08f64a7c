"""Clocks, power, temperature and throttle reasons, sampled during timing by a separate process, one per node, so that it
delays no rank's Python; and the GPUs' energy counters, for `runner.measure.energy`. It uses the standard library only and
starts in some 20 ms."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PERIOD_S = {"cuda": 0.1, "cpu": 0.25}
ENERGY_PERIOD_S = 0.005  # counters change every 20 to 100 ms
ANSWER_S = 10.0  # a sampler that answers later is given up
REASONS = (  # NVML's bits, the lowest first
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
)  # fmt: skip
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
Reading = dict[str, dict[str, Any]]  # by GPU, or "cpu": the values read at one time


def reasons(bits: int) -> list[str]:
    """The names of a GPU's throttle reasons."""
    return [REASONS[i] if i < len(REASONS) else f"bit {i}" for i in range(bits.bit_length()) if bits >> i & 1]


def summary(readings: Sequence[Reading]) -> dict[str, dict[str, Any]]:
    """For each GPU or the CPU: the number of samples, min, median and max of each value, and all throttle reasons seen."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for reading in readings for name in reading):
        taken = [reading[name] for reading in readings if name in reading]
        entry = found[name] = {"samples": len(taken)}
        for key in dict.fromkeys(key for each in taken for key in each):
            values = [each[key] for each in taken if each.get(key) is not None]
            if key == "throttle_reasons":
                entry[key] = sorted({reason for bits in values for reason in reasons(bits)})
            else:
                entry[key] = of_values(values, values, values)
    return found


def of_values(lows: Sequence[float], middles: Sequence[float], highs: Sequence[float]) -> dict[str, float] | None:
    """The least, the median and the most; None without values."""
    return {"min": min(lows), "median": statistics.median(middles), "max": max(highs)} if middles else None


def changes(times: Sequence[float], readings: Sequence[dict[str, int]]) -> dict[str, list[tuple[float, int]]]:
    """For each GPU the times at which its energy counter was found changed, with its value in mJ, and the first reading."""
    found: dict[str, list[tuple[float, int]]] = {}
    for at, reading in zip(times, readings, strict=True):
        for gpu, value in reading.items():
            seen = found.setdefault(gpu, [])
            if not seen or seen[-1][1] != value:
                seen.append((at, value))
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def read_cpu() -> Reading:
    """MHz (the mean over the cores), the load average of a minute, and the number of running threads."""
    mhz = [float(x) for x in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _text("/proc/cpuinfo"), re.MULTILINE)]
    load = _text("/proc/loadavg").split()
    values = (
        {"load": float(load[0]), "running": int(load[3].split("/")[0])} if load else {"load": None, "running": None}
    )
    return {"cpu": {"mhz": statistics.fmean(mhz) if mhz else None, **values}}


class Nvml:
    """Readings from NVIDIA's driver, by the library NVML. Raises OSError where NVML is missing or does not start."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        if status := self.library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2: status {status}")
        count = self._number(ctypes.c_uint, "nvmlDeviceGetCount_v2") or 0
        by_index = "nvmlDeviceGetHandleByIndex_v2"
        handles = [self._number(ctypes.c_void_p, by_index, ctypes.c_uint(i)) for i in range(count)]
        self.gpus = {self._uuid(handle): ctypes.c_void_p(handle) for handle in handles if handle}

    def _number(self, kind: Any, function: str, *arguments: Any) -> int | None:
        """The value that the function writes into its last argument; None if this GPU or driver does not support it."""
        value = kind()
        call = getattr(self.library, function, None)
        return value.value if call is not None and call(*arguments, ctypes.byref(value)) == 0 else None

    def _uuid(self, handle: int) -> str:
        text = ctypes.create_string_buffer(96)
        self.library.nvmlDeviceGetUUID(ctypes.c_void_p(handle), text, ctypes.c_uint(len(text)))
        return text.value.decode()

    def read(self) -> Reading:
        """MHz, W, degrees Celsius and the bits of the throttle reasons of every GPU."""
        return {uuid: self._of(gpu) for uuid, gpu in self.gpus.items()}

    def energy(self) -> dict[str, int]:
        """mJ since the driver was loaded, of each GPU that counts them. One that is divided (MIG) counts for all its parts."""
        by_uuid = {uuid: self._number(ctypes.c_ulonglong, ENERGY, gpu) for uuid, gpu in self.gpus.items()}
        return {uuid: value for uuid, value in by_uuid.items() if value is not None}

    def _of(self, gpu: ctypes.c_void_p) -> dict[str, Any]:
        def number(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
            return self._number(kind, function, gpu, *map(ctypes.c_uint, arguments))

        power = number("nvmlDeviceGetPowerUsage")
        bits = number("nvmlDeviceGetCurrentClocksEventReasons", kind=ctypes.c_ulonglong)
        if bits is None:  # its name before driver 535
            bits = number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return {
            "sm_mhz": number("nvmlDeviceGetClockInfo", 1),
            "memory_mhz": number("nvmlDeviceGetClockInfo", 2),
            "power_w": power / 1000 if power is not None else None,
            "temperature_c": number("nvmlDeviceGetTemperature", 0),
            "throttle_reasons": bits,
        }


def serve(device: str) -> None:
    """The process: samples between a line `clocks` or `energy` and a line `stop`, then answers with a line of JSON. Ends with
    its input."""
    try:
        nvml = Nvml() if device == "cuda" else None
    except (OSError, AttributeError) as error:
        print(json.dumps({"unavailable": f"NVML: {error}"}), flush=True)
        return
    clocks: Callable[[], Any] = nvml.read if nvml else read_cpu
    energy: Callable[[], Any] = nvml.energy if nvml else dict
    kinds: dict[
        bytes, tuple[Callable[[], Any], float, Callable[..., Any]]
    ] = {  # what is read, how often, what is answered
        b"clocks": (clocks, PERIOD_S[device], lambda _, taken: summary(taken)),
        b"energy": (energy, ENERGY_PERIOD_S, changes),
    }
    kind = b""  # the one that is sampled
    times: list[float] = []
    readings: list[Any] = []

    def take() -> None:
        times.append(time.monotonic())
        readings.append(kinds[kind][0]())

    while True:
        ready, _, _ = select.select([sys.stdin], [], [], kinds[kind][1] if kind else None)
        if not ready:
            take()
            continue
        words = os.read(sys.stdin.fileno(), 4096).split()
        if not words:
            return
        for word in words:
            if word == b"stop":
                take()
                _, period, of = kinds[kind]
                print(json.dumps({"period_ms": period * 1e3, "of": of(times, readings)}), flush=True)
                kind = b""
            else:  # an earlier kind is of a measurement that failed
                kind, times, readings = word, [], []
                take()


class Sampler:
    """A handle on that process, for the rank that starts it."""

    def __init__(self, device: str):
        command = [sys.executable, "-I", "-S", __file__, device, str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def ask(self, word: str) -> None:
        with suppress(OSError):  # it has ended; its last answer can still be read
            self.input.write(word.encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.output], [], [], ANSWER_S)
        try:
            return json.loads(self.output.readline()) if ready else {"unavailable": f"no answer in {ANSWER_S:g} s"}
        except ValueError:
            return {"unavailable": "the sampler ended"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()


_samplers: dict[str, Sampler] = {}  # by device, as long as the process lives


@contextmanager
def sampling(device: str, here: bool, kind: str = "clocks") -> Iterator[dict[str, Any]]:
    """Samples within the context. Afterwards the dict has `period_ms` and `of`, or `unavailable` with the reason. kind:
    clocks, of which `of` is a `summary`, or energy, of which it is the `changes`. here: whether this process samples for its
    node."""
    found: dict[str, Any] = {}
    if not here:
        yield found
        return
    try:
        sampler = _samplers[device] = _samplers.get(device) or Sampler(device)
    except OSError as error:
        yield found
        found["unavailable"] = str(error)
        return
    sampler.ask(kind)
    yield found
    sampler.ask("stop")
    found |= sampler.answer()
    if "unavailable" in found:
        _samplers.pop(device).close()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its rank
    if os.getppid() == int(sys.argv[2]):
        serve(sys.argv[1])
