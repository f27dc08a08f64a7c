"""What a trial tries, by kind. Each is a function of a trial that does it and returns what was wrong: every run has one
typed result, a run that nothing happened to is ok, and a program that was stopped says so in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner import compare, pack
from runner.__main__ import main
from runner.config.experiment import PHASES
from runner.config.rules.machine import FAULTS
from runner.launch.ownership import PREFIX, remove_abandoned
from runner.launch.processes import cores
from runner.output import reader
from runner.output.record import Result
from runner.report import command as report
from tests.torture import files, left, overrides, program

TINY = ["config=tiny", "seq_len=128", "world_size=2", "timing.timing_runs=1"]
SHORT = [*TINY, "phases=false", "baseline=none"]
LIMIT_S = 240.0  # of a program, on an idle machine
HANG_S = 5.0  # launch.timeout_s, on an idle machine
STATUS = {"raise": "crash", "kill": "crash", "hang": "timeout", "oom": "oom"}


@dataclass
class Store:
    """A sweep of two ok runs for all trials, made when it is first asked for."""

    folder: Path
    took_s: float = 0.0

    def sweep(self) -> Path:
        made = self.folder / "made"
        if not made.exists():
            self.folder.mkdir(exist_ok=True)
            arguments = ["-m", *TINY, "attention=ring,zigzag", f"hydra.sweep.dir={made}"]
            ended = program.start(self.folder, main, arguments).wait(_slowed(LIMIT_S))
            self.took_s = ended.took_s
            assert ended.status == 0, ended.err
        return made


@dataclass
class Trial:
    """folder: its own, with the sweep in `s`. notes: what was tried."""

    folder: Path
    rng: random.Random
    store: Store
    notes: list[str] = field(default_factory=list)

    @property
    def sweep(self) -> Path:
        return self.folder / "s"

    def start(self, *arguments: str, file_limit: int | None = None) -> program.Running:
        """The program with a sweep in this trial's folder."""
        given = ["-m", *arguments, f"hydra.sweep.dir={self.sweep}"]
        return program.start(self.folder, main, given, file_limit)

    def results(self, number: int | None) -> tuple[list[Result], list[str]]:
        """The sweep's results, and what is wrong with them. number: how many there must be; None: any."""
        found, problems = reader.read_results(self.sweep)
        wrong = [str(problem) for problem in problems]
        if number is not None and len(found) != number:
            wrong.append(f"{len(found)} results of {number} runs")
        return found, wrong


def _slowed(seconds: float) -> float:
    """As long on a machine whose cores are shared."""
    return seconds * min(4.0, max(1.0, os.getloadavg()[0] / cores()))


def _not_ok(results: list[Result]) -> list[str]:
    return [f"{one.name}: {one.status}: {one.reason}"[:300] for one in results if one.status != "ok"]


def fault(trial: Trial) -> list[str]:
    """launch.fault on one run of two, before or after the other: its rank, its phase and its kind are recorded."""
    rank, kind = trial.rng.randrange(2), trial.rng.choice(FAULTS)
    phase = trial.rng.choice([phase for phase in PHASES if phase not in ("trials", "energy")])
    text = f"{rank}:{phase}:{kind}"
    order = trial.rng.choice([f"{text},null", f"null,{text}"])
    trial.notes.append(f"launch.fault={order}")
    more = ["timing=profiler"] if phase == "profiler" else []
    limit = f"launch.timeout_s={_slowed(HANG_S):.0f}"
    ended = trial.start(*TINY, *more, limit, f"launch.fault={order}").wait(_slowed(LIMIT_S))
    found, wrong = trial.results(2)
    faulty = [one for one in found if one.config["launch"]["fault"]]
    wrong += _not_ok([one for one in found if one not in faulty])
    for one in faulty:
        failure = one.plain["failure"] or {}
        lost = (one.status, failure.get("rank"), failure.get("phase"))
        if lost != (STATUS[kind], rank, phase):
            wrong.append(f"recorded as {lost}: {one.reason}")
    return ended.wrong(1) + wrong


