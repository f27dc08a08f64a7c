"""What the runs of a sweep share, and a program that is run from any folder."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runner.app import Tally
from runner.config import folders
from tests.support.command import SMALL, only, results_in, run
from tests.support.composing import configured
from tests.support.paths import ROOT

QUICK = ["phases=false", "baseline=none", "mode=forward", "check.enabled=false"]


def used_seeds(folder):
    return {value["experiment"]["seed"] for value in results_in(folder).values()}


@pytest.mark.slow
def test_a_sweep_that_is_resumed_keeps_its_seed_and_what_is_ok_and_says_where_it_is(tmp_path):
    folder = tmp_path / "s"
    swept = ["-m", "attention=llama3,ring_varlen,ring", "seqlens=random", "seqlens_mean=16"]
    arguments = [*swept, f"hydra.sweep.dir={folder}"]
    done = run(tmp_path, *arguments, *QUICK)
    assert done.returncode == 0, done.stderr
    ended = [
        "1 of 3, ",
        "2 of 3, ",
        "3 of 3, ",
        "; 1 done, 0 failed, 0 skipped, about ",
        "; 3 done, 0 failed, 0 skipped)",
    ]
    for part in ("Plan: 3 runs", *ended, "s: llama3, 2 ranks", "s: ring_varlen, 2 ranks"):
        assert part in done.stdout
    (before,) = used_seeds(folder)
    lengths = {tuple(value["experiment"]["workload"]["seqlens"]) for value in results_in(folder).values()}
    assert len(lengths) == 1
    interrupted = next(p for p in folder.glob("ring_varlen*/result.json"))
    interrupted.unlink()
    crashed = next(folder.glob("ring_[!v]*/result.json"))
    crashed.write_text(crashed.read_text().replace('"status": "ok"', '"status": "crash"'))
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    done = run(tmp_path, f"resume={folder}")  # the line that an interrupted sweep prints
    assert done.stdout.count("kept from before") == 1 and interrupted.exists()
    assert {path for path, time in times.items() if path.stat().st_mtime_ns != time} == {crashed}
    assert used_seeds(folder) == {before}
    assert {tuple(value["experiment"]["workload"]["seqlens"]) for value in results_in(folder).values()} == lengths
    assert "seed" not in (folder / "summary.md").read_text().splitlines()[0]


def test_a_sweep_has_the_seed_that_its_folder_records_else_that_of_the_process(tmp_path):
    (tmp_path / "seed").write_text("1234")
    folders.record_seed(tmp_path)
    assert folders.seed(tmp_path) == 1234
    for damaged in ("", "x", "-1", "9" * 30):
        (tmp_path / "seed").write_text(damaged)
        assert folders.seed(tmp_path) == folders.seed(tmp_path / "other") == folders.fresh_seed()


def test_a_length_that_failed_ends_its_own_series():
    tally = Tally()

    def beyond(length, *overrides):
        return tally.beyond_limit(configured("config=tiny", f"seq_len={length}", "until_limit=true", *overrides))

    def failed(length, status):
        tally.note_failure(configured("config=tiny", f"seq_len={length}", "until_limit=true"), status, "why")

    for status in ("ok", "invalid", "unsupported", "incorrect"):
        failed(64, status)
    assert beyond(128) is None
    failed(512, "oom")
    failed(256, "crash")
    failed(1024, "oom")
    assert beyond(128) is beyond(256) is None
    assert beyond(512) == "seq_len=512: not run, as seq_len=256 ended as crash: why; until_limit=false runs it"
    assert beyond(512, "attention=ring") is beyond(512, "mode=forward") is None
    assert tally.beyond_limit(configured("config=tiny", "seq_len=512")) is None


@pytest.mark.slow
def test_lengths_beyond_one_that_ran_out_of_memory_are_rows_with_the_reason(tmp_path):
    limit = ["launch.memory_limit_gb=0.1", "until_limit=true", "heads=8", "kv_heads=8", "head_dim=64"]
    done = run(tmp_path, "-m", "seq_len=64,65536,131072", *limit, *QUICK)
    assert done.returncode == 0, done.stderr  # to meet the limit was asked for
    found = {v["config"]["seq_len"]: (v["status"], v["reason"]) for v in results_in(tmp_path).values()}
    assert found[64][0] == "ok" and found[65536][0] == "oom" and found[131072][0] == "unsupported"
    assert found[131072][1].startswith("seq_len=131072: not run, as seq_len=65536 ended as oom: rank ")
    assert "(launch.memory_limit_gb=0.1)" in found[65536][1]


def own_files(folder):
    """A training repository's: names that this program's packages have."""
    for name in ("attention.py", "runner.py", "conf.py"):
        (folder / name).write_text("raise RuntimeError('a file of the user was imported')\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "command"])
def test_a_folder_with_files_of_the_same_names_does_not_break_the_program(tmp_path, how):
    own_files(tmp_path)
    if how == "module":
        (tmp_path / "runner.py").unlink()  # that is what `python -m runner` would run
        (tmp_path / "attention.py").unlink()
        (tmp_path / "attention").mkdir()
        (tmp_path / "attention" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        command = [sys.executable, "-m", "runner"]
    else:
        (tmp_path / "queue.py").write_text("raise RuntimeError('imported')\n")  # as a module of Python's
        module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
            "attention-runner"
        ].partition(":")
        program = f"import sys; from {module} import {function}; sys.exit({function}())"
        command = [sys.executable, "-P", "-c", program]  # as the installed command searches
    out = tmp_path / "out"
    done = subprocess.run(
        [*command, *SMALL, *QUICK, f"output={out}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert only(out)["status"] == "ok"


@pytest.mark.slow
def test_output_that_ends_early_ends_no_run(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "runner", "-m", "seed=1,2", *SMALL, *QUICK, f"output={tmp_path}"],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert [value["status"] for value in results_in(tmp_path).values()] == ["ok", "ok"]


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_line(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "runner", "-m", "seed=1,2", "seq_len=1001", f"output={tmp_path}"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert "standard output: No space left on device" in line
    assert done.returncode == 2 and len(results_in(tmp_path)) == 2


def test_batches_of_hydras_sweeper_are_one_sweep_and_a_folder_in_use_keeps_its_plan(tmp_path):
    given = ["-m", f"hydra.sweep.dir={tmp_path / 's (1)'}".replace("=", "='", 1) + "'", "attention=ring", *QUICK]
    done = run(tmp_path, *given, "seq_len=64,128", "hydra.sweeper.max_batch_size=1")
    assert done.returncode == 0 and len(results_in(tmp_path / "s (1)")) == 2, done.stderr
    plan = tmp_path / "s (1)" / "multirun.yaml"
    before = plan.read_bytes()
    with folders.locked(plan.parent):
        done = run(tmp_path, *given, "seq_len=256")
    assert done.returncode == 2 and "another sweep is writing there" in done.stderr
    assert plan.read_bytes() == before
    done = run(tmp_path, f"resume={plan.parent}", small=False)
    assert done.returncode == 0 and done.stdout.count("kept from before") == 2, done.stderr
