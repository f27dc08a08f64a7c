"""One run within a world: inputs, the correctness check, timing, phases, profile, baseline. It runs on every rank; rank 0's
return value is the run's result."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention import transports
from runner import environment
from runner.check import gate
from runner.check.errors import Compared
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, memory_limit
from runner.measure import (
    baseline,
    ceilings,
    choosing,
    duration,
    energy,
    memory,
    metrics,
    phases,
    profile,
    sampler,
    timing,
)
from runner.measure.stopwatch import Stopwatch
from runner.measure.workload import Workload
from runner.measure.workloads import workload

NOT_TIMED = "not timed: launch.share_gpu=true has all ranks on one GPU"


def run(me: Rank, experiment: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """The result of an experiment, with status ok or incorrect. folder: of the run, for the traces."""
    spec = Experiment.from_plain(experiment)
    me.fault = spec.launch.fault
    gc.freeze()  # so that garbage collections around the timing skip modules and caches: 0.1 s each time
    with memory_limit(me, spec.launch.memory_limit_gb):
        try:
            return _Run(me, spec, Path(folder) if folder else None).result_of_all()
        finally:
            transports.release()
            memory.empty_caches(me.device)


def _removes_nothing(spec: Experiment) -> str | None:
    """A note where a mask that should make attention sparse leaves it dense."""
    call, named = spec.workload, spec.workload.named_mask
    if named is None or named.name in ("full", "causal") or call.batch_pairs < call.dense.batch_pairs:
        return None
    return f"mask={named.name} removes no pair of {call.seq_len:,} tokens: attention is dense; take more tokens or other parameters"


class _Run:
    """A run in stages, each of which adds its fields to `result`. A field `reason` ends it."""

    def __init__(self, me: Rank, spec: Experiment, folder: Path | None):
        self.me, self.folder = me, folder
        self.result: dict[str, Any] = {"status": "ok", "environment": environment.of_torch(spec.device)}
        me.say("prepare")
        made, about = choosing.resolved(me, spec)
        self.work: Workload = choosing.together(me, lambda: workload(spec)(me, made))
        self.spec = replace(made, options=self.work.plan.options.plain())
        if self.spec != spec:
            self.result["experiment"] = self.spec.plain()
        report = self.work.report()
        notes = filter(None, [report["note"], _removes_nothing(self.spec)])
        self.result["chosen"] = report | {"note": "; ".join(notes) or None} | about

    def result_of_all(self) -> dict[str, Any]:
        stages = (
            self.estimate, self.check, self.time, self.check_timed, self.compute_metrics, self.measure_energy,
            self.record_phases, self.profile, self.compare_with_baseline,
        )  # fmt: skip
        for stage in stages:
            stage()
            if "reason" in self.result:
                return self.result
        self.me.say("finish")
        self.result["environment"]["stage_seconds"] = dict(self.me.stages)
        return self.result

    def estimate(self) -> None:
        """Announces how long an iteration and the whole run should take."""
        me = self.me
        me.say("estimate")
        self.iteration_s = choosing.iteration_s(me, self.spec)
        me.say("estimate", self.iteration_s, estimate_s=duration.iterations_s(self.spec, self.iteration_s))
        self.result["estimate"] = {"iteration_ms": self.iteration_s * 1e3}

    def check(self) -> None:
        """The comparison with the reference."""
        if self.spec.replay != "none":  # so that the checked calls are CUDA graph replays, too
            for _ in range(choosing.LEADING):
                timing.iterate(self.work)
            self.work.release()
        self.checked: Compared | None = None
        self.result["correctness"] = {"passed": None, "why": "check.enabled=false"}
        if self.spec.check.enabled:
            self.checked = gate.check(self.me, self.spec, self.work)
            self.result["correctness"] = self.checked.fields
            self._judge(self.checked.fields)
        if self.spec.launch.share_gpu:
            self.result.setdefault("reason", NOT_TIMED)

    def _judge(self, verdict: dict[str, Any]) -> None:
        if verdict["passed"] is False:
            self.result["correctness"] |= {"passed": False, "why": verdict["why"]}
            self.result |= {"status": "incorrect", "reason": verdict["why"]}

    def time(self) -> None:
        """Samples of the passes, with the clocks and the memory meanwhile."""
        me, work = self.me, self.work
        work.release()
        used = self._memory() if me.device.type == "cpu" else None
        memory.reset_peak(me.device)
        me.say("timing", self.iteration_s)
        with sampler.sampling(me.device) as self.sampled:
            self.measured, self.passes = timing.measure(work, self.iteration_s)
        self.measured["memory"] = used or self._memory()
        self.measured |= work.more()

    def check_timed(self) -> None:
        """Compares the outputs of the timed passes with the checked ones. The times enter the result only if they agree."""
        if self.checked is not None:
            again = gate.check_timed(self.me, self.work, self.passes, self.checked)
            self.result["correctness"]["timed"] = again
            self._judge(again)
        if "reason" not in self.result:
            self.result |= self.measured
            self.result["environment"]["during"] = timing.clocks(self.me, self.sampled)

    def compute_metrics(self) -> None:
        medians = {which: summary["median"] for which, summary in self.result["timing"]["passes"].items()}
        for exceeded in (False, True):
            self.result["ceilings"] = ceilings.ceilings(self.me, self.spec.workload.dtype, exceeded)
            fields = metrics.compute(self.spec, medians, self.result["ceilings"], self.work.transport.pulls)
            if not metrics.exceeds(fields):
                break
        built = [ms for ms in self.me.gather(self.work.mask_build_ms()) if ms is not None]
        self.result["metrics"] = fields | {"mask_build_ms": max(built, default=None)}
        self.measured_s = sum(medians[which] for which in self.work.passes) / 1e3

    def measure_energy(self) -> None:
        if self.spec.energy:
            fields, layers = self.result["metrics"], self.spec.timing.layers
            flops = metrics.iteration_flops(self.spec) * self.me.world // self.spec.sharing
            timer = timing.Timer(self.passes, Stopwatch(self.me), "energy", self.measured_s * layers)
            self.result["energy"] = energy.measure(timer, layers, fields["tokens"], flops)

    def record_phases(self) -> None:
        if self.spec.phases and not self.spec.is_peer:  # whose phases and bytes are not known
            self.me.say("phases", self.iteration_s)
            self.result |= phases.measure(self.work, duration.phase_runs(self.spec, self.measured_s))

    def profile(self) -> None:
        if self.spec.timing.method == "profiler":
            self.me.say("profiler", self.iteration_s * 10)
            self.result |= profile.profile(self.work, self.spec.timing.profile_runs, self.folder)

    def compare_with_baseline(self) -> None:
        if self.spec.baseline != "none":
            self.work.release()
            expected_s = duration.baseline_iteration_s(self.spec, max(self.iteration_s, self.measured_s))
            self.result["baseline"] = baseline.measure(self.me, self.spec, self.result["metrics"], expected_s)

    def _memory(self) -> dict[str, Any]:
        """The peak of an iteration and the inputs, by rank, in bytes. On a GPU the peak is of the iterations just timed."""
        inputs = sum(x.nbytes for x in self.work.inputs)
        if self.me.device.type == "cuda":
            mine = memory.of_gpu(self.me.device)
        else:
            mine = memory.of_cpu(timing.sampled_passes(self.work), inputs)
            self.work.release()
        return {"by_rank": self.me.gather(mine | {"inputs": inputs})}
