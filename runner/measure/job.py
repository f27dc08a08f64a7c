"""One run within a world: inputs, the correctness gate, timing, the single-device baseline, phases, profile, memory.
Runs on every rank; rank 0's return value is the run's result."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention import transports
from attention.autotune import machine as automatic
from attention.autotune.choice import AUTO, Choice, Task
from attention.autotune.hardware import ceilings as choose_ceilings
from attention.autotune.trials import Tried, fastest
from attention.geometry import counts
from attention.geometry.options import BEST
from attention.geometry.schedules import masks
from attention.kernels import Shape, passed_over
from attention.profiling import Recorder, recording
from attention.variants.base import setting_label
from attention.variants.external import External
from attention.variants.registry import variant
from runner import environment
from runner.config.experiment import NEW_PACKS, Experiment, Timing
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.launch.rank import Rank, memory_limit
from runner.launch.rank import is_out_of_memory as _oom
from runner.measure import ceilings, memory, metrics, phases, profile, sampler, timing
from runner.measure.correctness import Checked, check, check_timed
from runner.measure.statistics import Samples, of_ranks, overhead, slowest, summarize
from runner.measure.timing import CpuStopwatch, CudaStopwatch, Stopwatch
from runner.measure.workload import DTYPES, AttentionWork, Layers, build, decide, other_orders

PHASE_RUNS = 15  # at most; a slow run records fewer
PHASES_S = 0.2
SLOW_S = 1.0  # an iteration from which waiting for it costs its timing nothing
LEADING = 4  # iterations before what is checked, of passes that are captured or recorded first
TRIAL_RUNS = 3  # of a long iteration, by each candidate of attention.trials
NOT_TIMED = "not timed: launch.share_gpu=true has all ranks on one GPU"
L2_BYTES = 256 << 20
DO_BENCH_TURNS = 5  # of ours, between six of do_bench's

_baselines: dict[Any, dict[str, Any]] = {}  # of rank 0; a sweep over variants needs one
_rates: dict[Any, float] = {}


def run(me: Rank, experiment: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """`folder` is the run's, for the traces. Returns status ok or incorrect with everything measured."""
    spec = Experiment.from_plain(experiment)
    me.fault = spec.launch.fault
    gc.freeze()  # modules and caches: the collections around what is timed need not look through them, 0.1 s each
    with memory_limit(me, spec.launch.memory_limit_gb):
        try:
            return _run(me, spec, Path(folder) if folder else None)
        finally:
            transports.release()
            memory.empty_caches(me.device)