def process(trial: Trial) -> list[str]:
    """One process of a sweep's world is killed, or one rank is stopped, at a random moment."""
    limit = f"launch.timeout_s={_slowed(HANG_S):.0f}"
    running = trial.start(*SHORT, "timing.timing_runs=20", "attention=ring,zigzag,ulysses", limit)
    states: list[Path] = []
    deadline = time.monotonic() + _slowed(60.0)
    while not states and time.monotonic() < deadline:
        time.sleep(0.02)
        states = list((trial.folder / "tmp").glob(f"{PREFIX}*/rank*.state"))
    time.sleep(trial.rng.uniform(0.0, 1.5))
    number = trial.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    pids = _ranks(trial.folder) if number == signal.SIGSTOP else left.processes(trial.folder)
    pids = sorted(set(pids) - {running.pid})
    if pids:
        pid = trial.rng.choice(pids)
        trial.notes.append(f"{number.name} to {Path(f'/proc/{pid}/comm').read_text().strip()}, one of {len(pids)}")
        os.kill(pid, number)
    ended = running.wait(_slowed(LIMIT_S))
    found, wrong = trial.results(3)
    failed = [one for one in found if one.status != "ok"]
    if len(failed) > 1 or any(one.status not in ("crash", "timeout") for one in failed):
        wrong += _not_ok(failed)
    return ended.wrong(1 if failed else 0) + wrong


def _ranks(folder: Path) -> list[int]:
    states = (path.read_text() for path in (folder / "tmp").glob(f"{PREFIX}*/rank*.state"))
    return [json.loads(text)["pid"] for text in states]


def stop(trial: Trial) -> list[str]:
    """The program itself gets SIGINT, SIGTERM, SIGHUP or SIGKILL at a random moment, the first two up to three times."""
    trial.store.sweep()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
    number, times = trial.rng.choice(numbers), trial.rng.randrange(1, 4)
    running = trial.start(*SHORT, "attention=ring,zigzag,ulysses")
    after_s = trial.rng.uniform(0.2, 1.2 * trial.store.took_s)
    trial.notes.append(f"{times} x {number.name} after {after_s:.1f} s")
    time.sleep(after_s)
    for _ in range(times):
        running.signal(number)
        time.sleep(0.05)
    ended = running.wait(_slowed(60.0))
    found, wrong = trial.results(None)
    wrong += _not_ok(found)
    if number in (signal.SIGHUP, signal.SIGKILL):  # its world's folder is removed by the next program
        time.sleep(1.0)
        program.start(trial.folder, remove_abandoned, []).wait(60.0)
    else:
        wrong += [f"not whole: {path.name}" for path in trial.sweep.rglob(".*.[0-9]*")]
    return ended.wrong(0, -number, 128 + number) + wrong


def memory(trial: Trial) -> list[str]:
    """One run of two may not have the memory that it needs."""
    limit = f"{trial.rng.uniform(0.005, 0.05):.3f}"
    large = [*SHORT, "seq_len=65536", "heads=8", "kv_heads=8", "head_dim=64", "check.enabled=false"]
    trial.notes.append(f"launch.memory_limit_gb={limit}")
    ended = trial.start(*large, f"launch.memory_limit_gb={limit}").wait(_slowed(LIMIT_S))
    found, wrong = trial.results(1)
    wrong += [f"recorded as {one.status}: {one.reason}" for one in found if one.status != "oom"]
    return ended.wrong(1) + wrong


def disk(trial: Trial) -> list[str]:
    """No file may be longer than so many bytes: what a full disk does, where no file system can be mounted."""
    limit = int(2 ** trial.rng.uniform(9, 17))
    trial.notes.append(f"files of {limit} bytes")
    ended = trial.start(*SHORT, "attention=ring,zigzag", file_limit=limit).wait(_slowed(LIMIT_S))
    _, wrong = trial.results(None)
    wrong += [f"not whole: {path.name}" for path in trial.sweep.rglob(".*.[0-9]*")]
    if ended.status and not ended.err.strip():
        wrong.append("no reason")
    return ended.wrong(0, 1) + wrong


