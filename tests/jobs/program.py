"""Jobs that do what the program does in its worlds."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from typing import Any

import torch

from runner import environment
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, memory_limit
from runner.measure import ceilings, correctness, job, pieces
from runner.measure.attention_work import AttentionWork
from tests.jobs.reference import rel


def variables(me: Rank, names: list[str]) -> list[list[str | None]]:
    return me.gather([os.environ.get(name) for name in names])


def run_of(me: Rank, experiment: dict[str, Any]) -> dict[str, Any]:
    """A run as the program does it, with the options and the choice of every rank."""
    found = job.run(me, experiment, None)
    found["everyone"] = me.gather([found["experiment"]["options"], found["chosen"]])
    return found


def with_false_ceilings(me: Rank, experiment: dict[str, Any], cache: str) -> dict[str, Any]:
    """The limits that a run reports after the kept ceilings were made a thousand times lower than those of this
    machine."""
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), cache
    try:
        dtype = experiment["workload"]["dtype"]
        ceilings._known.clear()  # what an earlier job of this world found
        true = ceilings.ceilings(me, dtype)
        if me.rank == 0:
            (path,) = environment.cache_folder().glob("ceilings-*.json")
            kept = json.loads(path.read_text())
            path.write_text(json.dumps(kept | {name: kept[name] / 1000 for name in ceilings.RATES}))
        ceilings._known.clear()
        ceilings._again.clear()
        me.barrier()
        found = job.run(me, experiment, None)
        again = job.run(me, experiment, None)
        ceilings._again.clear()
        with memory_limit(me, 0.01):
            ceilings.again(me, dtype)
    finally:
        ceilings._known.clear()
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    kept = json.loads(path.read_text()) if me.rank == 0 else None
    return {
        "true": true,
        "again": sorted(ceilings._again),
        "kept": kept,
        "runs": [{key: x[key] for key in ("ceilings", "metrics")} for x in (found, again)],
    }


def shared_reference(me: Rank, experiment: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The pieces that this rank compares of a reference shared by the ranks, and each tensor's distance from one
    computed alone."""
    spec = Experiment.from_plain(experiment)
    limit = 1e-12 if number == 1 else 1e9  # the least that can be checked, or everything
    mine, _, shared = pieces.pieces_of(spec, me.world, me.rank, limit)
    pieces.share_reference(me, spec, mine, shared, torch.float64)
    found: dict[str, Any] = {"shared": shared, "tokens": [], "errors": {}}
    for piece in mine:
        inputs = pieces.piece_inputs(spec, piece, me.device)
        alone = pieces.reference(inputs, replace(piece, rows=None), spec, torch.float64)
        found["tokens"] += [[piece.batch, piece.head, token] for a, b in piece.rows or () for token in range(a, b)]
        shared = piece.reference
        assert shared is not None and shared.values.keys() == alone.values.keys()
        for kind, mine, whole in (("", shared.values, alone.values), (" squared scale", shared.squares, alone.squares)):
            found["errors"] |= {name + kind: rel(x, piece.mine(whole[name])) for name, x in mine.items()}
    return me.gather(found)


def checked_again(me: Rank, experiment: dict[str, Any]) -> list[list[Any]]:
    """Three checks of one workload; before the last, rank 1 forgets its kept references. For each: whether it passed,
    its error, and how many references this rank computed."""
    spec = Experiment.from_plain(experiment)
    work = AttentionWork(me, spec)
    plain, counted = pieces.reference, [0]

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return plain(*args)

    pieces._references.clear()
    pieces.reference = counting
    found = []
    try:
        for last in (False, False, True):
            if last and me.rank == 1:
                pieces._references.clear()
            counted[0] = 0
            checked = correctness.check(me, spec, work).found
            found.append([checked["passed"], checked["tensors"]["dk"]["rel_l2"], counted[0]])
    finally:
        pieces.reference = plain
    return me.gather(found)


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
