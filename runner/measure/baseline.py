"""The baseline of a run. `single`: the same global work on one device, by rank 0 alone while the others wait. `dense`: dense
attention over the same tokens, by the same variant on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, duration, memory, metrics, timing
from runner.measure.workload import Workload
from runner.measure.workloads import single, workload
from runner.record.fields import Baseline, Metrics

LEAST_TOKENS = 2048  # a shorter sequence that does not fit is an error

_known: dict[Any, Baseline] = {}  # on rank 0; the variants of a sweep share a baseline


def measure(me: Rank, spec: Experiment, measured: Metrics, ms: dict[str, float], expected_s: float) -> Baseline:
    """The baseline, with the speedup and efficiency of the run, whose passes take `ms`, where the baseline has times. expected_s:
    seconds that an iteration should take."""
    baseline = (_dense if spec.baseline == "dense" else _single)(me, spec, expected_s)
    return metrics.compared(baseline, ms, me.world, measured)


def _timed(work: Workload, expected_s: float, kind: str) -> Baseline:
    passes = timing.measure(work, expected_s, "baseline")[0].passes
    return Baseline(
        kind=kind,
        kernel=work.plan.kernel.name,
        samples=passes["forward"].n,
        passes={which: times.median for which, times in passes.items()},
        iqr_over_median={which: times.iqr_over_median for which, times in passes.items()},
    )


def _dense(me: Rank, spec: Experiment, expected_s: float) -> Baseline:
    """Dense attention in the mask's direction, timed as the run was."""
    me.say("baseline", expected_s)
    try:
        work = choosing.together(me, lambda: workload(spec)(me, spec.dense))
    except ValueError as error:
        return Baseline(kind="dense", unsupported=str(error))
    return _timed(work, expected_s, "dense")


def _single(me: Rank, spec: Experiment, expected_s: float) -> Baseline:
    """What is known of the work on one device, or measured now by rank 0."""
    known_by = (
        spec.workload, spec.dilation, spec.model, spec.kernel, spec.mode, spec.device, me.world, spec.deterministic, spec.timing,
    )  # fmt: skip
    me.say("baseline", expected_s, waiting=me.rank != 0)
    memory.empty_caches(me.device)
    if me.rank == 0 and known_by not in _known:
        # this rank as a world of one, which times no stages
        _known[known_by] = _fitting(replace(me, world=1, stages={}), spec, expected_s)
    me.say("baseline", waiting=True)
    baseline: Baseline = me.agree(_known.get(known_by))
    return baseline


def _fitting(me: Rank, spec: Experiment, expected_s: float) -> Baseline:
    """The work on one device: fewer samples where an iteration takes long. If it does not fit, it is measured at half the length
    (and so on), extrapolated by FLOPs and marked so."""
    whole = tokens = spec.workload.seq_len
    options = replace(spec.timing, method="warmup", warmup_runs=1)
    if expected_s > duration.BASELINE_CAP_S:
        options = replace(options, warmup_ms=0.0, settle_ms=0.0)
    options = replace(options, timing_runs=duration.baseline_runs(options.timing_runs, expected_s))
    while True:
        here = replace(spec, workload=spec.workload.shortened(tokens), timing=options)
        try:
            baseline = _timed(single(me, here), expected_s, "single")
            break
        except ValueError as error:
            return Baseline(unsupported=str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or tokens < LEAST_TOKENS:
                raise
            memory.empty_caches(me.device)
            tokens //= 2
        if spec.workload.seqlens:
            return Baseline(unsupported="the packed batch does not fit one device")
    scale = metrics.flops(spec)["forward"] / metrics.flops(here)["forward"] if tokens < whole else 1.0
    passes = {which: ms * scale for which, ms in baseline.passes.items()}
    return replace(baseline, passes=passes, extrapolated=tokens < whole, measured_seq_len=tokens)