def _run(me: Rank, spec: Experiment, folder: Path | None) -> dict[str, Any]:
    result: dict[str, Any] = {"status": "ok", "environment": environment.of_torch(spec.device)}
    me.say("prepare")
    choice: Choice | None = None
    if spec.variant == AUTO:
        choice = _choice(me, spec)
        spec = _decided(spec, choice)
        result["experiment"] = spec.plain()
        me.say("prepare")
    tried: Tried | None = None
    if BEST in spec.options.values():
        spec, tried = _best(me, spec)
        result["experiment"] = spec.plain()
        me.say("prepare")
    work = _together(me, lambda: AttentionWork(me, spec, build(spec)))
    if work.plan.options.plain() != spec.options:  # some were left open
        spec = replace(spec, options=work.plan.options.plain())
        result["experiment"] = spec.plain()
    transport = work.plan.transport
    result["chosen"] = {"kernel": work.plan.kernel.name, "transport": transport.name, "note": transport.note}
    result["chosen"] |= choice.plain() if choice else {}
    if tried is not None:
        result["chosen"] |= {"settings_ms": tried.ms, "settings_left_out": tried.left_out}
    package = work.fn.variant if isinstance(work.fn.variant, External) else None
    if package is not None:
        result["chosen"]["note"] = package.served(work.plan.kernel.name)
    elif spec.kernel == "auto":
        result["chosen"]["passed_over"] = _passed_over(work)
    iteration_s = _estimate(me, spec, work)
    result["estimate"] = {"iteration_ms": iteration_s * 1e3}
    if spec.replay != "none":  # so that what follows is replayed, the checked passes too
        for which in work.passes * LEADING:
            work.run(which)
        work.release()
    checked: Checked | None = None
    if spec.check.enabled:
        checked = check(me, spec, work)
        result["correctness"] = checked.found
        if not checked.found["passed"]:
            return result | {"status": "incorrect", "reason": checked.found["why"]}
    else:
        result["correctness"] = {"passed": None, "why": "check.enabled=false"}
    if spec.launch.share_gpu:
        return result | {"reason": NOT_TIMED}
    limits = ceilings.ceilings(me, spec.workload.dtype)
    result["ceilings"] = limits
    watch: Stopwatch = _watch(me, me.world > 1)
    work.release()
    used = _memory(me, spec, work) if me.device.type == "cpu" else None
    memory.reset_peak(me.device)
    me.say("timing", iteration_s)
    with sampler.sampling(me.device.type, os.environ.get("LOCAL_RANK", "0") == "0") as sampled:
        measured, passes = _time(me, spec, work, watch, iteration_s)
    measured["memory"] = used or _memory(me, spec, work)
    if checked:
        checked.found["timed"] = again = check_timed(me, spec, work, passes, checked.kept)
        if again["passed"] is False:
            checked.found |= {"passed": False, "why": again["why"]}
            return result | {"status": "incorrect", "reason": again["why"]}
    result |= measured
    if spec.timing.do_bench:  # after the check: it leaves other results behind than the last timed iteration
        turn = partial(me.say, "timing", iteration_s)
        result["timing"]["do_bench"] = _do_bench(work, _watch(me, False), _flush(me, spec), turn)
    result["environment"]["during"] = _during(me, sampled)
    timed = result["timing"]["passes"]
    medians = {which: s["median"] for which, s in timed.items()}
    found = metrics.compute(spec, medians, limits, transport.pulls)
    if metrics.exceeds(found):
        limits = result["ceilings"] = ceilings.again(me, spec.workload.dtype)
        found = metrics.compute(spec, medians, limits, transport.pulls)
    result["metrics"] = metrics.without_exceeded(found)
    measured_s = sum(medians[which] for which in work.passes) / 1e3
    if spec.phases and package is None:  # its phases and bytes are its own affair
        me.say("phases", iteration_s)
        rows, received = _phases(me, work, _watch(me, me.world > 1), _phase_runs(measured_s))
        result["phase_rows"] = rows
        result["phases"] = phases.summarize(rows, me.world)
        result["comm"] = {
            "transport": transport.name,
            "bytes_received_by_rank": received,
            "bandwidth": phases.bandwidths(rows, received),
        }
    if spec.timing.method == "profiler":
        me.say("profiler", iteration_s * 10)
        mine, files = profile.profile(me, work, _watch(me, me.world > 1), spec.timing.profile_runs, folder)
        everyone = me.gather((mine, files))
        result["profile"] = [p for p, _ in everyone]
        result["traces"] = [name for _, names in everyone for name in names]
    if spec.baseline == "single":
        work.release()
        result["baseline"] = _baseline(me, spec, result["metrics"], max(iteration_s, measured_s) * me.world)
    me.say("finish")
    result["environment"]["stage_seconds"] = dict(me.stages)
    return result


def _choice(me: Rank, spec: Experiment) -> Choice:
    """What auto takes, the same on every rank; by this machine's own ceilings where its GPU is in no table."""
    measured = None
    if spec.launch.nodes > 1 or not automatic.known(me.device):
        measured = choose_ceilings(ceilings.ceilings(me, spec.workload.dtype), spec.device)
    trials = spec.options["trials"]
    by_model = replace(spec, options={**spec.options, "trials": None})
    choice: Choice = me.agree(_together(me, lambda: decide(by_model, me.device, measured)))
    if trials is None:
        return choice
    me.say("trials", choice.best.ms / 1e3 * (TRIAL_RUNS * trials))
    choice = me.agree(_together(me, lambda: decide(spec, me.device, measured)))
    transports.release()  # so that what others exchanged through is not counted as what the chosen one holds
    memory.empty_caches(me.device)
    return choice


