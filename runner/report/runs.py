"""What a report says of a run: what was asked, what was measured, and which runs may be compared. No torch, no pandas."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attention.external import PEERS
from attention.masks.band import Mask
from attention.variants.registry import BEST, everything, setting_label
from runner.output import record, results
from runner.output.record import Environment, Method, PassTimes, Result

# what may differ between runs, by the title of its column
FACTS = {
    "attention": "attention", "options": "options", "world_size": "W", "batch": "batch", "seq_len": "S", "q_len": "queries",
    "heads": "heads", "head_dim": "D", "mask": "mask", "pack": "pack", "dtype": "dtype", "kernel": "kernel",
    "transport": "transport", "graphs": "graphs", "timing": "timing", "mode": "mode", "gpu": "GPU",
}  # fmt: skip
# of those, the work itself; the others are a way to do it
WORKLOAD = ("gpu", "mode", "dtype", "batch", "heads", "head_dim", "mask", "pack", "q_len", "seq_len", "world_size")
BACK_TO_BACK = "back_to_back"
MADE = ("asked_kernel", "asked_transport", "graphs", "timing")


@dataclass(frozen=True, eq=False)
class Run:
    """One result. `facts` are what was asked and chosen, None where the result does not say; `row` is its row of the
    sweep's summary, from which all numbers come."""

    folder: Path
    row: dict[str, Any]
    facts: dict[str, Any]
    options: dict[str, Any]
    result: Result = field(repr=False)

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok" and self.row["forward_ms"] is not None

    @property
    def peer(self) -> bool:
        return self.facts["attention"] in PEERS

    @property
    def environment(self) -> Environment:
        return self.result.environment

    @cached_property
    def passes(self) -> dict[str, PassTimes]:
        """The summary of each pass's samples."""
        return self.result.timing.passes if self.result.timing else {}

    @cached_property
    def work(self) -> tuple[Any, ...]:
        return tuple(self.facts[key] for key in WORKLOAD)

    @property
    def back_to_back(self) -> float | None:
        """The ms of an iteration among many in a row, as the warm-up has them."""
        found: float | None = self.row["back_to_back_ms"]
        return found if self.ok else None

    def ms(self, which: str) -> float | None:
        """The median of a pass, or "back_to_back"; the total of a run that has a forward only is its forward."""
        if which == BACK_TO_BACK:
            return self.back_to_back
        found = self.passes.get(which) or (self.passes.get("forward") if which == "total" else None)
        return found.median if found and self.ok else None


