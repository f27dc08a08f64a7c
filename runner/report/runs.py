"""The runs of a report: a result, and the facts that set it apart from other runs. Loads neither torch nor pandas."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from runner.config.experiment import BEST
from runner.config.rules.attention import setting_label
from runner.config.schema import LEFT_OUT
from runner.config.values import Refusal
from runner.output import columns, reader
from runner.peers import PEERS, everything
from runner.reading import read_yaml
from runner.record.fields import Environment, PassTimes
from runner.record.result import Asked, Result

# the facts of the work itself, in the order by which tables are sorted, and those of the way it was done
WORKLOAD = (
    "gpu", "model", "mode", "dtype", "batch", "heads", "head_dim", "features", "mask", "pack", "q_len", "seq_len", "world_size",
)  # fmt: skip
WAYS = ("asked_kernel", "asked_transport", "replay", "timing")
PASSES = ("forward", "backward", "total")
BACK_TO_BACK = "back_to_back"
Key = TypeVar("Key", bound=Hashable)


_DECLARED: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("facts.yaml"))
FACTS: dict[str, str] = {name: about["title"] for name, about in _DECLARED.items()}  # their titles
PHRASES: dict[str, str] = {name: about["phrase"] for name, about in _DECLARED.items() if "phrase" in about}
NONE_COUNTS = [name for name, about in _DECLARED.items() if "none" in about]


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A result and its facts, which are None where the result does not say them."""

    result: Result
    model: str | None  # None: attention alone
    attention: str | None
    options: dict[str, Any]  # as asked: empty for attention=auto
    world_size: int | None
    batch: int | None
    seq_len: int | None
    q_len: int | None
    heads: str | None
    head_dim: int | None
    features: str | None  # what the call has beyond plain attention
    mask: str | None
    pack: str | None  # in a few words
    dtype: str | None
    mode: str | None
    kernel: str | None  # the one that ran
    transport: str | None
    replay: str | None  # not known before there was the option
    timing: str | None
    gpu: str | None
    took: str | None  # the variant and options that attention=auto took, or the options that were the best
    config: str | None
    asked_kernel: str | None  # may be auto
    asked_transport: str | None

    @staticmethod
    def of(result: Result) -> Run:
        asked, used = result.asked, result.chosen or result.asked
        options, took = _options(result)
        heads = f"{asked.heads}:{asked.kv_heads or asked.heads}" if asked.heads is not None else None
        gpus = (gpu.get("name") for gpu in result.environment.gpus_before)
        variant = everything().get(asked.attention or "")
        same = "attention", "config", "model", "world_size", "batch", "seq_len", "q_len", "head_dim", "dtype", "replay"
        return Run(
            result=result,
            options=options,
            took=took,
            heads=heads,
            features=", ".join(columns.features(columns.row(result), columns.BEYOND)) or None,
            mask=_mask(asked),
            pack=_pack(asked),
            mode=asked.mode or ("forward" if variant and variant.decode else "forward_backward"),
            kernel=None if used.kernel == "auto" else used.kernel,
            transport=None if used.transport in ("none", "auto") or asked.attention in PEERS else used.transport,
            asked_kernel=asked.kernel,
            asked_transport=asked.transport,
            timing=columns.timing_text(asked.timing),
            gpu=result.environment.gpu or next(gpus, None),
            **{key: getattr(asked, key) for key in same},
        )

    @property
    def status(self) -> str:
        return self.result.status

    @property
    def ok(self) -> bool:
        return self.result.timed

    @property
    def external(self) -> bool:
        """Whether it ran an external package."""
        return self.attention in PEERS

    @property
    def environment(self) -> Environment:
        return self.result.environment

    @property
    def passes(self) -> dict[str, PassTimes]:
        return self.result.passes

    @cached_property
    def row(self) -> dict[str, Any]:
        """The columns of the sweep's summary."""
        return columns.row(self.result)

    @cached_property
    def workload(self) -> tuple[Any, ...]:
        return tuple(getattr(self, key) for key in WORKLOAD)

    @property
    def sparsity(self) -> float | None:
        """The share of the pairs that the mask removes from dense attention in its direction; None if a pair counts several times."""
        return self.result.metrics.sparsity_ratio if self.result.metrics else None

    @property
    def dense_ms(self) -> dict[str, float]:
        """The times of dense attention, where that was the run's baseline, by pass."""
        baseline = self.result.baseline
        return baseline.passes if self.ok and baseline and baseline.kind == "dense" else {}

    @property
    def tflops(self) -> float | None:
        """TFLOP/s per device of the last pass."""
        return self.result.last_metrics.tflops_per_device if self.result.last_metrics else None

    @property
    def back_to_back(self) -> float | None:
        """The ms of an iteration among many in a row, measured during the warm-up."""
        return self.result.timing.back_to_back_ms if self.ok and self.result.timing else None

    def times(self, which: str) -> PassTimes | None:
        """The times of a pass; the total of a run without a backward is its forward."""
        return self.passes.get(which) or (self.passes.get("forward") if which == "total" else None)

    def ms(self, which: str) -> float | None:
        """The median of a pass, or the time back to back."""
        if which == BACK_TO_BACK:
            return self.back_to_back
        found = self.times(which)
        return found.median if found and self.ok else None


