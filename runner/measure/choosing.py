"""Choices that a configuration leaves to the run: the variant of `attention=auto`, and options that are `best`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from attention import transports
from attention.auto import AutoRequest, Choice, fastest
from attention.errors import UnsupportedCall
from attention.masks.band import FULL, Band
from attention.variants.registry import AUTO, SHORTLIST
from runner.config.experiment import Experiment
from runner.config.rules.attention import setting_label, settings
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.launch.rank import Rank
from runner.measure import ceilings, memory, metrics
from runner.measure.statistics import Fields
from runner.measure.workload import DTYPES, build
from runner.peers import variant

LEADING = 4  # iterations until CUDA graphs are replayed
TRIAL_RUNS = 3  # iterations of a candidate, if they are long

T = TypeVar("T")


def resolved(me: Rank, spec: Experiment) -> tuple[Experiment, Fields]:
    """The experiment with all choices made, the same on every rank, and the fields of `Chosen` about them. Raises
    UnsupportedHere and InvalidConfig."""
    about: Fields = {}
    if spec.variant == AUTO:
        choice = _choice(me, spec)
        options = variant(choice.variant).parse().plain()
        about |= {
            "variant": choice.variant,
            "options": options,
            "graphs": choice.replay == "graphs" and spec.timing.method != "cudagraph",
            "why": repr(choice),
            "tried_ms": dict(choice.tried_ms),
            "left_out": dict(choice.left_out),
        }
        replay = choice.replay if spec.replay == "auto" else spec.replay
        spec = replace(spec, variant=choice.variant, options=options, replay=replay)
    if spec.best_options:
        spec, about["settings_ms"], about["settings_left_out"] = _best(me, spec)
    if about:
        # the buffers of the other candidates do not count as memory of the chosen one
        transports.release()
        memory.empty_caches(me.device)
        me.say("prepare")
    return spec, about


def together(me: Rank, make: Callable[[], T]) -> T:
    """The result of `make`, which every rank calls. If it refuses on one rank, all ranks raise that error, so that none waits
    for another: UnsupportedHere for a call that cannot be done, InvalidConfig for another ValueError."""
    refusal: ValueError | None = None
    try:
        made = make()
    except (UnsupportedHere, UnsupportedCall) as error:
        refusal = UnsupportedHere(str(error))
    except ValueError as error:
        refusal = InvalidConfig(str(error))
    for reason in me.gather(refusal):
        if reason is not None:
            raise reason
    return made


def _choice(me: Rank, spec: Experiment) -> Choice:
    """The choice of `auto` for the experiment. Raises UnsupportedHere if no candidate runs here."""
    replay = "graphs" if spec.timing.method == "cudagraph" else spec.replay
    _announce(me, spec, len(SHORTLIST))
    asked = replace(spec, replay=replay, options=_sizes(me, spec))
    choice = together(me, lambda: build(asked)).choice
    assert choice is not None
    return choice


def _sizes(me: Rank, spec: Experiment) -> Fields:
    """The experiment's calls as options of `AutoRequest`."""
    work = spec.workload
    alike = ("batch", "heads", "kv_heads", "head_dim", "v_head_dim", "softcap", "causal", "window")
    lengths = {"cu_seqlens": work.cu_seqlens} if work.seqlens else {"tokens": work.seq_len}
    return {name: getattr(work, name) for name in alike} | lengths | {
        "dtype": DTYPES[work.dtype], "backward": spec.backward, "q_tokens": work.q_len, "device": me.device,
    }  # fmt: skip


def _best(me: Rank, spec: Experiment) -> tuple[Experiment, dict[str, float], dict[str, str]]:
    """The experiment with the fastest of the possible settings, each one's milliseconds, and why others were left out. Raises
    UnsupportedHere if none runs."""
    call, mask, names = spec.workload, spec.workload.mask, spec.best_options
    about = call.heads, call.kv_heads, call.cu_seqlens, spec.world_size, mask, call.q_len
    able, left_out = settings(variant(spec.variant), spec.call_options, *about)
    _announce(me, spec, len(able))
    specs = {
        setting_label(setting, names): replace(spec, options={name: setting[name] for name in spec.options})
        for setting in able
    }
    functions = together(me, lambda: {label: build(candidate) for label, candidate in specs.items()})
    band, other = (mask, None) if isinstance(mask, Band) else (FULL, mask)
    # a causal mask is also a window
    trial = AutoRequest(**_sizes(me, spec) | {"causal": False, "window": (band.left, band.right), "mask": other})
    ms, failed = me.agree(fastest(functions, trial))
    left_out |= failed
    if not ms:
        raise UnsupportedHere("; ".join(f"{label}: {why}" for label, why in left_out.items()))
    return specs[next(iter(ms))], ms, left_out


def _announce(me: Rank, spec: Experiment, candidates: int) -> None:
    """Announces trials of so many candidates."""
    me.say("trials", iteration_s(me, spec) * candidates * (LEADING + TRIAL_RUNS))


def iteration_s(me: Rank, spec: Experiment) -> float:
    """Seconds of an iteration, from the rate of a matrix product: kernels and models reach about a third of it. Collective."""
    rate = ceilings.ceilings(me, spec.workload.dtype)["matmul_tflops"] * 1e12
    return 3 * metrics.iteration_flops(spec) / spec.sharing / rate
