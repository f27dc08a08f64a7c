"""Choices that a configuration leaves to the run: the variant of `attention=auto`, and options that are `best`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from attention import transports
from attention.autotune import machine as automatic
from attention.autotune.choice import AUTO, Choice, Task
from attention.autotune.hardware import ceilings as choose_ceilings
from attention.autotune.trials import Tried, fastest
from attention.geometry import counts
from attention.masks.band import FULL, Band
from attention.variants.base import setting_label
from runner.config.experiment import Experiment
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.launch.rank import Rank
from runner.measure import ceilings, memory
from runner.measure.attention_work import DTYPES, build, decide
from runner.peers import variant

LEADING = 4  # iterations until CUDA graphs are replayed
TRIAL_RUNS = 3  # iterations of a candidate, if they are long

T = TypeVar("T")


def resolved(me: Rank, spec: Experiment) -> tuple[Experiment, dict[str, Any]]:
    """The experiment with all choices made, the same on every rank, and the result's fields about them. Raises
    UnsupportedHere and InvalidConfig."""
    about: dict[str, Any] = {}
    if spec.variant == AUTO:
        choice = _choice(me, spec)
        about |= choice.plain()
        best = choice.best
        spec = replace(
            spec,
            variant=best.candidate.variant,
            options=best.candidate.options.plain(),
            transport=best.transport if spec.world_size > 1 else spec.transport,
            replay="graphs" if best.graphs else "none",
        )
        me.say("prepare")
    if spec.best_options:
        spec, tried = _best(me, spec)
        about |= {"settings_ms": tried.ms, "settings_left_out": tried.left_out}
        me.say("prepare")
    return spec, about


def together(me: Rank, make: Callable[[], T]) -> T:
    """The result of `make`, which every rank calls. If it refuses on one rank, all ranks raise that error, so that none waits
    for another: UnsupportedHere, or InvalidConfig for another ValueError."""
    refusal: ValueError | None = None
    try:
        made = make()
    except ValueError as error:
        refusal = (UnsupportedHere if isinstance(error, UnsupportedHere) else InvalidConfig)(str(error))
    for each in me.gather(refusal):
        if each is not None:
            raise each
    return made


def _choice(me: Rank, spec: Experiment) -> Choice:
    """The choice of `auto`, by this machine's measured ceilings if no table has its GPU."""
    measured = None
    if spec.launch.nodes > 1 or not automatic.known(me.device):
        measured = choose_ceilings(ceilings.ceilings(me, spec.workload.dtype), spec.device)
    trials = spec.options["trials"]
    by_model = replace(spec, options={**spec.options, "trials": None})
    choice: Choice = me.agree(together(me, lambda: decide(by_model, me.device, measured)))
    if trials is None:
        return choice
    me.say("trials", choice.best.ms / 1e3 * (TRIAL_RUNS * trials))
    choice = me.agree(together(me, lambda: decide(spec, me.device, measured)))
    _forget_trials(me)
    return choice


def _best(me: Rank, spec: Experiment) -> tuple[Experiment, Tried]:
    """The experiment with the fastest of the possible settings, and the trials. Raises UnsupportedHere if none runs."""
    call, chosen = spec.workload, variant(spec.variant)
    about = call.heads, call.kv_heads, call.cu_seqlens, spec.world_size, call.mask, call.q_len
    settings, left_out = chosen.settings(spec.call_options, *about)
    names = spec.best_options
    problem = chosen.problem(*about[2:5], settings[0], call.q_len)
    each_s = _rough_s(me, spec, max(counts.rank_flops(problem, call.shapes)))
    me.say("trials", each_s * len(settings) * (LEADING + TRIAL_RUNS))
    specs = {
        setting_label(setting, names): replace(spec, options={name: setting[name] for name in spec.options})
        for setting in settings
    }
    functions = together(me, lambda: {label: build(each) for label, each in specs.items()})
    band, other = (call.mask, None) if isinstance(call.mask, Band) else (FULL, call.mask)
    packed, softcap = bool(call.seqlens), call.softcap
    task = Task(call.cu_seqlens, me.world, band, call.shapes, packed, spec.backward, call.q_len, other, softcap)
    found = fastest(functions, task, device=me.device, dtype=DTYPES[call.dtype])
    found = me.agree(Tried(found.ms, left_out | found.left_out))
    if not found.ms:
        raise UnsupportedHere("; ".join(f"{label}: {why}" for label, why in found.left_out.items()))
    _forget_trials(me)
    return specs[next(iter(found.ms))], found


def _forget_trials(me: Rank) -> None:
    """Frees the buffers of the other candidates, so that they do not count as memory of the chosen one."""
    transports.release()
    memory.empty_caches(me.device)


def _rough_s(me: Rank, spec: Experiment, forward_flops: float) -> float:
    """Seconds of an iteration, from the rate of a matrix product: kernels reach at least a third of it."""
    flops = forward_flops * (1 + spec.workload.shapes.backward_ratio if spec.backward else 1)
    return 3 * flops / ceilings.ceilings(me, spec.workload.dtype)["matmul_tflops"] / 1e12