def _options(result: Result) -> tuple[dict[str, Any], str | None]:
    """The options as asked, and what `auto` or `best` took, which may differ from one workload to the next."""
    if taken := result.taken:
        return {}, " ".join([*taken, "replay=graphs"] if result.replay_taken else taken)
    options = result.asked.options
    best = [name for name, value in result.group("attention").items() if value == BEST and name in options]
    if not result.chosen or not best:
        return options, None
    return options | dict.fromkeys(best, BEST), setting_label(options, best)


def _mask(asked: Asked) -> str | None:
    """The mask in a few words: the one by name, with the parameters that were given, and the band of causal and window
    where it hides anything. It is the same at every length, though open parameters follow from the length."""
    try:
        return columns.mask_text(asked, asked.mask_as_given or asked.named_mask)
    except ValueError:  # for which the run was refused
        return None


def _pack(asked: Asked) -> str | None:
    if not asked.seqlens:
        return None
    lengths = asked.seqlens
    text = lengths if isinstance(lengths, str) else f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)}"
    return text + (", in a new order each time" if asked.timing.new_packs else "")


_NAMED = {fact.name for fact in dataclasses.fields(Run)} - {"result", "options"}


def read(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders and below, in the order of the tables. Files that are no results are named on stderr.
    Raises Refusal where there is no result."""
    folders = list(folders)
    found: dict[Path, Result] = {}
    for folder in folders:
        values, problems = reader.read_results(folder)
        reader.report_problems(problems)
        found |= {value.folder.resolve(): value for value in values if value.folder.resolve() not in found}
    if not found:
        raise Refusal(
            f"{', '.join(map(str, folders))}: no result.json or {reader.PACKED} there or below that can be read; give the folder "
            "of a run, a sweep, or several"
        )
    runs = [Run.of(value) for value in found.values()]
    gpus = {run.gpu for run in runs if run.gpu}
    if len(gpus) == 1:  # a run that was refused early does not name the GPU
        runs = [dataclasses.replace(run, gpu=run.gpu or min(gpus)) for run in runs]
    return in_order(runs)


def latest(runs: Iterable[Run], key: Callable[[Run], Key]) -> dict[Key, Run]:
    """The run of each key that started last."""
    return {key(run): run for run in sorted(runs, key=lambda run: run.environment.started_at)}


def in_order(runs: Iterable[Run]) -> list[Run]:
    """By workload, then our variants in the order of the catalog before external packages, then by world size."""
    names = list(everything())

    def key(run: Run) -> tuple[Any, ...]:
        place = (run.external, names.index(run.attention) if run.attention in names else len(names))
        work = [sortable(getattr(run, name)) for name in WORKLOAD if name != "world_size"]
        ways = [sortable(getattr(run, name)) for name in ("world_size", *WAYS)]
        return (work, place, sorted((k, str(v)) for k, v in run.options.items()), ways, run.result.name)

    return sorted(runs, key=key)


def sortable(value: Any) -> tuple[Any, ...]:
    """A sort key: numbers by size, also within a text such as 32:8, and None first."""
    parts = re.split(r"(\d+)", "" if value is None else str(value))
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def where(runs: Sequence[Run], conditions: Iterable[str]) -> list[Run]:
    """The runs that fulfil every KEY=VALUE,VALUE..., where KEY is an option, a fact or a column of the summary. Raises
    Refusal for a key that no run has, for another form, or when no run is left."""
    kept = list(runs)
    for condition in conditions:
        key, sign, wanted = condition.partition("=")
        known = sorted({*_NAMED, *(k for run in runs for k in run.options), *columns.KEYS})
        if key in LEFT_OUT:
            raise Refusal(f"--where {condition}: {key} {LEFT_OUT[key]}")
        if not sign or key not in known:
            raise Refusal(f"--where {condition}: must be KEY=VALUE with one of these keys: {', '.join(known)}")
        texts = {wanted.lower(), *wanted.lower().split(",")}  # a value may have a comma
        kept = [run for run in kept if str(_value(run, key)).lower() in texts]
    if not kept:
        raise Refusal(f"--where {' '.join(conditions)}: none of the {len(runs)} runs is so")
    return kept


def _value(run: Run, key: str) -> Any:
    if run.options.get(key) is not None:
        return run.options[key]
    fact = getattr(run, key) if key in _NAMED else None
    return run.row.get(key) if fact is None else fact
