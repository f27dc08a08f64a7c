"""Energy of an iteration, by the GPUs' own counters (NVML's nvmlDeviceGetTotalEnergyConsumption).

A counter changes every 20 to 100 ms, so a window of a second or more is measured: iterations follow each other without
pause, as in a model, while each rank's sampler process reads its GPU's counter. A GPU's power is the energy between two changes of
its counter over the time between them, so no part of a period is lost at either end. The energy of an iteration is that
power times the window's time for an iteration, summed over all GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from runner import environment
from runner.measure import sampler
from runner.measure.timing import Timer, undisturbed
from runner.record.fields import Energy

LEAD_S = 0.3  # until a counter, which lags, shows the power of the iterations
WINDOW_S = 1.0
LEAST_S = 0.5  # between the changes of a counter that are used


def measure(timer: Timer, calls: int, tokens: int, flops: int) -> Energy:
    """Of a window of the timer's iterations on GPUs, each with so many calls of so many tokens and FLOPs over
    all ranks."""
    me = timer.watch.me
    with sampler.sampling(me.device, "energy") as sampled:
        timer.watch.settle()
        me.barrier()
        begin = time.monotonic()
        with undisturbed():
            iterations = timer.warm(1, (LEAD_S + WINDOW_S) * 1e3).iterations
        seconds = time.monotonic() - begin
    why, watts, mj = sampled.get("unavailable"), None, sampled.get("series", {}).get("energy_mj")
    if mj and None in mj:
        why = f"NVML counts no energy of {environment.gpu_uuid(me.device)}: the GPU is divided (MIG), too old or not permitted"
    elif mj:
        watts = power(sampled["times"], mj, begin)
    reasons, by_rank, lengths = zip(*me.gather((why, watts, seconds)), strict=True)
    if unavailable := next(filter(None, reasons), None):
        return Energy(unavailable=unavailable)
    return of_window(by_rank, max(lengths), iterations * calls, tokens, flops)


def power(times: Sequence[float], mj: Sequence[int], begin: float) -> float | None:
    """Mean power in W between the first and the last change of a counter, read at these times in s, after the lead of a window that
    began at `begin`; None where less than LEAST_S lies between them."""
    readings = zip(times[1:], mj, mj[1:], strict=False)
    changes = [(at, now) for at, before, now in readings if now != before and at - begin >= LEAD_S]
    if not changes or changes[-1][0] - changes[0][0] < LEAST_S:
        return None
    (first_s, first_mj), (last_s, last_mj) = changes[0], changes[-1]
    return (last_mj - first_mj) / 1e3 / (last_s - first_s)


def of_window(watts: Sequence[float | None], seconds: float, calls: int, tokens: int, flops: int) -> Energy:
    """watts: by rank. calls: within the window of so many seconds; each has so many tokens and FLOPs,
    over all ranks."""
    known = [x for x in watts if x is not None]
    if len(known) < len(watts):
        rank = watts.index(None)
        return Energy(unavailable=f"the counter of rank {rank}'s GPU changed too seldom in {seconds:.1f} s")
    joules = sum(known) * seconds / calls
    return Energy(
        watts_by_rank=known,
        seconds=seconds,
        calls=calls,
        joules=joules,
        joules_per_token=joules / tokens,
        tflops_per_watt=flops / joules / 1e12,
    )
