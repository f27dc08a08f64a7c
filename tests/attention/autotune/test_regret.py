"""How much slower than the fastest measured run the model's first choice was, over the results in this repository."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention.autotune.choice import Candidate
from attention.autotune.hardware import Machine
from attention.autotune.model import estimate
from attention.measured import links, rates
from attention.variants.registry import VARIANTS
from runner.report import runs
from runner.report.modelled import task
from runner.report.runs import Run

RESULTS = Path(__file__).parents[3] / "results"
# Of 107 groups, this model has 0.0367 and 13, one of twice its length had 0.0392 and 15. In two groups of short calls, launches took ten
# times as long as usual: a group counts at most as WORST.
MEAN, ABOVE_5_PERCENT, WORST = 0.0370, 13, 1.0


def groups() -> Iterator[list[Run]]:
    """Runs of several ranks that differ in nothing but variant, options and transport."""
    found: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs.read([RESULTS]):
        if run.ok and run.attention in VARIANTS and run.world_size != 1:
            git = run.environment.git
            commit = git.commit if git else None
            found[run.environment.host, commit, run.workload, run.kernel, run.timing, run.graphs].append(run)
    return iter(found.values())


def estimated_ms(run: Run) -> float:
    replayed = run.graphs is True
    machine = Machine(
        "NVIDIA H200",
        lambda masks: run.kernel,
        (run.transport,),
        rates.table(),
        links.table(),
        graphed=replayed or run.timing == "cudagraph",
        replayed=replayed,
    )
    candidate = Candidate(run.attention, VARIANTS[run.attention].parse(run.options))
    return estimate(candidate, task(run), machine, run.kernel, run.transport).ms


def regret(group: list[Run]) -> float | None:
    """By what share the run that the model prefers is slower than the fastest; None where there is nothing to choose."""
    alike: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in group:
        alike[run.attention, json.dumps(run.options, sort_keys=True), run.transport].append(run)
    if len(alike) < 2:
        return None
    measured = {key: statistics.median(run.ms("total") for run in same) for key, same in alike.items()}
    preferred = min(alike, key=lambda key: estimated_ms(alike[key][0]))
    return measured[preferred] / min(measured.values()) - 1


@pytest.mark.slow
def test_the_model_chooses_at_least_as_well_as_the_one_before_it():
    found = [x for x in map(regret, groups()) if x is not None]
    assert len(found) >= 107
    assert statistics.mean(min(x, WORST) for x in found) <= MEAN
    assert sum(x > 0.05 for x in found) <= ABOVE_5_PERCENT
