"""Jobs that do what the program does in its worlds."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from runner import environment, job
from runner.check import gate, pieces
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, memory_limit
from runner.measure import ceilings, energy, sampler, timing
from runner.measure.attention_work import AttentionWork
from runner.measure.stopwatch import Stopwatch
from runner.record.fields import Energy
from runner.record.result import Result
from tests.jobs.reference import rel


def begun(experiment: dict[str, Any], folder: Path = Path()) -> Result:
    """The result of a run of this experiment before it is done."""
    return Result.begun(folder, "0", "run", {"attention": {"name": experiment["variant"]}}).anew(experiment=experiment)


def run_of(me: Rank, experiment: dict[str, Any]) -> dict[str, Any]:
    """A run as the program does it, with the options and the choice of every rank."""
    result, _ = job.run(me, begun(experiment))
    found = result.plain()
    return found | {"everyone": me.gather([found["experiment"]["options"], found["chosen"]])}


def with_false_ceilings(me: Rank, experiment: dict[str, Any], cache: str) -> dict[str, Any]:
    """The limits that a run reports after the kept ceilings were made a thousand times lower than those of this
    machine."""
    dtype = experiment["workload"]["dtype"]
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=cache), mock.patch.object(ceilings, "_known", {}):
        true = ceilings.ceilings(me, dtype)
        me.barrier()
        (path,) = environment.cache_folder().glob("ceilings-*.json")
        if me.rank == 0:
            kept = json.loads(path.read_text())
            path.write_text(json.dumps(kept | {name: kept[name] / 1000 for name in ceilings.RATES}))
        ceilings._known.clear()
        me.barrier()
        results = [job.run(me, begun(experiment))[0].plain() for _ in range(2)]
        runs = [{"ceilings": x["environment"]["ceilings"], "metrics": x["metrics"]} for x in results]
        ceilings._known[dtype, me.world] = runs[1]["ceilings"] | {"source": "cached"}
        with memory_limit(me, 0.01):
            unmeasured = ceilings.ceilings(me, dtype, exceeded=True)["source"]
    return {
        "true": true,
        "without_memory": unmeasured,
        "kept": json.loads(path.read_text()),
        "runs": runs,
    }


def shared_reference(me: Rank, experiment: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The rows that this rank compares of a reference shared by the ranks, and each tensor's distance from one computed alone."""
    spec = Experiment.from_plain(experiment)
    limit = 1e-12 if number == 1 else 1e9  # the least that can be checked, or everything
    mine, _, shared = pieces.pieces_of(spec, me.world, me.rank, limit)
    piece = mine[0] if mine else None
    together = pieces.share_reference(me, spec, piece, shared, torch.float64)
    found: dict[str, Any] = {"shared": shared, "tokens": [], "errors": {}}
    if piece and together:
        whole = replace(piece, rows=slice(0, spec.workload.queries))
        alone = pieces.reference(pieces.piece_inputs(spec, piece, me.device), whole, spec, torch.float64)
        found["tokens"] = [[piece.number, token] for token in range(piece.rows.start, piece.rows.stop)]
        assert together.values.keys() == alone.values.keys()
        found["errors"] = {name: rel(x, alone.values[name][piece.rows]) for name, x in together.values.items()}
    return me.gather(found)


def checked_again(me: Rank, experiment: dict[str, Any]) -> list[list[Any]]:
    """Three checks of one workload; before the last, rank 1 forgets its kept references. For each: whether it passed,
    its error, and how many references this rank computed."""
    spec = Experiment.from_plain(experiment)
    work, checks = AttentionWork(me, spec), []
    pieces._kept.clear()
    with mock.patch.object(pieces, "reference", wraps=pieces.reference) as computed:
        for last in (False, False, True):
            if last and me.rank == 1:
                pieces._kept.clear()
            computed.reset_mock()
            checked = gate.check(me, spec, work).correctness
            checks.append([checked.passed, checked.tensors["dk"].rel_l2, computed.call_count])
    return me.gather(checks)


def backward_here(me: Rank, experiment: dict[str, Any]) -> bool:
    """Whether a timed backward runs in the thread that calls it."""
    spec = Experiment.from_plain(experiment)
    work = AttentionWork(me, spec)
    threads: list[int] = []
    work.q.register_hook(lambda _: threads.append(threading.get_ident()))
    for which in work.passes:
        work.run(which)
    assert len(threads) == 1
    return threads == [threading.get_ident()]


def energy_by_a_counter(me: Rank, experiment: dict[str, Any], watts: list[float], period_s: float) -> Energy:
    """`energy` of a run on CPU ranks with a counter of these powers, by rank, in place of NVML's."""

    @contextmanager
    def sampling(*_: Any) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        begin = time.monotonic()
        yield found
        times = [begin + i * period_s for i in range(int((time.monotonic() - begin) / period_s) + 1)]
        late = [max(0.0, at - begin - energy.LEAD_S / 2) for at in times]  # nothing is counted before
        found |= {"times": times, "series": {"energy_mj": [round(watts[me.rank] * s * 1e3) for s in late]}}

    spec = Experiment.from_plain(experiment)
    work = AttentionWork(me, spec)
    with mock.patch.object(sampler, "sampling", sampling):
        return energy.measure(timing.Timer(work, Stopwatch(me), "energy", 0.01), 2, 100, 3 * 10**12)


def energy_and_power(me: Rank, experiment: dict[str, Any]) -> tuple[Energy, float]:
    """`energy` of a run on a GPU, and its power in W as sampled in another window."""
    spec = Experiment.from_plain(experiment)
    timer = timing.Timer(AttentionWork(me, spec), Stopwatch(me))
    timer.warm(3, 1000.0)
    found = energy.measure(timer, 1, 100, 10**12)
    with sampler.sampling(me.device) as sampled:
        timer.warm(3, 2000.0)
    return found, sampler.summary(sampled["series"])["power_w"].median