def damaged(trial: Trial) -> list[str]:
    """A damaged file in a sweep that is reported, compared, packed or resumed: the other run is kept."""
    whole = trial.store.sweep()
    shutil.copytree(whole, trial.sweep)
    path, how = files.damage(trial.sweep, trial.rng)
    action = trial.rng.choices(["report", "page", "compare", "pack", "resume"], [3, 2, 2, 2, 1])[0]
    trial.notes.append(f"{action}: {path.relative_to(trial.sweep)}: {how}")
    others = [one for one in trial.sweep.glob("*/result.json") if one.parent != path.parent and one != path]
    before = {one: one.read_bytes() for one in others}
    if action == "resume":
        wrong = _resumed(trial)
    elif action == "compare":
        wrong = program.start(trial.folder, compare.main, [str(whole), str(trial.sweep)]).wait(60.0).wrong(0, 1, 2)
    elif action == "pack":
        arguments = [str(trial.sweep), "--into", str(trial.folder / "packed")]
        wrong = program.start(trial.folder, pack.main, arguments).wait(_slowed(60.0)).wrong(0, 1, 2)
    else:
        more = ["--page"] if action == "page" else []
        ended = program.start(trial.folder, report.main, [str(trial.sweep), *more]).wait(_slowed(60.0))
        wrong = ended.wrong(0, 1, 2)
        written = trial.sweep / ("report.html" if more else "report.md")
        if ended.status == 0 and not all(one.parent.name.split("_")[0] in written.read_text() for one in others):
            wrong.append(f"another run is not in {written.name}")
    return wrong + [f"{one}: changed" for one, content in before.items() if one.read_bytes() != content]


def _resumed(trial: Trial) -> list[str]:
    ended = trial.start(*TINY, "attention=ring,zigzag", "resume=true").wait(_slowed(LIMIT_S))
    if ended.status == 1 and "could not be written" in ended.err:  # where a folder stands in the way
        return ended.wrong(1)
    found, wrong = trial.results(2)
    return ended.wrong(0) + wrong + _not_ok(found)


def together(trial: Trial) -> list[str]:
    """Two programs with the same sweep in one folder: the second is refused while the first writes there."""
    programs = []
    for _ in range(2):
        programs.append(trial.start(*SHORT, "attention=ring,zigzag"))
        time.sleep(trial.rng.uniform(0.0, 2.0))
    wrong = [text for one in programs for text in one.wait(_slowed(LIMIT_S)).wrong(0, 2)]
    found, more = trial.results(2)
    return wrong + more + _not_ok(found)


def command_line(trial: Trial) -> list[str]:
    """A command line that nobody would write, stopped before a world would start."""
    arguments = overrides.command_line(trial.rng)
    trial.notes.append(" ".join(arguments)[:300])
    return overrides.wrong(overrides.answer(arguments, trial.folder))


# with how many of 60 trials each gets
KINDS: dict[str, tuple[Callable[[Trial], list[str]], int]] = {
    "overrides": (command_line, 28), "damaged": (damaged, 20), "fault": (fault, 4), "stop": (stop, 3), "process": (process, 2),
    "disk": (disk, 1), "memory": (memory, 1), "together": (together, 1),
}  # fmt: skip
ORDER = [kind for kind, (_, number) in KINDS.items() for _ in range(number)]
random.Random(0).shuffle(ORDER)


def kind_of(seed: int, kinds: Sequence[str]) -> str:
    """The kind of a trial, one of `kinds`: as many consecutive seeds as ORDER has entries of them have them all."""
    these = [kind for kind in ORDER if kind in kinds]
    return these[seed % len(these)]
