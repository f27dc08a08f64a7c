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
from runner.check.gate import Checked
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, memory_limit
from runner.measure import (
    baseline,
    ceilings,
    choosing,
    do_bench,
    energy,
    length,
    memory,
    metrics,
    phases,
    profile,
    sampler,
    timed,
    timing,
)
from runner.measure.stopwatch import Stopwatch, stopwatch
from runner.measure.workload import Passes, Workload
from runner.measure.workloads import kind

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
    """A run in stages, each of which adds its fields to `result`."""

    def __init__(self, me: Rank, spec: Experiment, folder: Path | None):
        self.me, self.folder = me, folder
        self.result: dict[str, Any] = {"status": "ok", "environment": environment.of_torch(spec.device)}
        me.say("prepare")
        made, about = choosing.resolved(me, spec)
        self.work: Workload = choosing.together(me, lambda: kind(spec).create(me, made))
        self.spec = replace(made, options=self.work.resolved())
        if self.spec != spec:
            self.result["experiment"] = self.spec.plain()
        report = self.work.report()
        notes = filter(None, [report.get("note"), _removes_nothing(self.spec)])
        self.result["chosen"] = report | {"note": "; ".join(notes) or None} | about

    def result_of_all(self) -> dict[str, Any]:
        self.estimate()
        checked = self.check()
        if self.result["status"] != "ok":
            return self.result
        if self.spec.launch.share_gpu:
            return self.result | {"reason": NOT_TIMED}
        self.result["ceilings"] = ceilings.ceilings(self.me, self.spec.workload.dtype)
        passes, sampled = self.time()
        self.check_timed(checked, passes)
        if self.result["status"] != "ok":
            return self.result
        self.compare_with_do_bench()
        self.result["environment"]["during"] = timed.clocks(self.me, sampled)
        self.compute_metrics()
        self.measure_energy(passes)
        self.record_phases()
        self.profile()
        self.compare_with_baseline()
        self.me.say("finish")
        self.result["environment"]["stage_seconds"] = dict(self.me.stages)
        return self.result

    def estimate(self) -> None:
        """Announces how long an iteration and the whole run should take."""
        me, spec = self.me, self.spec
        me.say("estimate")
        self.iteration_s = each = me.agree(max(me.gather(self.work.flops() / self.work.rate())))
        whole_s = length.iterations(spec, each) * each + length.baseline_s(spec, each)
        me.say("estimate", each, estimate_s=whole_s)
        self.result["estimate"] = {"iteration_ms": each * 1e3}

    def check(self) -> Checked | None:
        """The comparison with the reference; None if it is off."""
        if self.spec.replay != "none":  # so that the checked calls are CUDA graph replays, too
            for _ in range(choosing.LEADING):
                timing.iterate(self.work)
            self.work.release()
        if not self.spec.check.enabled:
            self.result["correctness"] = {"passed": None, "why": "check.enabled=false"}
            return None
        checked = gate.check(self.me, self.spec, self.work)
        self.result["correctness"] = checked.found
        if not checked.found["passed"]:
            self.result |= {"status": "incorrect", "reason": checked.found["why"]}
        return checked

    def time(self) -> tuple[Passes, dict[str, Any]]:
        """The passes that were timed, and the clocks sampled meanwhile."""
        me, spec, work = self.me, self.spec, self.work
        watch = self._watch()
        work.release()
        used = self._memory() if me.device.type == "cpu" else None
        memory.reset_peak(me.device)
        me.say("timing", self.iteration_s)
        with sampler.sampling(me.device.type, timed.samples_clocks(me)) as sampled:
            self.measured, passes = timed.measure(me, spec, work, watch, self.iteration_s)
        self.measured["memory"] = used or self._memory()
        self.measured |= work.more()
        return passes, sampled

    def check_timed(self, checked: Checked | None, passes: Passes) -> None:
        """Compares the outputs of the timed passes with the checked ones. The times enter the result only if they agree."""
        if checked is not None:
            again = gate.check_timed(self.me, self.spec, self.work, passes, checked.kept)
            checked.found["timed"] = again
            if again["passed"] is False:
                checked.found.update(passed=False, why=again["why"])
                self.result |= {"status": "incorrect", "reason": again["why"]}
                return
        self.result |= self.measured

    def compare_with_do_bench(self) -> None:
        """Runs after the check, because it overwrites the outputs of the last timed iteration."""
        if self.spec.timing.do_bench:
            watch, flush = stopwatch(self.me, together=False), timed.flush_buffer(self.me, self.spec)
            found = do_bench.compare(self.work, watch, flush, lambda: self.me.say("timing", self.iteration_s))
            self.result["timing"]["do_bench"] = found

    def compute_metrics(self) -> None:
        medians = {which: summary["median"] for which, summary in self.result["timing"]["passes"].items()}
        pulls = self.work.transport.pulls
        found = metrics.compute(self.spec, medians, self.result["ceilings"], pulls)
        if metrics.exceeds(found):
            self.result["ceilings"] = ceilings.again(self.me, self.spec.workload.dtype)
            found = metrics.compute(self.spec, medians, self.result["ceilings"], pulls)
        self.result["metrics"] = metrics.without_exceeded(found)
        built = [ms for ms in self.me.gather(self.work.mask_build_ms()) if ms is not None]
        self.result["metrics"]["mask_build_ms"] = max(built, default=None)
        self.measured_s = sum(medians[which] for which in self.work.passes) / 1e3

    def measure_energy(self, passes: Passes) -> None:
        if self.spec.energy:
            found, layers = self.result["metrics"], self.spec.timing.layers
            flops = found["flops"].get("total", found["flops"]["forward"]) * self.me.world // self.spec.sharing
            seconds = self.measured_s * layers
            measured = energy.measure(self.me, passes, self._watch(), seconds, layers, found["tokens"], flops)
            self.result["energy"] = measured

    def record_phases(self) -> None:
        if self.spec.phases and self.work.has_phases:
            self.me.say("phases", self.iteration_s)
            runs = length.phase_runs(self.spec, self.measured_s)
            self.result |= phases.measure(self.me, self.work, self._watch(), runs, self.spec.nvtx)

    def profile(self) -> None:
        if self.spec.timing.method == "profiler":
            self.me.say("profiler", self.iteration_s * 10)
            runs = self.spec.timing.profile_runs
            everyone = self.me.gather(profile.profile(self.me, self.work, self._watch(), runs, self.folder))
            self.result["profile"] = [found for found, _ in everyone]
            self.result["kernel_times"] = profile.together([found.pop("kernel_times") for found, _ in everyone])
            self.result["traces"] = [name for _, names in everyone for name in names]

    def compare_with_baseline(self) -> None:
        if self.spec.baseline == "none":
            return
        self.work.release()
        measured, each_s = self.result["metrics"], max(self.iteration_s, self.measured_s)
        if self.spec.baseline == "single":
            self.result["baseline"] = baseline.measure(self.me, self.spec, measured, each_s * self.me.world)
        else:
            work = self.spec.workload
            dense_s = each_s * work.dense.batch_pairs / max(work.batch_pairs, 1)
            self.result["baseline"] = baseline.dense(self.me, self.spec, measured, dense_s)

    def _watch(self) -> Stopwatch:
        return stopwatch(self.me, together=self.me.world > 1)

    def _memory(self) -> dict[str, Any]:
        """The peak of an iteration and the inputs, by rank, in bytes. On a GPU the peak is of the iterations just timed."""
        inputs = memory.tensor_bytes(self.work.inputs)
        if self.me.device.type == "cuda":
            mine = memory.of_gpu(self.me.device)
        else:
            mine = memory.of_cpu(timed.sampled_passes(self.spec, self.work), inputs)
            self.work.release()
        return {"by_rank": self.me.gather(mine | {"inputs": inputs})}
