"""What a new user does first, by the README's commands: a run, a sweep that is interrupted and resumed, its page, a
comparison. Two nodes under torchrun are in `launch/test_join.py`."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.report import charts
from tests.support.command import environment, results_in
from tests.support.paths import ROOT

README, READING = ((ROOT / name).read_text() for name in ("README.md", "docs/reading.md"))
SWEEP = "-m attention=ring,zigzag,ulysses config=tiny seq_len=128 phases=false baseline=none hydra.sweep.dir=sweep"


def started(folder: Path, command: str) -> subprocess.Popen:
    """A command of the README, in an empty folder; Ctrl-C reaches it even where the suite runs in the background."""
    words = shlex.split(command)
    assert words.pop(0) == "python"
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def done(folder: Path, command: str) -> str:
    running = started(folder, command)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, out + err
    return out


@pytest.mark.slow
def test_the_first_command_of_the_readme_is_a_checked_and_timed_run(tmp_path):
    (first,) = re.findall(r"^pip install -e \. && (python -m runner)\b", README, re.MULTILINE)
    shown = done(tmp_path, first)
    folder = tmp_path / re.findall(r"^Result: (.*)$", shown, re.MULTILINE)[0]
    value = json.loads((folder / "result.json").read_text())
    assert (
        value["status"] == "ok" and value["correctness"]["passed"] and value["timing"]["passes"]["total"]["median"] > 0
    )
    for words in (
        "IQR",
        "of limit",
        "Phases of forward",
        "exposed communication",
        "skew between ranks",
    ):
        assert words in " ".join(shown.split()) and words in " ".join(READING.split()), words


@pytest.mark.slow
def test_a_sweep_interrupted_and_resumed_has_its_page_and_can_be_compared(tmp_path):
    running = started(tmp_path, f"python -m runner {SWEEP}")
    while not results_in(tmp_path):
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=150)
    assert running.returncode == 130 and "interrupted; what was finished is recorded" in err
    before = results_in(tmp_path / "sweep")
    assert 1 <= len(before) < 3 and {value["status"] for value in before.values()} == {"ok"}

    shown = done(tmp_path, f"python -m runner {SWEEP} resume=true")
    assert shown.count("kept from before") == len(before)
    after = results_in(tmp_path / "sweep")
    assert len(after) == 3 and {value["status"] for value in after.values()} == {"ok"}
    assert len({value["experiment"]["seed"] for value in after.values()}) == 1
    assert before.items() <= after.items()

    if charts.missing() is None:
        page = (tmp_path / "sweep" / "report.html").read_text()
        assert all(name in page for name in after)
    compared = done(tmp_path, "python -m runner.compare sweep sweep")
    assert all(value["config"]["attention"]["name"] in compared for value in after.values())
