"""Runs from Python: `runner.run`, `runner.multirun` and `runner.load`."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import runner
from runner import app
from tests.support.paths import RESULTS

TINY = ["config=tiny", "seq_len=256", "hardware=cpu", "timing.timing_runs=3", "timing.settle_ms=0", "phases=false"]


@pytest.fixture
def here(pool, tmp_path, monkeypatch):
    """A working folder of its own, and the tests' warm worlds."""
    monkeypatch.setattr(app, "pool", pool)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def surroundings():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, os.getcwd(), threading.enumerate(), dict(os.environ), GlobalHydra.instance().hydra


@pytest.mark.slow
def test_a_run_gives_its_typed_result_and_leaves_the_caller_as_it_was(here, capsys):
    with initialize_config_module("runner.conf", version_base="1.3"):  # a Hydra program of the caller's
        before = surroundings()

        async def in_a_notebook():
            return runner.run(["attention=ring", "world_size=2", *TINY])

        result = asyncio.run(in_a_notebook())
        assert surroundings() == before
        assert compose("config", overrides=["config=tiny"]).config == "tiny"
    assert HydraConfig.instance().cfg is None
    assert (result.status, result.asked.attention, result.correctness.passed) == ("ok", "ring", True)
    assert result.passes["forward"].n == 3
    assert result.folder.is_relative_to(here / "outputs") and (result.folder / "samples.parquet").exists()
    assert capsys.readouterr() == ("", "")
    again = runner.run(["attention=ring", "world_size=2", *TINY])
    assert again.folder.parent != result.folder.parent, "a later run must not replace an earlier one"
    assert again.experiment.seed == result.experiment.seed


@pytest.mark.slow
def test_calls_of_several_threads_are_done_one_after_another(here, capsys):
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: runner.run(["world_size=1", f"seed={seed}", *TINY]), (1, 2)))
    assert [(result.status, result.experiment.seed) for result in found] == [("ok", 1), ("ok", 2)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_sweep_sets_an_option_that_an_experiments_default_lacks(here):
    given = ["+experiment=dilated", "attention=dilated,ring_dilated", "seq_len=64", "attention.mixing=sum"]
    found = runner.multirun(given)
    assert [(r.asked.attention, r.status) for r in found] == [("dilated", "invalid"), ("ring_dilated", "invalid")]
    assert all("attention.mixing=sum: " in r.reason and "head_groups" in r.reason for r in found)


@pytest.mark.slow
def test_runs_of_a_sweep_are_results_and_load_has_their_rows_and_samples(here):
    found = runner.multirun(["attention=ring,zigzag", "world_size=2", *TINY, "seq_len=256,510"])
    assert [(r.asked.attention, r.asked.seq_len, r.status) for r in found] == [
        ("ring", 256, "ok"), ("ring", 510, "ok"), ("zigzag", 256, "ok"), ("zigzag", 510, "invalid"),
    ]  # fmt: skip
    assert len({r.folder.parent for r in found}) == 1
    assert (found[0].folder.parent / "summary.csv").exists()
    rows = runner.load(found[0].folder.parent)
    assert sorted(rows.name) == sorted(r.name for r in found)
    slowest = runner.load(here, samples=True).groupby(["name", "pass", "iteration"]).ms.max()
    medians = slowest.groupby(["name", "pass"]).median()
    for row in rows[rows.status == "ok"].itertuples():
        assert medians[row.name, "forward"] == pytest.approx(row.forward_ms)


@pytest.mark.parametrize("which", [runner.run, runner.multirun])
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["attention=rong"], "attention=rong.*did you mean ring"),
        (["seq_len=many"], "seq_len=many"),
        (["dry_run=true"], "dry_run=true: prints a plan; it is for the command line"),
        (["+experiment=nothing"], "experiment=nothing"),
        ("attention=ring", "give a list"),
    ],
)
def test_a_refusal_is_one_line(here, which, given, what):
    with pytest.raises(runner.InvalidConfig, match=what) as refused:
        which(given)
    assert "\n" not in str(refused.value)
    assert not any(here.iterdir())


def test_a_value_that_breaks_a_rule_and_a_folder_that_cannot_be_written_are_exceptions(here):
    with pytest.raises(runner.InvalidConfig, match="seq_len=255"):
        runner.run(["attention=zigzag", "world_size=2", *TINY, "seq_len=255"])
    with pytest.raises(runner.InvalidConfig, match=r"runner\.multirun"):
        runner.run(["attention=ring,zigzag", *TINY])
    (here / "file").touch()
    with pytest.raises(OSError, match="output="):
        runner.run(["output=file", *TINY])


def test_packed_results_are_read_and_other_files_are_named(tmp_path):
    rows = runner.load(RESULTS / "cpu-x2")
    assert len(rows) >= 3 and (rows.status == "ok").all()
    assert len(runner.load(RESULTS / "cpu-x2", samples=True)) > len(rows)
    (tmp_path / "result.json").write_text("{")
    with pytest.warns(UserWarning, match="is no JSON"):
        assert runner.load(tmp_path).empty
    with pytest.raises(FileNotFoundError):
        runner.load(tmp_path / "nowhere")
