"""The table that a reader sees first: our `auto` beside each external package at its best, measured alike."""

from __future__ import annotations

from collections.abc import Sequence

from attention.autotune.model import AUTO
from attention.external import PEERS
from runner.report.fair import MIXED, mixed, mixed_note, noise, origins, ratio
from runner.report.runs import FACTS, WORKLOAD, Run, labels, sortable
from runner.report.tables import BEST, NOISY, Table, comparable, digits, fact

RATIO = "fastest external / auto"


def package(run: Run) -> str:
    """The external package behind a run."""
    needs = PEERS[run.facts["attention"]].needs
    return needs.replace("_", "-") if needs else "PyTorch"


def headline_table(runs: Sequence[Run], which: str = "total", allow_mixed: bool = False) -> Table:
    """A row a workload that `auto` did: its time, that of each external package's fastest setting, which the cell names, and
    their ratio. Raises ValueError without runs of auto and of an external package, and for rows of several commits or machines,
    unless `allow_mixed`."""
    taken = [run for run in comparable(runs) if run.peer or run.facts["attention"] == AUTO]
    if {run.peer for run in taken} != {True, False}:
        raise ValueError("--table headline: needs runs of attention=auto and of an external package in these folders")
    named = labels(taken)
    packages = list(dict.fromkeys(package(run) for run in taken if run.peer))
    by_work: dict[tuple[object, ...], list[Run]] = {}
    for run in taken:
        by_work.setdefault(run.work, []).append(run)
    kept = [(work, found) for work, found in by_work.items() if any(not run.peer for run in found)]
    kept.sort(key=lambda pair: [sortable(value) for value in pair[0]])
    shown = [i for i in range(len(WORKLOAD)) if len({work[i] for work, _ in kept}) > 1] or [WORKLOAD.index("seq_len")]
    rows, used = [], []
    for _, found in kept:
        sides = {AUTO: [run for run in found if not run.peer]}
        sides |= {name: [run for run in found if run.peer and package(run) == name] for name in packages}
        fastest = {name: _fastest(side, which) for name, side in sides.items()}
        in_row = [one for one in fastest.values() if one is not None and one.ms(which) is not None]
        used.append(in_row)
        facts = [fact(found[0], WORKLOAD[i], set()) for i in shown]
        if mixed(in_row):
            if not allow_mixed:
                raise ValueError(
                    f"--table headline: the row {' '.join(facts)} is of several commits or machines ({', '.join(origins(in_row))}); "
                    "measure it in one sweep, choose with --where, or allow it with --mixed"
                )
            facts[-1] += MIXED
        times = {name: run.ms(which) for name, run in fastest.items() if run is not None and run.ms(which) is not None}
        least = min(times, key=lambda name: times[name] or 0.0, default=None)
        cells = []
        for name, one in fastest.items():
            text = "" if one is None else one.row["status"] if name not in times else _cell(one, which, named[one])
            cells.append(BEST.format(text) if name == least else text)
        ours = fastest[AUTO] if AUTO in times else None
        others = [run for name, run in fastest.items() if run is not None and name in times and name != AUTO]
        best = min(others, key=lambda run: run.ms(which) or 0.0, default=None)
        said = ratio(best, ours, which, (package(best), AUTO)) if best is not None and ours is not None else ""
        rows.append([*facts, *cells, said])
    titles = [*(FACTS[WORKLOAD[i]] for i in shown), AUTO, *packages, RATIO]
    notes = [NOISY] if any(noise(run, which) for found in used for run in found) else []
    notes += [
        f"Of each external package its fastest setting of these runs. `{RATIO}`: of medians; even where their spreads overlap."
    ]
    left = {FACTS[name] for name in ("mask", "gpu", "mode", "dtype", "pack", "heads")}
    return Table(titles, rows, left, notes + mixed_note(used))


def _fastest(runs: Sequence[Run], which: str) -> Run | None:
    """The one of the least median; where none has one, any."""
    timed = [run for run in runs if run.ms(which) is not None]
    return min(timed, key=lambda run: run.ms(which) or 0.0) if timed else next(iter(runs), None)


def _cell(run: Run, which: str, label: str) -> str:
    how = run.facts["took"] if run.facts["attention"] == AUTO else label
    return f"{digits(run.ms(which))}{noise(run, which)}" + (f" ({how})" if how else "")
