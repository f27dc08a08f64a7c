"""Hashes of out, lse, dq, dk and dv of some 300 calls, to show that a restructuring changed no bit.

    python -m tests.net record net.json     # at the commit before, in its checkout
    python -m tests.net check net.json      # at the commit after, on the same machine

The calls cover all variants, masks, dtypes, memory layouts, transports and worlds of 1, 2 and 4 on a CPU. They lie in the
file, so `check` makes the same ones. Bits depend on the CPU and on the PyTorch version: a file is for one machine. A call
that was refused must be refused again, in whatever words. `check` prints each difference and exits with 1 if there is any."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.launch.files import WorldSpec
from runner.launch.pool import Pool
from runner.launch.rank import Rank
from tests.support.cases import Case, compute, draw, variants

CALLS = {1: 5, 2: 10, 4: 10}  # of each variant, by world size
SILENCE_S = 600.0  # that a world's calls may take


def cases() -> list[Case]:
    """The calls that a new file holds."""
    return [draw(name, world, seed) for world, count in CALLS.items() for name in variants() for seed in range(count)]


def digest(x: Tensor) -> str:
    """Of a tensor's shape, dtype and bytes."""
    found = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def outcome(case: Case) -> dict[str, str]:
    """The hash of each result, or what was refused."""
    try:
        return {name: digest(x) for name, x in compute(case).items()}
    except ValueError as error:
        return {"refused": str(error)}


def outcomes(me: Rank, chosen: list[dict[str, Any]]) -> list[list[dict[str, str]]]:
    """Each case's outcome on each rank, of cases of this world's size. On one thread: a sum's order depends on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [outcome(Case.of(case)) for case in chosen]
    finally:
        torch.set_num_threads(threads)
    return [list(ranks) for ranks in zip(*me.gather(found), strict=True)]


def run(pool: Pool, chosen: list[Case]) -> list[list[dict[str, str]]]:
    """Each case's outcome on each rank of its world."""
    found: dict[int, list[dict[str, str]]] = {}
    for world in sorted({case.world for case in chosen}):
        here = [i for i, case in enumerate(chosen) if case.world == world]
        done = pool.get(WorldSpec(world, "cpu")).call(
            outcomes, {"chosen": [chosen[i].plain() for i in here]}, SILENCE_S
        )
        if done.status != "ok":
            raise RuntimeError("\n".join([str(done.reason), *done.log_tail]))
        found |= dict(zip(here, done.result, strict=True))
    return [found[i] for i in range(len(chosen))]


def machine() -> str:
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return f"{platform.machine()} {cpu.partition(': ')[2]}, torch {torch.__version__}"


def differences(was: dict[str, str], now: dict[str, str]) -> list[str]:
    """The results that are not as they were, on one rank."""
    if "refused" in was or "refused" in now:
        return [] if "refused" in was and "refused" in now else [f"was {was}, is {now}"]
    return [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]


def record(pool: Pool, path: Path, chosen: list[Case]) -> int:
    rows = [{"case": c.plain(), "ranks": ranks} for c, ranks in zip(chosen, run(pool, chosen), strict=True)]
    path.write_text(json.dumps({"machine": machine(), "calls": rows}, indent=0))
    refused = sum("refused" in row["ranks"][0] for row in rows)
    print(f"{path}: {len(rows)} calls, {refused} of them refused")
    return 0


def check(pool: Pool, path: Path) -> int:
    held = json.loads(path.read_text())
    if held["machine"] != machine():
        print(f"{path}: recorded on {held['machine']}; here is {machine()}: bits may differ")
    rows = held["calls"]
    changed = 0
    for row, ranks in zip(rows, run(pool, [Case.of(row["case"]) for row in rows]), strict=True):
        for rank, (was, now) in enumerate(zip(row["ranks"], ranks, strict=True)):
            if found := differences(was, now):
                changed += 1
                print(f"rank {rank}: {', '.join(found)} of {row['case']}")
    print(f"{len(rows)} calls, {changed} differences")
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    with Pool() as pool:
        return record(pool, given.file, cases()) if given.what == "record" else check(pool, given.file)


if __name__ == "__main__":
    from tests.net import main as entry  # a world's ranks import the functions by the name of their module

    sys.exit(entry())