def _decided(spec: Experiment, choice: Choice) -> Experiment:
    """The experiment with the variant that auto took."""
    best = choice.best
    transport = best.transport if spec.world_size > 1 else spec.transport
    options = best.candidate.options.plain()
    replay = "graphs" if best.graphs else "launches" if spec.replay == "auto" else spec.replay
    return replace(spec, variant=best.candidate.variant, options=options, transport=transport, replay=replay)


def _best(me: Rank, spec: Experiment) -> tuple[Experiment, Tried]:
    """The experiment with the fastest of the settings in question, on every rank the same, and what was tried. Raises
    UnsupportedHere where none can be run."""
    work, chosen = spec.workload, variant(spec.variant)
    about = work.heads, work.kv_heads, work.cu_seqlens, spec.world_size, work.mask, work.q_len
    settings, left_out = chosen.settings(spec.options, *about)
    names = [name for name, value in spec.options.items() if value == BEST]
    shapes, backward = spec.workload.shapes, spec.mode == "forward_backward"
    each_s = _rough_s(me, spec, max(counts.rank_flops(chosen.problem(*about[2:5], settings[0], work.q_len), shapes)))
    me.say("trials", each_s * len(settings) * (LEADING + TRIAL_RUNS))
    specs = {setting_label(setting, names): replace(spec, options=setting) for setting in settings}
    functions = _together(me, lambda: {label: build(each) for label, each in specs.items()})
    task = Task(work.cu_seqlens, me.world, work.mask, shapes, bool(work.seqlens), backward, work.q_len)
    found = fastest(functions, task, device=me.device, dtype=DTYPES[work.dtype])
    found = me.agree(Tried(found.ms, left_out | found.left_out))
    if not found.ms:
        raise UnsupportedHere("; ".join(f"{label}: {why}" for label, why in found.left_out.items()))
    transports.release()  # so that what others exchanged through is not counted as what the chosen one holds
    memory.empty_caches(me.device)
    return specs[next(iter(found.ms))], found


def _rough_s(me: Rank, spec: Experiment, forward_flops: float) -> float:
    """Seconds of an iteration, by the matrix product's rate, of which a kernel does a third at least."""
    flops = forward_flops * (1 + counts.BACKWARD if spec.mode == "forward_backward" else 1)
    return 3 * flops / ceilings.ceilings(me, spec.workload.dtype)["matmul_tflops"] / 1e12


def _together(me: Rank, make: Any) -> Any:
    """What every rank does alike, before any of them waits for another: a refusal of one is a refusal of all."""
    refusal: tuple[str, str] | None = None
    made = None
    try:
        made = make()
    except UnsupportedHere as error:
        refusal = ("unsupported", str(error))
    except ValueError as error:
        refusal = ("invalid", str(error))
    first = next((r for r in me.gather(refusal) if r is not None), None)
    if first is not None:
        raise (UnsupportedHere if first[0] == "unsupported" else InvalidConfig)(first[1])
    return made


def _watch(me: Rank, together: bool, lead_ms: float = 0.0) -> Stopwatch:
    if me.device.type == "cuda":
        return CudaStopwatch(me.device, together, lead_ms)
    return CpuStopwatch(me.control if together else None)


