"""Runs from Python on warm worlds: `runner.run`, `runner.multirun` and `runner.load`, and what a run of each kind records."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import runner
from attention import masks
from runner import app
from runner.config.values import UnsupportedHere
from runner.measure import kernels
from runner.output import summary
from tests.support.composing import resolved
from tests.support.paths import RESULTS
from tests.support.recorded import FIELDS, unnamed

TINY = ["config=tiny", "seq_len=128", "batch=1", "hardware=cpu", "timing.timing_runs=3", "timing.settle_ms=0"]
QUICK = [*TINY, "phases=false", "baseline=none", "world_size=2"]


@pytest.fixture
def here(pool, tmp_path, monkeypatch):
    """A working folder of its own, and the tests' warm worlds."""
    monkeypatch.setattr(app, "pool", pool)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def surroundings():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, os.getcwd(), threading.enumerate(), dict(os.environ), GlobalHydra.instance().hydra


def test_a_run_gives_its_typed_result_and_leaves_the_caller_as_it_was(here, capsys):
    with initialize_config_module("runner.conf", version_base="1.3"):  # a Hydra program of the caller's
        before = surroundings()

        async def in_a_notebook():
            return runner.run(["attention=ring", *QUICK])

        result = asyncio.run(in_a_notebook())
        assert surroundings() == before
        assert compose("config", overrides=["config=tiny"]).config == "tiny"
    assert (result.status, result.asked.attention, result.correctness.passed) == ("ok", "ring", True)
    assert capsys.readouterr() == ("", "")
    with ThreadPoolExecutor(2) as threads:  # calls of several threads wait for each other
        again = list(threads.map(lambda seed: runner.run([f"seed={seed}", *QUICK]), (1, 2)))
    assert [(one.status, one.asked.seed) for one in again] == [("ok", 1), ("ok", 2)]
    assert len({result.folder.parent, *(one.folder.parent for one in again)}) == 3  # none replaces another


