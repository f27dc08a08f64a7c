"""The main job through its command line, in real processes."""

import json
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

from runner.__main__ import exit_status
from runner.config.values import UnsupportedHere
from runner.measure import kernels
from runner.output import results
from tests.support.command import SMALL, environment, only, results_in, run, started_by
from tests.support.composing import resolved
from tests.support.recorded import unnamed


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([], 0),
        (["ok"], 0),
        (["invalid", "unsupported", "ok"], 0),
        *((["ok", failure], 1) for failure in ("incorrect", "oom", "timeout", "crash")),
        (["invalid"] * 2, 2),
        (["invalid", "oom"], 1),
        (["unsupported"], 1),
    ],
)
def test_the_exit_status_is_zero_when_none_failed_and_a_run_is_ok_or_there_was_none(statuses, status):
    assert exit_status(statuses) == status


def test_the_length_that_no_longer_fits_is_no_failure_of_a_sweep_that_looks_for_it():
    assert exit_status(["ok", "oom", "unsupported"], until_limit=True) == 0
    assert exit_status(["ok", "crash"], until_limit=True) == exit_status(["oom"], until_limit=True) == 1


def test_a_run_is_checked_timed_and_recorded(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    value = only(tmp_path)
    assert value["status"] == "ok"
    assert set(results.FIELDS) == set(value)
    assert not set(unnamed(value))
    assert value["correctness"]["passed"] is True
    assert set(value["correctness"]["tensors"]) == {"out", "dq", "dk", "dv"}
    assert set(value["timing"]["passes"]) == {"forward", "backward", "total"}
    assert value["experiment"]["variant"] == "zigzag"
    assert value["experiment"]["world_size"] == 2
    assert value["baseline"]["speedup"]["total"] > 0
    assert value["baseline"]["samples"] == value["timing"]["passes"]["total"]["n"]
    assert value["memory"]["by_rank"][1]["peak_resident"] > 0
    folder = next(Path(tmp_path).glob("runs/*/*"))
    samples = pd.read_parquet(folder / "samples.parquet")
    assert len(samples) == 2 * 2 * 3  # ranks, passes, samples
    assert set(samples["pass"]) == {"forward", "backward"}
    phases = pd.read_csv(folder / "phases.csv")
    assert {"comp_block", "comm_kv", "wait_kv"} <= set(phases["phase"])
    assert (folder / ".hydra" / "config.yaml").exists()
    assert (folder / "run.log").exists()
    for word in ("Correctness", "forward", "tokens/s", "TFLOP/s", "speedup", "Phases", "Peak memory", str(folder)):
        assert word in done.stdout


@pytest.mark.slow
def test_a_hang_is_a_timeout_with_the_stack_in_the_log(tmp_path):
    done = run(tmp_path, "launch.fault=1:timing:hang", "launch.timeout_s=5")
    assert done.returncode == 1
    value = only(tmp_path)
    assert value["status"] == "timeout"
    assert value["failure"]["phase"] == "timing"
    log = next(Path(tmp_path).glob("runs/*/*/run.log")).read_text()
    assert "_provoke" in log


@pytest.mark.slow
def test_too_little_memory_is_oom(tmp_path):
    # one input is more than the limit: of several smaller ones the last could be a small one, at which anything may fail
    done = run(tmp_path, "launch.memory_limit_gb=0.05", "seq_len=65536", "heads=8", "kv_heads=8", "head_dim=64")
    assert done.returncode == 1
    value = only(tmp_path)
    assert value["status"] == "oom", value["reason"]
    assert value["failure"]["phase"]


def taken(folder, seconds=150):
    """Folders as other programs of these seconds have them."""
    for second in range(seconds):
        name = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(time.time() + second))
        (folder / name).mkdir(parents=True, exist_ok=True)


def test_an_invalid_value_is_one_line_and_leaves_nothing(tmp_path):
    done = run(tmp_path / "out", "seq_len=130")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("invalid: seq_len=130: ") and "128" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_cannot_be_done_is_unsupported_and_what_fails_the_check_has_no_timing(tmp_path):
    taken(tmp_path / "multirun")
    done = run(tmp_path, "-m", "kernel=flash2,math", "dtype.rel_l2=1e-9", "mode=forward")
    assert done.returncode == 1  # none of them is ok
    (summary,) = tmp_path.rglob("summary.csv")  # of both, where no other sweep is
    assert summary.parent.name.endswith("-2") and len(list(summary.parent.glob("*/result.json"))) == 2
    by_kernel = {value["config"]["kernel"]["name"]: value for value in results_in(tmp_path).values()}
    value = by_kernel["flash2"]
    assert value["status"] == "unsupported"
    assert "sdpa_flash" in value["reason"]
    with pytest.raises(UnsupportedHere) as refused:  # as dry_run=true says it before
        kernels.check(resolved(*SMALL, "kernel=flash2", "mode=forward"))
    assert str(refused.value) == value["reason"]
    value = by_kernel["math"]
    assert value["status"] == "incorrect"
    assert value["timing"] is None
    assert value["correctness"]["passed"] is False
    assert "rel L2" in value["reason"]


