"""One run within a world: inputs, the correctness check, timing, phases, profile, baseline. It runs on every rank; rank 0's
return value is the run's."""

from __future__ import annotations

import gc
from dataclasses import replace
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
from runner.record.fields import Ceilings, Correctness, Memory
from runner.record.result import Result, Tables

NOT_TIMED = "not timed: launch.share_gpu=true has all ranks on one GPU"


def run(me: Rank, result: Result) -> tuple[Result, Tables]:
    """What the experiment of a result that has begun gives, with status ok or incorrect."""
    assert result.experiment is not None
    spec = Experiment.from_plain(result.experiment)
    me.fault = spec.launch.fault
    gc.freeze()  # so that garbage collections around the timing skip modules and caches: 0.1 s each time
    with memory_limit(me, spec.launch.memory_limit_gb):
        try:
            made = _Run(me, spec, result)
            made.go()
            return made.result, made.tables
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
    """A run in stages, each of which adds its fields to `result`. A reason ends it."""

    def __init__(self, me: Rank, spec: Experiment, result: Result):
        self.me, self.result, self.tables = me, result, Tables()
        self.note(**environment.of_torch(spec.device))
        me.say("prepare")
        made, about = choosing.resolved(me, spec)
        self.work: Workload = choosing.together(me, lambda: workload(spec)(me, made))
        self.spec = replace(made, options=self.work.plan.options.plain())
        chosen = self.work.report()
        note = "; ".join(filter(None, [chosen.note, _removes_nothing(self.spec)])) or None
        self.add(experiment=self.spec.plain(), chosen=replace(chosen, note=note, **about))

    def add(self, **fields: Any) -> None:
        self.result = replace(self.result, **fields)

    def note(self, **facts: Any) -> None:
        """Adds facts of the environment."""
        self.add(environment=replace(self.result.environment, **facts))

    def go(self) -> None:
        stages = (
            self.estimate, self.check, self.time, self.compute_metrics, self.measure_energy, self.record_phases, self.profile,
            self.compare_with_baseline,
        )  # fmt: skip
        for stage in stages:
            stage()
            if self.result.reason is not None:
                return
        self.me.say("finish")
        self.note(stage_seconds=dict(self.me.stages))

    def estimate(self) -> None:
        """Announces how long an iteration and the whole run should take."""
        me = self.me
        me.say("estimate")
        self.iteration_s = choosing.iteration_s(me, self.spec)
        me.say("estimate", self.iteration_s, estimate_s=duration.iterations_s(self.spec, self.iteration_s))
        self.note(estimate={"iteration_ms": self.iteration_s * 1e3})

    def check(self) -> None:
        """The comparison with the reference."""
        if self.spec.replay != "none":  # so that the checked calls are CUDA graph replays, too
            for _ in range(choosing.LEADING):
                timing.iterate(self.work)
            self.work.release()
        self.checked: Compared | None = None
        correctness = Correctness(passed=None, why="check.enabled=false")
        if self.spec.check.enabled:
            self.checked = gate.check(self.me, self.spec, self.work)
            correctness = self.checked.correctness
        self._judge(correctness)
        if self.spec.launch.share_gpu and self.result.reason is None:
            self.add(reason=NOT_TIMED)

    def _judge(self, correctness: Correctness) -> None:
        self.add(correctness=correctness)
        if correctness.passed is False:
            self.add(status="incorrect", reason=correctness.why)

    def time(self) -> None:
        """Samples of the passes, with the clocks and the memory meanwhile. They enter the result only if the outputs of the timed passes
        agree with the checked ones."""
        me, work = self.me, self.work
        work.release()
        used = self._memory() if me.device.type == "cpu" else None
        memory.reset_peak(me.device)
        me.say("timing", self.iteration_s)
        with sampler.sampling(me.device) as sampled:
            measured, samples, self.passes = timing.measure(work, self.iteration_s)
        used, model = used or self._memory(), work.trained()
        if self.checked is not None:
            timed = gate.check_timed(me, work, self.passes, self.checked)
            correctness = replace(self.checked.correctness, timed=timed)
            self._judge(replace(correctness, passed=False, why=timed.why) if timed.passed is False else correctness)
        if self.result.reason is None:
            self.tables.samples, self.ms = samples, {which: x.median for which, x in measured.passes.items()}
            self.add(timing=measured, memory=used, model=model)
            self.note(during=timing.clocks(me, sampled))

    def compute_metrics(self) -> None:
        for exceeded in (False, True):
            rates = ceilings.ceilings(self.me, self.spec.workload.dtype, exceeded)
            counted = metrics.compute(self.spec, self.ms, rates, self.work.transport.pulls)
            if not metrics.exceeds(counted):
                break
        self.note(ceilings=Ceilings(**rates))
        built = [ms for ms in self.me.gather(self.work.mask_build_ms()) if ms is not None]
        self.metrics = replace(counted, mask_build_ms=max(built, default=None))
        self.add(metrics=self.metrics)
        self.measured_s = sum(self.ms[which] for which in self.work.passes) / 1e3

    def measure_energy(self) -> None:
        if self.spec.energy:
            tokens, layers = self.metrics.tokens or 0, self.spec.timing.layers
            flops = metrics.iteration_flops(self.spec) * self.me.world // self.spec.sharing
            timer = timing.Timer(self.passes, Stopwatch(self.me), "energy", self.measured_s * layers)
            self.add(energy=energy.measure(timer, layers, tokens, flops))

    def record_phases(self) -> None:
        if self.spec.phases and not self.spec.is_peer:  # whose phases and bytes are not known
            self.me.say("phases", self.iteration_s)
            runs = duration.phase_runs(self.spec, self.measured_s)
            self.tables.phases, by_pass, comm = phases.measure(self.work, runs)
            self.add(phases=by_pass, comm=comm)

    def profile(self) -> None:
        if self.spec.timing.method == "profiler":
            self.me.say("profiler", self.iteration_s * 10)
            runs, folder = self.spec.timing.profile_runs, self.result.folder
            self.add(profile=profile.profile(self.work, runs, folder, self.tables))

    def compare_with_baseline(self) -> None:
        if self.spec.baseline != "none":
            self.work.release()
            expected_s = duration.baseline_iteration_s(self.spec, max(self.iteration_s, self.measured_s))
            self.add(baseline=baseline.measure(self.me, self.spec, self.metrics, self.ms, expected_s))

    def _memory(self) -> Memory:
        """The peak of an iteration and the inputs, by rank. On a GPU the peak is of the iterations just timed."""
        inputs = sum(x.nbytes for x in self.work.inputs)
        if self.me.device.type == "cuda":
            mine = memory.of_gpu(self.me.device, inputs)
        else:
            mine = memory.of_cpu(timing.sampled_passes(self.work), inputs)
            self.work.release()
        return Memory(by_rank=self.me.gather(mine))