def read(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders and all below, packed or not, in the order of the tables; files that are no results are named
    on stderr. Raises ValueError where there is none."""
    folders = list(folders)
    found: dict[Path, Result] = {}
    for folder in folders:
        values, problems = record.read_results(folder)
        record.name_problems(problems)
        found |= {value.folder.resolve(): value for value in values if value.folder.resolve() not in found}
    runs = [_run(value) for value in found.values()]
    if not runs:
        said = ", ".join(str(folder) for folder in folders)
        raise ValueError(
            f"{said}: no result.json or {record.PACKED} there or below that can be read; give the folder of a run, a sweep, or several"
        )
    gpus = {run.facts["gpu"] for run in runs} - {None}
    for run in runs:  # a run that was refused at once did not look
        run.facts["gpu"] = run.facts["gpu"] or (next(iter(gpus)) if len(gpus) == 1 else None)
    return in_order(runs)


def _run(value: Result) -> Run:
    row, config, experiment = results.row(value), value.config, value.experiment
    # of a refused run the row has what is of the right type
    work: dict[str, Any] = vars(experiment.workload) if experiment else {**row, **_shape(config)}
    options = experiment.options if experiment else {k: v for k, v in value.group("attention").items() if k != "name"}
    timing = experiment.timing if experiment else _method(value.group("timing"))
    world = experiment.world_size if experiment else row["world_size"]
    if config.get("world_size") == "auto" and world is None and (named := re.search(r"_w(\d+)_", value.name)):
        world = int(named[1])  # a refused run's name has the ranks that auto stands for
    heads, kv_heads = work.get("heads"), work.get("kv_heads") or work.get("heads")
    # the configuration: in the experiment attention=auto has put what it took
    asked = {
        key: results.text(value.group(key).get("name")) or (getattr(experiment, key) if experiment else None)
        for key in ("kernel", "transport")
    }
    kernel = value.chosen.kernel if value.chosen else asked["kernel"]
    transport = value.chosen.transport if value.chosen else asked["transport"]
    took = None
    if value.chosen and value.chosen.variant is not None:  # by attention=auto, which may take another in each workload
        took = " ".join([value.chosen.variant, *(f"{k}={v}" for k, v in options.items() if v is not None)])
        if config.get("graphs") == "auto" and value.chosen.graphs:
            took += " graphs=true"
        options = {}
    best = [name for name, asked_for in value.group("attention").items() if asked_for == BEST and name in options]
    if value.chosen and best:  # which may be another in each workload
        took = setting_label(options, best)
        options = options | dict.fromkeys(best, BEST)
    facts = {
        "attention": row["attention"],
        "config": row["config"],
        "world_size": world,
        "gpu": _gpu(value.environment),
        "batch": work.get("batch"),
        "seq_len": work.get("seq_len"),
        "q_len": work.get("q_len"),
        "heads": f"{heads}:{kv_heads}" if heads is not None else None,
        "head_dim": work.get("head_dim"),
        "mask": _mask(work),
        "pack": _pack(work.get("seqlens"), bool(timing and timing.new_packs)),
        "dtype": experiment.workload.dtype if experiment else row["dtype"],
        "mode": (experiment.mode if experiment else None) or row["mode"] or _mode(row["attention"]),
        "timing": results.timed(timing) if timing else None,
        "kernel": kernel if kernel != "auto" else None,  # none was chosen
        # a world of one has none, a peer's is its own affair
        "transport": None if transport in ("none", "auto") or row["attention"] in PEERS else transport,
        # results of before there were any don't say
        "graphs": graphs if isinstance(graphs := config.get("graphs"), (bool, str)) else False,
        "took": took,
        "asked_kernel": asked["kernel"],
        "asked_transport": asked["transport"],
    }
    return Run(value.folder, row, facts, {k: v for k, v in options.items() if v is not None}, value)


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    seqlens = config.get("seqlens")
    return {"window": config.get("window"), "seqlens": seqlens if isinstance(seqlens, (str, list)) else None}


def _method(group: dict[str, Any]) -> Method | None:
    """How a refused run was to be timed, as far as that can be read."""
    known = {
        key: group.get(key) for key in ("layers", "autograd_thread", "new_packs") if type(group.get(key)) in (int, bool)
    }
    method = group.get("method")
    return Method(method=method, **known) if isinstance(method, str) else None  # type: ignore[arg-type]


def _mode(attention: str | None) -> str:
    found = everything().get(attention or "")
    return "forward" if found and found.decode else "forward_backward"


def _gpu(environment: Environment) -> str | None:
    return environment.gpu or next((gpu.get("name") for gpu in environment.gpus_before), None)


def _mask(work: dict[str, Any]) -> str | None:
    """None where a refused run's configuration does not say it."""
    window = work.get("window")
    if not isinstance(work.get("causal"), bool) or not isinstance(window, (list, tuple)) or len(window) != 2:
        return None
    if not all(isinstance(side, int) for side in window):
        return None
    return Mask.of(work["causal"], (window[0], window[1])).describe()


def _pack(seqlens: Any, new: bool) -> str | None:
    if not seqlens:
        return None
    said = f"{len(seqlens)} sequences" if isinstance(seqlens, (list, tuple)) else str(seqlens)
    return said + (", in a new order each time" if new else "")


def in_order(runs: Iterable[Run]) -> list[Run]:
    """By workload, then ours before the peers' in the order of the catalog, each from few ranks to many."""
    names = list(everything())

    def key(run: Run) -> tuple[Any, ...]:
        facts = run.facts
        place = (run.peer, names.index(facts["attention"]) if facts["attention"] in names else len(names))
        work = [sortable(facts[key]) for key in WORKLOAD if key != "world_size"]
        made = [sortable(facts[key]) for key in ("world_size", *MADE)]
        return (work, place, sorted((k, str(v)) for k, v in run.options.items()), made, run.row["name"])

    return sorted(runs, key=key)


def sortable(value: Any) -> tuple[Any, ...]:
    """Numbers by size, also those within a text such as 32:8, and None first."""
    parts = re.split(r"(\d+)", "" if value is None else str(value))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def where(runs: Sequence[Run], conditions: Iterable[str]) -> list[Run]:
    """The runs for which every KEY=VALUE,VALUE.. holds, of what was asked or of an option. Raises ValueError for a key
    that no run has, a condition that is none, or when nothing is left."""
    kept = list(runs)
    for condition in conditions:
        key, sign, wanted = condition.partition("=")
        values = [_looked_up(run, key) for run in runs]
        if not sign or all(value is None for value in values):
            known = sorted({*runs[0].facts, *(k for run in runs for k in run.options), *results.COLUMNS})
            raise ValueError(f"--where {condition}: must be KEY=VALUE with one of these keys: {', '.join(known)}")
        kept = [run for run in kept if str(_looked_up(run, key)).lower() in wanted.lower().split(",")]
    if not kept:
        raise ValueError(f"--where {' '.join(conditions)}: none of the {len(runs)} runs is so")
    return kept


def _looked_up(run: Run, key: str) -> Any:
    return next((at[key] for at in (run.options, run.facts, run.row) if at.get(key) is not None), None)


def varying_options(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """(variant, option) of those options that differ between runs of the same variant."""
    seen: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for option in {o for r in runs if r.facts["attention"] == run.facts["attention"] for o in r.options}:
            seen.setdefault((run.facts["attention"], option), set()).add(str(run.options.get(option)))
    return {key for key, values in seen.items() if len(values) > 1}


def options_text(run: Run, varying: set[tuple[str, str]]) -> str:
    return " ".join(f"{k}={v}" for k, v in run.options.items() if (run.facts["attention"], k) in varying)


def rate(runs: Sequence[Run]) -> str:
    """What TFLOP/s are of."""
    return "TFLOP/s a GPU" if any(run.facts["gpu"] for run in runs) else "TFLOP/s a rank"


def each_over_several_kernels(runs: Sequence[Run]) -> bool:
    """Whether these are several variants, each over several local kernels."""
    taken: dict[str, set[str]] = {}
    for run in runs:
        if run.row["status"] != "invalid":
            taken.setdefault(run.facts["attention"], set()).add(run.facts["asked_kernel"])
    return sum(len(kernels) > 1 for kernels in taken.values()) > 1


def labels(runs: Sequence[Run], without: Collection[str] = ()) -> dict[Run, str]:
    """How each run was made, in a few words: the variant, and of its options, kernel, transport and timing what sets it
    apart, but for those of `MADE` that are told elsewhere (`without`). Runs of the same label differ in their workload
    only."""
    varying = varying_options(runs)
    made = [key for key in MADE if key not in without]
    asked = {key: {run.facts[key] for run in runs if run.row["status"] != "invalid"} for key in made}
    one = len({run.facts["attention"] for run in runs}) == 1
    parts: dict[Run, list[str]] = {}
    for run in runs:
        parts[run] = [options_text(run, varying), *(_made(run, key) for key in made if len(asked[key]) > 1)]
        if not one or not any(parts[run]):
            parts[run].insert(0, str(run.facts["attention"]))
    if len({run.facts["kernel"] for run in runs if run.ok}) > 1 and len(asked.get("asked_kernel", ())) == 1:
        took: dict[str, dict[str, None]] = {}  # what kernel=auto took in all runs of a label
        for run in runs:
            if run.ok:
                took.setdefault(" ".join(parts[run]), {})[str(run.facts["kernel"])] = None
        for run in runs:
            parts[run].append("/".join(took.get(" ".join(parts[run]), {})))
    return {run: " ".join(filter(None, parts[run])) for run in runs}


def _made(run: Run, key: str) -> str:
    if key == "graphs":
        return f"graphs={str(run.facts[key]).lower()}" if run.facts[key] else ""
    return str(run.facts[key])


@dataclass(frozen=True)
class Scaling:
    """Against one device. `mark` says what the reference is: "" the run's own baseline, "*" that extrapolated by FLOPs,
    "†" the fastest run on one device among those reported."""

    speedup: float
    efficiency: float
    mark: str


def scaling(runs: Sequence[Run]) -> dict[Run, Scaling]:
    """Speedup and efficiency of the runs that have a baseline, or a run on one device beside them: of the same workload,
    or else of as many tokens a rank (weak scaling, where efficiency is TFLOP/s a device over that of the one)."""
    found: dict[Run, Scaling] = {}
    many = any(run.ok and run.facts["world_size"] > 1 for run in runs)
    for run in filter(lambda run: run.ok, runs):
        if run.row["efficiency"] is not None:
            mark = "*" if run.result.baseline and run.result.baseline.extrapolated else ""
            found[run] = Scaling(run.row["speedup"], run.row["efficiency"], mark)
        elif many and (rates := _single_rates(run, runs)):
            efficiency = run.row["tflops_per_device"] / max(rates)
            found[run] = Scaling(efficiency * run.facts["world_size"], efficiency, "†")
    return found


def _single_rates(run: Run, runs: Sequence[Run]) -> list[float]:
    def rates(seq_len: float) -> list[float]:
        wanted = {**run.facts, "seq_len": seq_len, "world_size": 1}
        work = tuple(wanted[key] for key in WORKLOAD)
        return [r.row["tflops_per_device"] for r in runs if r.ok and r.work == work]

    return rates(run.facts["seq_len"]) or rates(run.facts["seq_len"] / run.facts["world_size"])