def _estimate(me: Rank, spec: Experiment, work: AttentionWork) -> float:
    """Seconds an iteration should take, from the rate of a small call of the same kernel; said before it begins."""
    me.say("estimate")
    w = spec.workload
    key = (work.plan.kernel.name, w.dtype, w.head_dim, me.device.type)
    if key not in _rates:
        from attention.kernels import Call

        n = min(w.seq_len, 4096 if me.device.type == "cuda" else 512)
        heads = min(w.heads, 8)
        q = torch.randn(1, n, heads, w.head_dim, device=me.device).to(work.q.dtype)
        call = Call(w.head_dim**-0.5)
        seconds = []
        for _ in range(3):
            me.synchronize()
            start = time.perf_counter()
            work.plan.kernel.forward(q, q, q, call)
            me.synchronize()
            seconds.append(time.perf_counter() - start)
        _rates[key] = 4 * n * n * heads * w.head_dim / min(seconds)
    shapes = spec.workload.shapes
    needed = max(counts.rank_flops(work.plan.problem, shapes)) * (1 + counts.BACKWARD if work.backward else 1)
    seconds_each = me.agree(max(me.gather(needed / _rates[key])))
    timed = (spec.timing.timing_runs + spec.timing.warmup_runs + 1) * spec.timing.layers + (
        _phase_runs(seconds_each) + timing.LEADING_RUNS if spec.phases else 0
    )
    if spec.timing.method == "profiler":
        timed += timing.LEADING_RUNS + spec.timing.profile_runs
    single_each = seconds_each * me.world
    single = (
        single_each * (1 + timing.baseline_runs(spec.timing.timing_runs, single_each))
        if spec.baseline == "single"
        else 0.0
    )
    total = timed * seconds_each + single
    me.say("estimate", seconds_each, estimate_s=total)
    return seconds_each


def _time(
    me: Rank, spec: Experiment, work: AttentionWork, watch: Stopwatch, iteration_s: float
) -> tuple[dict[str, Any], timing.Passes]:
    """What was measured, and what a sample was of."""
    options = spec.timing
    method = options.method
    piece: timing.Passes = work
    note: dict[str, Any] = {}

    layers = options.layers
    if method == "cudagraph":
        piece, watch = timing.Graphed(work), _watch(me, me.world > 1, timing.LEAD_MS)
    else:
        piece = _sampled(spec, work)
        iteration_s *= layers
    flush = _flush(me, spec)
    beat = _beat(me, "timing", watch, iteration_s)
    if method == "simple":
        me.say("timing", iteration_s * options.timing_runs)  # all in one stretch
        mine = timing.simple(work, watch, options.timing_runs)
    else:

        def decide(so_far: Samples, seconds: float) -> bool | None:
            slow = slowest(me.gather(so_far))
            verdict = timing.verdict(slow, options.timing_runs, options.precision, seconds, options.time_cap_s)
            return me.agree(verdict)

        me.say("timing", _silent_s(me, iteration_s, options.warmup_runs))
        with timing.undisturbed():
            warmed = timing.warm(piece, watch, options.warmup_runs, options.warmup_ms, me.agree, beat)
            me.say("timing", _silent_s(me, iteration_s, timing.WINDOW))
            each_ms, cap_ms = warmed.back_to_back_ms, _settle_ms(options)
            settling = timing.settle(piece, watch, cap_ms, each_ms, me.gather, me.agree, flush, beat)
            me.say("timing", _silent_s(me, iteration_s, options.timing_runs))
            if method == "adaptive":
                mine, note["precision_met"] = timing.adaptive(piece, watch, options.timing_runs, decide, flush, beat)
            else:
                mine = timing.sample(piece, watch, options.timing_runs, flush, beat)
        note["warmup_iterations"] = warmed.iterations + settling.iterations
        note["warmup_settled"] = settling.settled
        each = [ms / layers for ms in me.gather(warmed.back_to_back_ms) if ms is not None]
        note["back_to_back_ms"] = max(each, default=None)
    by_rank = me.gather({which: [ms / layers for ms in found] for which, found in mine.items()})
    found = of_ranks(by_rank)
    empty_ms = timing.overhead_ms(watch) / layers
    found = {
        "samples": by_rank,
        "timing": {
            "method": method,
            "unit": "ms",
            **found,
            **overhead(empty_ms, found["passes"]),
            "flush_l2": options.flush_l2,
            "layers": layers,
            "new_packs": options.new_packs,
            "do_bench": None,
            **note,
        },
    }
    return found, piece


