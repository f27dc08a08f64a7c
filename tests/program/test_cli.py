"""The program through its command line, in real processes: each status, signals, output that cannot be written, flags."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest

from runner.app import Tally
from runner.config.values import whole
from runner.output import commands
from runner.report import charts
from tests.support.command import SMALL, environment, only, results_in, run, started_by
from tests.support.composing import python

QUICK = "phases=false baseline=none"


def test_the_exit_status_is_zero_when_none_failed_and_a_run_is_ok_or_there_was_none():
    def exit_status(statuses, until_limit=False):
        tally = Tally()
        tally.statuses, tally.until_limit = statuses, until_limit
        return tally.exit_status()

    assert exit_status([]) == exit_status(["invalid", "unsupported", "ok"]) == 0
    assert exit_status(["invalid"]) == 2 and exit_status(["unsupported"]) == exit_status(["invalid", "oom"]) == 1
    assert [exit_status(["ok", failure]) for failure in ("incorrect", "oom", "timeout", "crash")] == [1] * 4
    assert exit_status(["ok", "oom", "unsupported"], until_limit=True) == 0
    assert exit_status(["ok", "crash"], until_limit=True) == exit_status(["oom"], until_limit=True) == 1


def test_a_sweep_records_every_outcome_and_goes_on(tmp_path):
    # raises and kills are provoked in one rank each; runs after them get a fresh world
    swept = "attention=zigzag,ring causal=false launch.fault=null,1:timing:raise,0:check_variant:kill"
    done = run(tmp_path, "-m", swept, QUICK, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.returncode == 1, done.stderr
    values = results_in(tmp_path / "sweep").values()
    refused = [value["reason"] for value in values if value["status"] == "invalid"]
    assert len(refused) == 3 and all("causal" in reason for reason in refused)
    tried = {value["config"]["launch"]["fault"]: value for value in values if value["status"] != "invalid"}
    assert tried.pop(None)["status"] == "ok"
    for fault, value in tried.items():
        rank, phase, kind = fault.split(":")
        assert (value["status"], value["timing"]) == ("crash", None)
        assert (value["failure"]["rank"], value["failure"]["phase"]) == (int(rank), phase)
        assert ("SIGKILL" if kind == "kill" else "provoked") in value["reason"]
    summary = pd.read_csv(tmp_path / "sweep" / "summary.csv")
    assert sorted(summary["status"]) == ["crash"] * 2 + ["invalid"] * 3 + ["ok"] and not started_by(tmp_path)
    page = tmp_path / "sweep" / "report.html"
    assert (f"Page: {page}" if charts.missing() is None else charts.missing()) in done.stdout


@pytest.mark.parametrize("arguments", [["seq_len=130"], ["-m", "attention=zigzga"], ["seq_len=256,,512"], ["--nope"]])
def test_what_is_refused_is_one_line_leaves_nothing_and_needs_no_torch(tmp_path, arguments):
    done = python("-X", "importtime", "-m", "runner", *arguments, "hardware=cpu", cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and line.startswith(("invalid: ", "error: ")) and arguments[-1] in line
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--version", "attention-runner"),
        ("-sc install=bash", "-F hydra_bash_completion attention-runner"),
        ("config=tiny --cfg job seq_len=640", "seq_len: 640"),
        ("config=tiny -m seed=1,2 hardware=cpu dry_run=true", "Plan: 2 runs: "),
        ("--help", "python -m runner -m attention=ring,zigzag"),
    ],
)
def test_what_only_shows_something_leaves_nothing(tmp_path, line, part):
    done = python("-m", "runner", *line.split(), cwd=tmp_path)
    assert done.returncode == 0 and part in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "link", "y/" * 3000])
def test_an_output_folder_that_cannot_be_written_is_one_clear_line(tmp_path, folder):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    done = run(tmp_path / folder)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "could not be written" in line and "output=DIR" in line and len(line) < 400


def test_a_working_folder_that_was_removed_is_one_line(tmp_path):
    program = "import os, sys; os.rmdir(os.getcwd()); from runner.__main__ import main; sys.exit(main())"
    done = python("-c", program, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "working folder was removed" in done.stderr


def test_a_file_that_cannot_be_written_whole_ends_the_run_with_one_clear_line(tmp_path):
    """What a full disk does: no file may be longer than 10 KiB."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10240, 10240))  # noqa: E731
    no_bytecode = {"PYTHONDONTWRITEBYTECODE": "1"}  # which the limit would cut short, and which would stay so
    done = run(tmp_path, QUICK, preexec_fn=limit, variables=no_bytecode)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "error:" in line and "could not be written" in line and "output=DIR" in line
    assert not list(tmp_path.rglob("*result.json*")) and not started_by(tmp_path)