@pytest.mark.parametrize("what", ["file", "link"])
def test_an_output_folder_that_cannot_be_written_is_one_clear_line(tmp_path, what):
    if what == "file":
        (tmp_path / what).write_text("")
    else:
        (tmp_path / what).symlink_to(tmp_path / "unmounted")
    done = run(tmp_path / what)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "cannot write" in line
    assert "output=" in line
    refused = run(tmp_path / what, "config=tinyyy")
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr


@pytest.fixture
def disk(tmp_path):
    """Mounts a file system of so many KiB; skips where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.decode().strip()}")
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True)


def ended_by_a_full_disk(done, folder):
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    for part in ("error:", "could not be written", "output=DIR"):
        assert part in line
    for path in folder.rglob("*result.json*"):
        assert path.name == "result.json" and json.loads(path.read_text())["status"] == "ok"
    time.sleep(0.5)
    assert not started_by(folder)


def test_a_disk_that_is_full_before_a_run_starts_is_one_clear_line(disk):
    folder = disk(8)  # Hydra's own files need more
    ended_by_a_full_disk(run(folder), folder)


@pytest.mark.slow
def test_a_disk_that_fills_up_within_a_sweep_ends_it_with_one_clear_line(disk):
    folder = disk(72)
    done = run(folder, "-m", "attention=dense,ring,zigzag", "phases=false", "baseline=none", "seed=1")
    ended_by_a_full_disk(done, folder)
    finished = len(results_in(folder))
    assert 1 <= finished < 3
    assert done.stdout.count(": ok, ") <= finished


@pytest.mark.slow
def test_a_result_too_large_for_the_limit_on_files_is_one_clear_line(tmp_path):
    """What a full disk does, where no file system can be mounted: no file may be longer than 6 KiB."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6144, 6144))  # noqa: E731
    no_bytecode = {"PYTHONDONTWRITEBYTECODE": "1"}  # which the limit would cut short, and which would stay so
    done = run(tmp_path, "phases=false", "baseline=none", preexec_fn=limit, variables=no_bytecode)
    ended_by_a_full_disk(done, tmp_path)
    assert not results_in(tmp_path)


def started(tmp_path, *options, before=(), **variables):
    return subprocess.Popen(
        [sys.executable, *before, "-m", "runner", f"output={tmp_path}", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
        env=environment(tmp_path) | variables,
    )


@pytest.mark.slow
def test_interrupting_a_sweep_again_and_again_keeps_what_is_finished_and_leaves_nothing(tmp_path):
    with tempfile.TemporaryDirectory() as worlds:  # a short path, for there are sockets in it
        program = started(tmp_path, "-m", "seed=1", "attention=dense,ring,zigzag,ring_allgather",
                          "timing.timing_runs=200", TMPDIR=worlds)  # fmt: skip
        deadline = time.time() + 60
        while not results_in(tmp_path) and time.time() < deadline:
            time.sleep(0.05)
        while program.poll() is None and time.time() < deadline:
            os.killpg(program.pid, signal.SIGINT)
            time.sleep(0.02)
        shown, said = program.communicate(timeout=30)
        assert not list(Path(worlds).glob("attention-world-*"))
    assert program.returncode == 130, said
    assert "Traceback" not in said and re.search(r"^python -m runner resume=\S+ goes on$", said, re.MULTILINE)
    assert "Sweep: " in shown
    found = results_in(tmp_path)
    assert 1 <= len(found) < 4
    assert all(value["status"] == "ok" for value in found.values())
    time.sleep(0.5)
    assert not started_by(tmp_path)


UNWINDS_INTO_AN_ERROR = """
import os, signal, sys, hydra
from hydra.errors import ConfigCompositionException
from omegaconf.errors import ReadonlyConfigError

def composing():
    try:
        os.kill(os.getpid(), signal.{signal})
    finally:
        try:
            raise ReadonlyConfigError("a flag was not put back")
        except ReadonlyConfigError as cause:
            raise ConfigCompositionException from cause

hydra.main = lambda **_: lambda _: composing
import runner.__main__
sys.argv = ["runner", "output={output}"]
sys.exit(runner.__main__.main())
"""


@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGCONT", 2)])
def test_a_stop_whose_unwinding_raises_something_else_is_still_a_stop(tmp_path, name, status):
    done = subprocess.run(
        [sys.executable, "-c", UNWINDS_INTO_AN_ERROR.format(signal=name, output=tmp_path)],
        capture_output=True, text=True, env=environment(tmp_path), timeout=30,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    how = {130: "interrupted; what was finished is recorded", 143: "terminated; what was finished is recorded"}
    said = how.get(status, "invalid: a flag was not put back")
    assert (done.returncode, done.stderr.strip()) == (status, said)


def test_interrupting_the_program_while_it_imports_is_one_line(tmp_path):
    program = started(tmp_path, before=["-X", "importtime"])
    for line in program.stderr:
        if "antlr4" in line:  # amid Hydra's own imports
            os.killpg(program.pid, signal.SIGINT)
            break
    _, said = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "interrupted; nothing was started" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_long_workload_says_so_and_goes_on(tmp_path):
    # a small iteration, but many of them: the estimate counts all
    done = run(
        tmp_path, "timing.timing_runs=100000", "launch.fault=0:timing:raise", "seq_len=1024", "check.enabled=false"
    )
    assert "FLOP" in done.stderr
    assert "going on" in done.stderr