def _during(me: Rank, sampled: dict[str, Any]) -> dict[str, Any]:
    """What each node's sampler found, of the GPUs that the ranks are on."""
    used = None if me.device.type == "cpu" else set(me.gather(environment.gpu_uuid(me.device)))
    nodes = [node for node in me.gather(sampled) if node]
    return {
        "period_ms": next((node["period_ms"] for node in nodes if "period_ms" in node), None),
        "unavailable": next((node["unavailable"] for node in nodes if "unavailable" in node), None),
        "by_device": [
            {"device": name, **entry}
            for node in nodes
            for name, entry in node.get("of", {}).items()
            if used is None or name in used
        ],
    }


def _settle_ms(options: Timing) -> float:
    """How long a warm-up may go on until it settles; not at all where none is wanted."""
    return options.settle_ms if options.warmup_runs or options.warmup_ms else 0.0


def _sampled(spec: Experiment, work: AttentionWork) -> timing.Passes:
    """What a sample is of: the work's passes, or those of several layers."""
    layers, new = spec.timing.layers, spec.timing.new_packs
    if layers == 1 and not new:
        return work
    lengths = spec.workload.seqlens
    assert lengths or not new, "new packs of a work that is none"
    return Layers(work, layers, other_orders(lengths, NEW_PACKS, spec.seed) if lengths and new else ())


def _beat(me: Rank, phase: str, watch: Stopwatch, iteration_s: float) -> Callable[[], None]:
    """What is called after each iteration, to announce the next one."""

    def beat() -> None:
        if me.device.type == "cuda":  # whose host runs ahead: of slow iterations it waits for each
            if iteration_s < SLOW_S:
                return
            watch.settle()
        me.say(phase, iteration_s)

    return beat


def _silent_s(me: Rank, iteration_s: float, runs: int) -> float:
    """How long a stretch of so many iterations says nothing: all of it on a GPU whose host runs ahead."""
    return iteration_s * max(1, runs) if me.device.type == "cuda" and iteration_s < SLOW_S else iteration_s


def _flush(me: Rank, spec: Experiment) -> torch.Tensor | None:
    """What is written before each pass to empty the L2 cache, if that is wanted: as triton's do_bench does it, since a GPU at
    its power limit is the faster the longer it rests between passes, and single bytes take longer to write."""
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device=me.device) if spec.timing.flush_l2 else None


class _OnePass:
    """A pass by itself, over and over, as do_bench runs it."""

    def __init__(self, work: AttentionWork, which: str):
        self.passes: tuple[str, ...] = (which,)
        self.call = work.again if which == "backward" else lambda: work.run(which)

    def run(self, which: str) -> None:
        self.call()

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            self.call()


