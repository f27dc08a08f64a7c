"""What a report says of a run: what was asked, what was measured, and which runs may be compared. No torch, no pandas."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attention.peers import PEERS
from attention.variants import everything
from runner import results
from runner.schema import Workload

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
    result: dict[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok" and self.row["forward_ms"] is not None

    @property
    def peer(self) -> bool:
        return self.facts["attention"] in PEERS

    @property
    def environment(self) -> dict[str, Any]:
        return self.result.get("environment") or {}

    @cached_property
    def passes(self) -> dict[str, dict[str, Any]]:
        """The summary of each pass's samples."""
        return (self.result.get("timing") or {}).get("passes") or {}

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
        return found["median"] if found and self.ok else None


def read(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders and all below, in the order of the tables. Raises ValueError where there is none."""
    folders = list(folders)
    found = {path.parent.resolve(): path.parent for folder in folders for path in sorted(folder.rglob("result.json"))}
    runs = [_run(path, value) for path in found.values() if (value := results.read_result(path)) is not None]
    if not runs:
        said = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{said}: no result.json there or below; give the folder of a run, a sweep, or several")
    gpus = {run.facts["gpu"] for run in runs} - {None}
    for run in runs:  # a run that was refused at once did not look
        run.facts["gpu"] = run.facts["gpu"] or (next(iter(gpus)) if len(gpus) == 1 else None)
    return in_order(runs)


def _run(folder: Path, value: dict[str, Any]) -> Run:
    row, config = results.row(value), value.get("config") or {}
    experiment = value.get("experiment") or {}
    work = experiment.get("workload") or config
    attention = config.get("attention") or {}
    timing = experiment.get("timing") or config.get("timing") or {}
    options = experiment.get("options", {k: v for k, v in attention.items() if k != "name"})
    world = experiment.get("world_size", config.get("world_size"))
    if world == "auto" and (named := re.search(r"_w(\d+)_", value["name"])):
        world = int(named[1])  # a refused run's name has the ranks that auto stands for
    heads, kv_heads = work.get("heads"), work.get("kv_heads") or work.get("heads")
    # the configuration: in the experiment attention=auto has put what it took
    asked = {key: _name(config.get(key)) or experiment.get(key) for key in ("kernel", "transport")}
    chosen = value.get("chosen") or asked
    took = None
    if "variant" in chosen:  # by attention=auto, which may take another in each workload
        took = " ".join([str(chosen["variant"]), *(f"{k}={v}" for k, v in options.items() if v is not None)])
        if config.get("graphs") == "auto" and chosen["graphs"]:
            took += " graphs=true"
        options = {}
    facts = {
        "attention": row["attention"],
        "config": config.get("config"),
        "world_size": world,
        "gpu": _gpu(value.get("environment") or {}),
        "batch": work.get("batch"),
        "seq_len": work.get("seq_len"),
        "q_len": work.get("q_len"),
        "heads": f"{heads}:{kv_heads}" if heads is not None else None,
        "head_dim": work.get("head_dim"),
        "mask": _mask(work) if "causal" in work else None,
        "pack": _pack(work.get("seqlens"), timing.get("new_packs", False)),
        "dtype": work["dtype"] if isinstance(work.get("dtype"), str) else _name(work.get("dtype")),
        "mode": experiment.get("mode") or config.get("mode") or _mode(row["attention"]),
        "timing": results.timed(timing) if timing else None,
        "kernel": chosen["kernel"] if chosen["kernel"] != "auto" else None,  # none was chosen
        # a world of one has none, a peer's is its own affair
        "transport": None
        if chosen["transport"] in ("none", "auto") or row["attention"] in PEERS
        else chosen["transport"],
        "graphs": config.get("graphs") or False,  # results of before there were any don't say
        "took": took,
        "asked_kernel": asked["kernel"],
        "asked_transport": asked["transport"],
    }
    return Run(folder, row, facts, {k: v for k, v in options.items() if v is not None}, value)


def _name(group: Any) -> str | None:
    return group.get("name") if isinstance(group, dict) else None


def _mode(attention: str | None) -> str:
    found = everything().get(attention or "")
    return "forward" if found and found.decode else "forward_backward"


def _gpu(environment: dict[str, Any]) -> str | None:
    gpus = environment.get("gpus_before") or [{}]
    return environment.get("gpu") or gpus[0].get("name")


def _mask(work: dict[str, Any]) -> str:
    fields = {key: work.get(key) for key in Workload.__dataclass_fields__}
    return Workload(**{**fields, "window": tuple(work["window"])}).mask.describe()  # type: ignore[arg-type]


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
            mark = "*" if (run.result["baseline"] or {}).get("extrapolated") else ""
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
