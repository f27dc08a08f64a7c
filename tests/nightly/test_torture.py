"""A few trials of `python -m tests.torture`, and what it is built on; sixty are a step of their own in CI. `--fuzz-overrides N`
sets how many command lines are tried, `--fuzz-seed N` repeats a run."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.torture import files, kinds, left, overrides, program

# command lines that once ended wrongly
FOUND = [
    ["-m", "config=tiny", "seq_len=128", "seqlens='${nothing}',1"],
    ["config=tiny", "hydra.searchpath=[nope]"],
    ["config=tiny", "seq_len=128", "window=${seq_len}"],
    ["config=tiny", "seq_len=128", "tracker.name='../../x'"],
    ["config=tiny", "seq_len=128", "tracker.name=[]"],
]
ANSWER = """
import json, pathlib, sys
from tests.torture import overrides, program
program.warm()
for line in sys.stdin:
    ended = overrides.answer(json.loads(line), pathlib.Path(sys.argv[1]))
    print(json.dumps([ended.status, overrides.wrong(ended)]))
"""


def torture(*arguments, timeout):
    command = [sys.executable, "-m", "tests.torture", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_happens_to_runs_at_random_is_handled(request):
    seed = str(request.config.getoption("fuzz_seed"))
    assert f"6 from --seed {seed} " in torture("--runs", "6", "--seed", seed, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # of thousands of cases, where they are asked for
def test_no_command_line_ends_in_a_traceback_or_takes_long(request):
    seed, number = (str(request.config.getoption(name)) for name in ("fuzz_seed", "fuzz_overrides"))
    torture("--kinds", "overrides", "--runs", number, "--seed", seed, timeout=60 + 5 * int(number))


@pytest.mark.slow
def test_torture_that_is_stopped_leaves_nothing():
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.torture", "--kinds", "process", "--seed", "1"]
        running = subprocess.Popen(command, env={**os.environ, "TMPDIR": name}, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not list(Path(name).glob("torture-*/t-*/tmp/*/rank*.state")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (folder,) = Path(name).glob("torture-*")
        assert len(left.processes(folder)) > 2
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=60)
        assert running.returncode == 128 + signal.SIGTERM, err
        assert "nothing is left of its trials" in err and "Traceback" not in err
        assert not left.processes(folder) and not folder.exists()


def test_any_sixty_trials_in_a_row_have_the_same_mix():
    wanted = {kind: number for kind, (_, number) in kinds.KINDS.items()}
    assert sum(wanted.values()) == 60
    for first in (0, 1, 59, 12345):
        assert Counter(kinds.kind_of(seed, list(kinds.KINDS)) for seed in range(first, first + 60)) == wanted
    assert {kinds.kind_of(seed, ["disk", "stop"]) for seed in range(4)} == {"disk", "stop"}


@pytest.mark.slow
def test_command_lines_that_once_ended_wrongly_are_refused_in_a_line(tmp_path):
    lines = "".join(json.dumps(case) + "\n" for case in FOUND)
    command = [sys.executable, "-c", ANSWER, str(tmp_path)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[2, []]] * len(FOUND), done.stderr


def test_wrong_ends_are_found(monkeypatch):
    monkeypatch.setattr(overrides, "limit_s", lambda: 2.0)

    def ended(status=2, out="", err="invalid: x", cpu_s=0.1):
        return program.Ended(status, out, err, cpu_s, 1.0)

    assert not ended().wrong(2)
    assert "hung" in ended(None).wrong(2)[0]
    assert "ended with 1: invalid: x" in ended(1).wrong(0)[0]
    assert "traceback" in ended(err="Traceback (most recent call last)\nKeyError: 'a'").wrong(2)[0]
    assert overrides.wrong(ended(70))
    assert "2 lines" in overrides.wrong(ended(err="a\nb"))[0]
    assert overrides.wrong(ended(cpu_s=3.0)) == ["3.0 s of a CPU"]


MAPS = """
import mmap, sys, time
file = open(sys.argv[1], "w+b")
file.truncate(64)
memory = mmap.mmap(file.fileno(), 64)
time.sleep(60)
"""


def test_what_is_left_behind_is_found_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(left, "GONE_S", 0.0)
    assert not left.left(tmp_path)
    (tmp_path / "tmp" / f"{left.PREFIX}x").mkdir(parents=True)
    memory = program.SHARED / f"torture-test-{os.getpid()}"
    command = [sys.executable, "-c", MAPS, str(memory)]
    sleeper = subprocess.Popen(command, env={**os.environ, program.MARK: str(tmp_path)})
    try:
        deadline = time.monotonic() + 20
        while memory not in program.mapped and time.monotonic() < deadline:
            time.sleep(0.05)
            program.look(tmp_path)
        wrong = left.left(tmp_path)
    finally:
        memory.unlink()
    behind = ["1 processes", "1 worlds' folders", f"1 in {program.SHARED}: {[memory.name]}"]
    assert wrong == [f"left behind: {one}" for one in behind]
    assert sleeper.wait(10) == -9


def test_damage_is_the_same_for_the_same_seed_and_changes_one_file(tmp_path):
    ways = set()
    for seed in range(60):
        done = []
        for name in ("a", "b"):
            sweep = tmp_path / f"{seed}{name}"
            for run in ("one", "two"):
                (sweep / run).mkdir(parents=True)
                (sweep / run / "result.json").write_text(json.dumps({"status": "ok", "timing": {"ms": [1, 2]}}))
            (sweep / "seed").write_text("7")
            path, how = files.damage(sweep, random.Random(seed))
            done.append((path.relative_to(sweep), how))
        assert done[0] == done[1]
        ways.add(how.partition(" ")[0].partition("=")[0])
    assert {"cut", "empty", "gone", "folder", "without"} <= ways