def _do_bench(
    work: AttentionWork, watch: Stopwatch, flush: torch.Tensor | None, turn: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Each pass by triton.testing.do_bench and by our sampling under the same conditions, medians in ms: that pass alone, by
    turns, the same L2 flush, and as long a warm-up without one and without a pause behind it, since a GPU at its power limit
    clocks by what it did just before. `ratio` is the median over our turns, each against do_bench's turns before and behind
    it, as clocks drift. The headline interleaves forward and backward, as training does, at other clocks. `turn` is called
    before each."""
    from triton.testing import do_bench

    found = {}
    for which in work.passes:
        work.run("forward")
        alone = _OnePass(work, which)

        def do_bench_ms(alone: _OnePass = alone) -> float:
            turn()
            with timing.undisturbed():
                return do_bench(alone.call, warmup=500, rep=500, return_mode="median")

        def ours_ms(runs: int, alone: _OnePass = alone, which: str = which) -> float:
            turn()
            with timing.undisturbed():
                alone.repeat(which, runs)
                return summarize(timing.sample(alone, watch, runs, flush)[which]).median

        theirs, ours = [do_bench_ms()], []
        runs = max(10, int(500 / theirs[0]))
        for _ in range(DO_BENCH_TURNS):
            ours.append(ours_ms(runs))
            theirs.append(do_bench_ms())
        by_turn = [2 * x / (a + b) for x, a, b in zip(ours, theirs, theirs[1:], strict=False)]
        found[which] = {
            "do_bench_ms": summarize(theirs).median,
            "ours_ms": summarize(ours).median,
            "ratio": summarize(by_turn).median,
            "do_bench_turns_ms": theirs,
            "ours_turns_ms": ours,
        }
    work.release()
    return found


def _passed_over(work: AttentionWork) -> dict[str, str]:
    """Of the kernels that kernel=auto would rather have taken, why it did not."""
    shape = Shape.of(work.q, work.k, work.backward)
    return passed_over(work.plan.kernel.name, shape, masks(work.plan.problem), work.fn.variant.decode)


def _phase_runs(iteration_s: float) -> int:
    return max(1, min(PHASE_RUNS, int(PHASES_S / iteration_s)))


class _Counted:
    """A workpiece, with the bytes that the transport really moved into this rank in each pass, as last run. Where passes are
    replayed or played nothing is counted, so they are not: phases must be recorded meanwhile."""

    def __init__(self, work: AttentionWork):
        self.work, self.passes = work, work.passes
        self.received: dict[str, dict[str, int]] = {}

    def run(self, which: str) -> None:
        counter = self.work.plan.transport.bytes_received
        counter.clear()
        self.work.run(which)
        self.received[which] = dict(counter)

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            self.run(which)


def _phases(
    me: Rank, work: AttentionWork, watch: Stopwatch, runs: int
) -> tuple[list[dict[str, Any]], list[dict[str, dict[str, int]]]]:
    """A pass of its own with the recorder active: all ranks' rows, and by rank the bytes received in each pass."""
    recorder = Recorder(me.device)
    counted = _Counted(work)
    leads = timing.leads_ms(counted, watch, lambda: recording(recorder))
    recorder.spans.clear()
    with recording(recorder):
        passes = timing.record(counted, watch, runs, recorder, leads)
    work.release()
    rows = []
    for number, each in enumerate(passes):
        here = {"iteration": number // len(work.passes), "rank": me.rank, "pass": each.which}
        rows.append({**here, "phase": "pass", "step": -1, "ms": watch.elapsed(each.start, each.stop)})
        lengths = phases.shares([(s.name, *s.since(each.start)) for s in each.spans])
        rows += [{**here, "phase": s.name, "step": s.step, "ms": ms} for s, ms in zip(each.spans, lengths, strict=True)]
    everyone = me.gather((rows, counted.received))
    return [row for mine, _ in everyone for row in mine], [received for _, received in everyone]


def _baseline(me: Rank, spec: Experiment, measured: dict[str, Any], single_s: float) -> dict[str, Any]:
    """The same global work on one device, by rank 0 alone while the others wait. Where it does not fit, at half the
    length (and so on), extrapolated by FLOPs and marked so. `single_s`: seconds that an iteration on one device should
    take."""
    key = (
        spec.workload, spec.kernel, spec.mode, spec.device, me.world, spec.deterministic,
        spec.timing.flush_l2, spec.timing.autograd_thread, spec.timing.layers, spec.timing.new_packs,
    )  # fmt: skip
    me.say("baseline", single_s, waiting=me.rank != 0)
    if spec.device == "cuda":
        torch.cuda.empty_cache()
    if me.rank == 0 and key not in _baselines:
        _baselines[key] = _single(me, spec, single_s)
    me.say("baseline", waiting=True)
    found = me.agree(_baselines.get(key))
    result = dict(found)
    if "passes" in result:
        ours = {which: measured["tokens"] / entry["tokens_per_s"] * 1e3 for which, entry in measured["passes"].items()}
        result |= metrics.speedup(result["passes"], ours, me.world)
    return result


def _single(me: Rank, spec: Experiment, single_s: float) -> dict[str, Any]:
    decode = spec.workload.q_len is not None
    alone = replace(spec, variant="tree" if decode else "dense", options={}, world_size=1)
    whole = metrics.flops(spec)
    work_length = spec.workload.seq_len
    while True:
        here = replace(alone, workload=replace(alone.workload, seq_len=work_length))
        try:
            medians, runs, kernel = _single_medians(me, here, single_s)
            break
        except (UnsupportedHere, ValueError) as error:
            return {"unsupported": str(error)}
        except (RuntimeError, MemoryError) as error:
            if not _oom(error) or work_length < 2048:
                raise
            memory.empty_caches(me.device)
            work_length //= 2
        if spec.workload.seqlens:
            return {"unsupported": "the pack does not fit one device"}
    scale = 1.0
    if work_length != spec.workload.seq_len:
        scale = whole["forward"] / metrics.flops(here)["forward"]
    return {
        "kernel": kernel,
        "passes": {which: ms * scale for which, ms in medians.items()},
        "samples": runs,
        "extrapolated": scale != 1.0,
        "measured_seq_len": work_length,
    }


def _single_medians(me: Rank, spec: Experiment, single_s: float) -> tuple[dict[str, float], int, str]:
    from attention.api import ContextParallel

    chosen = variant(spec.variant)
    fn = ContextParallel(chosen, None, spec.kernel, "auto", spec.deterministic, chosen.parse())
    fn.world, fn.rank = 1, 0
    work = AttentionWork(me, spec, fn)
    watch = _watch(me, False)
    flush = _flush(me, spec)
    piece, layers = _sampled(spec, work), spec.timing.layers
    single_s *= layers
    beat = _beat(me, "baseline", watch, single_s)
    beat()
    with timing.undisturbed():
        once = _seconds_each(piece, watch, 0.0, beat)
        if once < timing.BASELINE_CAP_S:  # the first may have compiled and allocated
            once = _seconds_each(piece, watch, spec.timing.warmup_ms, beat)
            cap_ms = _settle_ms(spec.timing)
            me.say("baseline", _silent_s(me, max(once, single_s), timing.WINDOW))
            timing.settle(piece, watch, cap_ms, once * 1e3, lambda mine: [mine], lambda more: more, flush, beat)
        runs = timing.baseline_runs(spec.timing.timing_runs, once)
        me.say("baseline", _silent_s(me, max(once, single_s), runs))
        samples = slowest([timing.sample(piece, watch, runs, flush, beat)])
    return {which: summarize(ms).median / layers for which, ms in samples.items()}, runs, work.plan.kernel.name


def _seconds_each(work: timing.Passes, watch: Stopwatch, at_least_ms: float, beat: Callable[[], None]) -> float:
    """Of an iteration, in a warm-up of so long and one at least."""
    start = time.perf_counter()
    done = timing.warm(work, watch, 1, at_least_ms, lambda more: more, beat).iterations
    return (time.perf_counter() - start) / done


def _memory(me: Rank, spec: Experiment, work: AttentionWork) -> dict[str, Any]:
    """Peak of an iteration on each rank, in bytes, beside what the inputs alone take. On a GPU of those just timed."""
    inputs = memory.tensor_bytes(work.inputs)
    if me.device.type == "cuda":
        mine = memory.of_gpu(me.device)
    else:
        mine = memory.of_cpu(_sampled(spec, work), inputs)
        work.release()
    return {"by_rank": me.gather(mine | {"inputs": inputs})}