def test_output_whose_reader_leaves_ends_no_run_and_a_full_disk_is_one_line(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    for stream, said, status in ((writing, "", 0), (full, "standard output: No space left on device", 1)):
        done = run(tmp_path / str(status), QUICK, stdout=stream)
        assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == status
        assert only(tmp_path / str(status))["status"] == "ok"
        os.close(stream)


def started(tmp_path, *options, before=(), **variables):
    return subprocess.Popen(
        [sys.executable, *before, "-m", "runner", f"output={tmp_path}", *SMALL, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(tmp_path) | variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )  # fmt: skip


def test_a_sweep_that_is_interrupted_again_and_again_keeps_what_is_finished_and_goes_on_when_resumed(tmp_path):
    with tempfile.TemporaryDirectory() as worlds:  # a short path, for there are sockets in it
        swept = f"attention=dense,ring,zigzag timing.timing_runs=200 {QUICK}".split()
        program = started(tmp_path, "-m", *swept, TMPDIR=worlds)
        while not results_in(tmp_path):
            assert program.poll() is None, program.communicate()
            time.sleep(0.05)
        while program.poll() is None:
            os.killpg(program.pid, signal.SIGINT)
            time.sleep(0.02)
        shown, said = program.communicate(timeout=30)
        assert not list(Path(worlds).glob("attention-world-*"))
    assert program.returncode == 130 and "Traceback" not in said and "Sweep: " in shown
    before = results_in(tmp_path)
    assert 1 <= len(before) < 3 and not started_by(tmp_path)
    (again,) = re.findall(r"^python -m runner (resume=\S+) goes on$", shown, re.MULTILINE)
    done = run(tmp_path, again, small=False)
    after = results_in(tmp_path)
    assert done.stdout.count("kept from before") == len(before) and before.items() <= after.items()
    assert [value["status"] for value in after.values()] == ["ok"] * 3
    assert len({value["experiment"]["seed"] for value in after.values()}) == 1


UNWINDS_INTO_AN_ERROR = """
import os, signal, sys
from runner import command

def perform(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        raise RuntimeError("a flag was not put back")

command.perform = perform
import runner.__main__
sys.argv = ["runner", "output=out"]
sys.exit(runner.__main__.main())
"""


def test_a_stop_whose_unwinding_raises_something_else_is_still_a_stop(tmp_path):
    done = python("-c", UNWINDS_INTO_AN_ERROR, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (143, "SIGTERM: stopped; what was finished is recorded\n")


def test_interrupting_the_program_while_it_imports_is_one_line(tmp_path):
    program = started(tmp_path, before=["-X", "importtime"])
    for line in program.stderr:
        if "antlr4" in line:  # amid Hydra's own imports
            os.killpg(program.pid, signal.SIGINT)
            break
    _, said = program.communicate(timeout=30)
    assert program.returncode == 130 and "interrupted; nothing was started" in said and "Traceback" not in said


def test_a_folder_with_files_of_the_same_names_does_not_break_the_program(tmp_path):
    (tmp_path / "attention").mkdir()
    for name in ("attention/__init__.py", "conf.py"):  # a training repository's
        (tmp_path / name).write_text("raise RuntimeError('a file of the user was imported')\n")
    done = run(tmp_path, QUICK, cwd=tmp_path)
    assert done.returncode == 0 and only(tmp_path)["status"] == "ok", done.stderr


def test_a_defect_is_no_refusal_and_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("sys.stdout", sys.stdout)  # which the command replaces
    assert commands.exit_status(lambda: whole("seq_len", 0)) == 2
    with pytest.raises(ValueError, match="invalid literal"):
        commands.exit_status(lambda: int("no number"))