def test_a_run_is_checked_timed_and_recorded(here):
    result = runner.run([*TINY, "world_size=2"])
    value = result.plain()
    assert set(value) == {*FIELDS, "schema_version"} and not set(unnamed(value))
    assert set(value["correctness"]["tensors"]) == {"out", "dq", "dk", "dv"}
    assert set(value["timing"]["passes"]) == {"forward", "backward", "total"}
    assert value["baseline"]["speedup"]["total"] > 0 and value["memory"]["by_rank"][1]["peak_resident"] > 0
    assert len(pd.read_parquet(result.folder / "samples.parquet")) == 2 * 2 * 3  # ranks, passes, samples
    phases = pd.read_csv(result.folder / "phases.csv")
    assert {"comp_block", "comp_merge", "comm_kv", "wait_kv", "comm_dkv", "wait_dkv"} <= set(phases["phase"])
    assert (result.folder / "run.log").exists()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["attention=zigzag", *QUICK, "seq_len=255"], "seq_len=255"),
        (["seq_len=1,2"], "add -m, or call runner.multirun"),
        (["dry_run=true"], "dry_run=true: prints a plan; it is for the command line"),
        (["resume=true"], "goes on with a sweep whose folder must be given"),
        ("attention=ring", "give a list"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(here, given, what):
    with pytest.raises(runner.InvalidConfig, match=what) as refused:
        runner.run(given)
    assert "\n" not in str(refused.value) and not any(here.iterdir())


def test_packed_results_are_read_and_other_files_are_named(tmp_path):
    rows = runner.load(RESULTS / "h100-x2/short_training", RESULTS / "h100-x2/balanced_window")
    assert rows.settings.count() == 20  # a setting is what differs within the own sweep
    (tmp_path / "result.json").write_text("{")
    with pytest.warns(UserWarning, match="is no JSON"):
        assert runner.load(tmp_path).empty
    with pytest.raises(FileNotFoundError):
        runner.load(tmp_path / "nowhere")


def test_what_cannot_be_done_is_unsupported_and_what_fails_the_check_has_no_times(here):
    unsupported, incorrect = runner.multirun(["kernel=flash2,math", *QUICK, "dtype.rel_l2=1e-9", "mode=forward"])
    assert unsupported.status == "unsupported"
    with pytest.raises(UnsupportedHere) as refused:  # as dry_run=true says it before
        kernels.check(resolved(*QUICK, "kernel=flash2", "mode=forward"))
    assert str(refused.value) == unsupported.reason and "sdpa_flash" in unsupported.reason
    assert (incorrect.status, incorrect.passes) == ("incorrect", {}) and "rel L2" in incorrect.reason


def test_lengths_beyond_one_that_ran_out_of_memory_are_not_run(here):
    limit = ["launch.memory_limit_gb=0.1", "until_limit=true", "heads=8", "kv_heads=8", "check.enabled=false"]
    ok, oom, beyond = runner.multirun([*QUICK, "mode=forward", "seq_len=64,65536,131072", *limit])
    assert (ok.status, oom.status, beyond.status) == ("ok", "oom", "unsupported")
    assert "(launch.memory_limit_gb=0.1)" in oom.reason
    assert beyond.reason.startswith("seq_len=131072: not run, as seq_len=65536 ended as oom: rank ")


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_every_timing_method_runs_on_a_cpu_forward_only_too(here, mode):
    asked = ["timing=simple,adaptive,profiler", "timing.time_cap_s=0.5", f"mode={mode}", "attention=ring_allgather"]
    simple, adaptive, profiler = sweep = runner.multirun([*QUICK, *asked])
    passes = {"forward"} if mode == "forward" else {"forward", "backward"}
    assert all(set(result.passes) - {"total"} == passes for result in sweep)
    assert simple.passes["forward"].n == 1
    assert {"trace_rank1.json.gz", "kernels.csv"} <= {path.name for path in profiler.folder.iterdir()}
    assert set(pd.read_csv(profiler.folder / "kernels.csv")["rank"]) == {0, 1}
    for profile in profiler.plain()["profile"]:
        assert profile["compute_ms"] > 0 and profile["communication_ms"] >= profile["exposed_communication_ms"] >= 0
    samples = pd.read_parquet(adaptive.folder / "samples.parquet")
    assert samples.groupby(["pass", "iteration"]).ms.max()["forward"].median() == pytest.approx(
        adaptive.passes["forward"].median
    )


def test_auto_records_what_it_chose_and_why(here):
    result = runner.run(["attention=auto", *QUICK])
    chosen, experiment = result.plain()["chosen"], result.plain()["experiment"]
    assert (experiment["variant"], experiment["options"]) == (chosen["variant"], chosen["options"])
    assert next(iter(chosen["tried_ms"])) == chosen["variant"] and len(chosen["tried_ms"]) > 4
    assert chosen["why"].startswith(f"{chosen['variant']}: tried: {chosen['variant']} ")
    assert chosen["left_out"]["dense"] == "nothing is sharded" and result.correctness.passed
    assert summary.row(result)["attention"] == "auto"


def test_masks_are_checked_timed_beside_dense_attention_and_counted(here):
    swept = ["mask=chunked,prefix_lm", "attention=ring,balanced", "baseline=dense"]
    for result in runner.multirun([*QUICK, *swept]):
        value = result.plain()
        measured, baseline, name = value["metrics"], value["baseline"], value["experiment"]["workload"]["named_mask"]
        assert value["correctness"]["passed"] and value["correctness"]["timed"]["passed"]
        assert measured["connections"] == masks.make(name["name"], **name["parameters"]).pairs(128)
        dense = 128 * 129 // 2 if name["name"] == "chunked" else 128**2
        assert measured["sparsity_ratio"] == 1 - measured["connections"] / dense and measured["mask_build_ms"] > 0
        for which, times in value["timing"]["passes"].items():
            assert baseline["speedup"][which] == pytest.approx(baseline["passes"][which] / times["median"])
    assert "chunked(chunk=32)" in (result.folder.parent / "summary.md").read_text()
    nothing = runner.run([*QUICK, "attention=dense", "mask=dca", "mask.window=256", "world_size=1"])
    assert "mask=dca removes no pair of 128 tokens: attention is dense" in nothing.plain()["chosen"]["note"]
