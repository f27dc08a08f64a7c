"""What a trial tries, by kind. Each is a function of a trial that does it and returns what was wrong: every run has one
typed result, a run that nothing happened to is ok, and a program that was stopped says so in one line."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.launch.agent import PREFIX
from runner.output import reader
from tests.torture import overrides, program

TINY = ["config=tiny", "seq_len=128", "world_size=2", "timing.timing_runs=1"]
SHORT = [*TINY, "phases=false", "baseline=none"]
HANG_S = 5.0  # launch.timeout_s, on an idle machine


@dataclass
class Trial:
    """folder: its own, with the sweep in `s`. whole: a sweep of two ok runs. notes: what was tried."""

    folder: Path
    rng: random.Random
    whole: Path
    notes: list[str] = field(default_factory=list)

    @property
    def sweep(self):
        return self.folder / "s"

    def start(self, *arguments):
        """The program with a sweep in this trial's folder."""
        return program.start(self.folder, ["-m", "runner", "-m", *arguments, f"hydra.sweep.dir={self.sweep}"])

    def results(self):
        """The sweep's results, and what is wrong with them."""
        results, problems = reader.read_results(self.sweep)
        return results, [*map(str, problems), *(f"not whole: {path.name}" for path in self.sweep.rglob(".*.[0-9]*"))]


def _not_ok(results):
    return [f"{one.name}: {one.status}: {one.reason}"[:300] for one in results if one.status != "ok"]


def process(trial):
    """One process of a sweep's world is killed, or one rank is stopped, at a random moment."""
    limit = f"launch.timeout_s={program.slowed(HANG_S):.0f}"
    running = trial.start(*SHORT, "timing.timing_runs=20", "attention=ring,zigzag,ulysses", limit)
    deadline, states = time.monotonic() + program.slowed(60.0), []
    while not states and time.monotonic() < deadline:
        time.sleep(0.02)
        states = list((trial.folder / "tmp").glob(f"{PREFIX}*/rank*.state"))
    ranks = [json.loads(path.read_text())["pid"] for path in states]
    time.sleep(trial.rng.uniform(0.0, 1.5))
    number = trial.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    pids = ranks if number == signal.SIGSTOP else program.processes(trial.folder)
    pid = trial.rng.choice(sorted({*pids} - {running.process.pid}))
    trial.notes.append(f"{number.name} to {pid}, ranks are {ranks}")
    with suppress(ProcessLookupError):  # it had ended
        os.kill(pid, number)
    ended = running.wait()
    results, wrong = trial.results()
    failed = [one for one in results if one.status != "ok"]
    if len(results) != 3 or len(failed) > 1 or any(one.status not in ("crash", "timeout") for one in failed):
        wrong += [f"{len(results)} results of 3 runs", *_not_ok(failed)]
    return ended.wrong(1 if failed else 0) + wrong


def stop(trial):
    """The program itself gets a signal at a random moment."""
    number = trial.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    running = trial.start(*SHORT, "attention=ring,zigzag,ulysses")
    after_s = trial.rng.uniform(0.5, 15.0)
    trial.notes.append(f"{number.name} after {after_s:.1f} s")
    time.sleep(after_s)
    os.kill(running.process.pid, number)  # which may have ended, but is not waited for
    ended = running.wait(60.0)
    results, wrong = trial.results()
    return ended.wrong(0, -number, 128 + number) + wrong + _not_ok(results)


VALUES = (
    None, True, -1, 1e308, "", "<!--<script>alert(1)</script>", "a|b", "../../x", [], [[]], {}, {"x": None}, "é\n", 2**80, "9" * 5000,
)  # fmt: skip


def damaged(trial):
    """A damaged result in a sweep that is reported, compared, packed or resumed: the other run is kept."""
    rng, sweep = trial.rng, str(trial.sweep)
    shutil.copytree(trial.whole, sweep)
    path, other = rng.sample(sorted(trial.sweep.glob("*/result.json")), 2)
    way = rng.choice(["value", "value", "no key", "cut", "bytes", "folder", "link"])
    before, commands = other.read_bytes(), [
        ["report", sweep], ["compare", str(trial.whole), sweep], ["pack", sweep, "--into", str(trial.folder / "packed")], [],
    ]  # fmt: skip
    command = rng.choice(commands)
    trial.notes.append(f"{command or 'resume'}: {damage(path, way, rng)}")
    if command:
        module, *arguments = command
        wrong = program.start(trial.folder, ["-m", f"runner.{module}", *arguments]).wait(60.0).wrong(0, 1, 2)
    else:
        ended = trial.start(*TINY, "attention=ring,zigzag", "resume=true").wait()
        results, wrong = trial.results() if way != "folder" else ([], [])  # which stands in the way
        wrong += ended.wrong(0, *[1] * (way == "folder")) + _not_ok(results)
    return wrong + [f"{other}: changed"] * (other.read_bytes() != before)


def damage(path, way, rng):
    """Damage a result; what was done."""
    content = path.read_bytes()
    if way in ("value", "no key"):
        whole = json.loads(content)
        holder, key = rng.choice(list(_places(whole)))
        holder[key] = rng.choice(VALUES)
        if way == "no key":
            del holder[key]
        path.write_text(json.dumps(whole))
        return f"{way} {key} {str(holder)[:100]}"
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content[: rng.randrange(len(content))] if way == "cut" else rng.randbytes(1000))
    return way


def _places(value):
    """Every place in a JSON value: what holds it, and its key."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def command_line(trial):
    """A command line that nobody would write, stopped before a world would start."""
    arguments = overrides.command_line(trial.rng)
    trial.notes.append(" ".join(arguments)[:300])
    return overrides.wrong(overrides.answer(arguments, trial.folder))


# with how many of 60 trials each gets
KINDS = {
    command_line: 28, damaged: 20, stop: 6, process: 6
}  # fmt: skip
ORDER = [kind for kind, number in KINDS.items() for _ in range(number)]
random.Random(0).shuffle(ORDER)
