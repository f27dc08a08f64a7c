"""Sweeps and what is chosen for a run, through the command line, in real processes."""

import json
import os
import tempfile
import threading
import time
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from runner.launch.processes import cores
from runner.output import summary
from runner.output.record import Result
from runner.output.run_tables import read_table
from runner.report import charts
from tests.support.command import only, results_in, run, started_by

pytestmark = pytest.mark.slow


def test_a_sweep_records_every_outcome_and_goes_on(tmp_path):
    # raises, hangs and the rest are provoked in one rank each; runs after them get a fresh world
    done = run(
        tmp_path, "-m", "attention=zigzag,ring", "causal=false",
        "launch.fault=null,1:timing:raise,0:check_variant:kill", "launch.timeout_s=60",
        "phases=false", "baseline=none", "hydra.sweep.dir=" + str(tmp_path / "sweep"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = results_in(tmp_path / "sweep")
    assert len(found) == 6
    by_kind = {}
    for value in found.values():
        config = value["config"]
        key = (config["attention"]["name"], config["causal"], config["launch"]["fault"])
        by_kind[key] = value
    for (name, causal, fault), value in by_kind.items():
        if name == "zigzag" and not causal:
            assert value["status"] == "invalid"
            assert "causal masks" in value["reason"]
        elif fault is None:
            assert value["status"] == "ok"
        else:
            assert value["status"] == "crash"
            assert value["timing"] is None
            rank, phase, kind = fault.split(":")
            assert (value["failure"]["rank"], value["failure"]["phase"]) == (int(rank), phase)
            assert ("SIGKILL" if kind == "kill" else "provoked") in value["reason"]
    summary = pd.read_csv(tmp_path / "sweep" / "summary.csv")
    assert sorted(summary["status"]) == sorted(v["status"] for v in found.values())
    assert (tmp_path / "sweep" / "summary.parquet").exists()
    assert (tmp_path / "sweep" / "summary.md").read_text().count("\n") > 6
    page = tmp_path / "sweep" / "report.html"
    assert (f"Page: {page}" if charts.missing() is None else charts.missing()) in done.stdout
    assert page.exists() == (charts.missing() is None)
    assert not started_by(tmp_path)


def test_every_timing_method_runs_on_a_cpu_forward_only_too(tmp_path):
    arguments = ["-m", "timing=simple,adaptive,profiler", "timing.time_cap_s=0.5", "mode=null,forward", "baseline=none"]
    done = run(tmp_path, *arguments, "attention=ring_allgather", "phases=false")
    assert done.returncode == 0, done.stderr
    folders = {path.parent: json.loads(path.read_text()) for path in tmp_path.rglob("result.json")}
    assert {(v["timing"]["method"], v["experiment"]["mode"]) for v in folders.values()} == set(
        product(("simple", "adaptive", "profiler"), ("forward", "forward_backward"))
    )
    for folder, value in folders.items():
        forward_only = value["experiment"]["mode"] == "forward"
        assert set(value["timing"]["passes"]) == {"forward"} | (set() if forward_only else {"backward", "total"})
        assert set(value["correctness"]["tensors"]) == {"out"} | (set() if forward_only else {"dq", "dk", "dv"})
        if value["timing"]["method"] == "simple":
            assert value["timing"]["passes"]["forward"]["n"] == 1
        if value["timing"]["method"] == "profiler":
            names = {"trace_rank0.json.gz", "trace_rank1.json.gz", "kernels.csv", "kernel_times.csv"}
            assert names <= {p.name for p in folder.iterdir()}
            times = read_table(folder / "kernel_times.csv").to_pylist()
            passes = {"forward"} if forward_only else {"forward", "backward"}
            assert {(r["rank"], r["pass"]) for r in times if r["kind"] == "compute"} == set(product((0, 1), passes))
            assert min(r["start_ms"] for r in times) == 0 and all(r["start_ms"] <= r["stop_ms"] for r in times)
            for profile in value["profile"]:
                assert profile["compute_ms"] > 0
                assert profile["communication_ms"] > 0
                assert profile["exposed_communication_ms"] <= profile["communication_ms"]


@pytest.mark.slow
def test_ten_tiny_runs_take_less_than_fifteen_seconds_in_one_world(tmp_path):
    seen, ended = set(), threading.Event()

    def look(worlds):
        while not ended.wait(0.1):
            seen.update(path.name for path in Path(worlds).glob("attention-world-*"))

    with tempfile.TemporaryDirectory() as worlds:
        threading.Thread(target=look, args=(worlds,), daemon=True).start()
        start = time.time()
        done = run(tmp_path, "-m", "attention=dense,ring,zigzag,llama3,ring_allgather", "seed=1,2", "config=tiny",
                   "seq_len=256", "dtype=fp32", small=False, timeout=230, variables={"TMPDIR": worlds})  # fmt: skip
        took = time.time() - start
        ended.set()
    assert done.returncode == 0
    assert len(results_in(tmp_path)) == 10
    assert len(seen) == 1
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert took < 15 * max(workers, os.getloadavg()[0] / cores())  # by how many a core is shared, at least


def test_a_decode_runs_beside_its_single_device_baseline_and_a_reduction_on_gpus_is_unsupported_without(tmp_path):
    done = run(tmp_path, "-m", "attention=tree", "attention.reduce=null,fused", "causal=false", "seq_len=512", "seed=1")
    assert done.returncode == 0, done.stderr
    by_reduction = {value["config"]["attention"]["reduce"]: value for value in results_in(tmp_path).values()}
    value = by_reduction[None]
    assert value["status"] == "ok"
    assert value["experiment"]["options"]["reduce"] == "packed"  # what was taken
    assert value["baseline"]["speedup"]["forward"] > 0
    assert set(value["timing"]["passes"]) == {"forward"}
    value = by_reduction["fused"]
    assert value["status"] == "unsupported"
    assert "reduce=packed" in value["reason"]


def test_auto_records_what_it_chose_and_why(tmp_path):
    """The experiment, the metrics and the phases are those of the chosen variant."""
    done = run(tmp_path, "attention=auto", "world_size=2")
    assert done.returncode == 0, done.stderr
    value = only(tmp_path)
    chosen, experiment = value["chosen"], value["experiment"]
    assert (experiment["variant"], experiment["options"]) == (chosen["variant"], chosen["options"])
    assert chosen["transport"] == "gloo"
    assert value["config"]["attention"] == {"name": "auto"}
    assert next(iter(chosen["tried_ms"])) == chosen["variant"]
    assert chosen["why"].startswith(f"{chosen['variant']}: tried: {chosen['variant']} ")
    assert chosen["why"] in " ".join(done.stdout.split())
    assert len(chosen["tried_ms"]) > 4
    assert chosen["left_out"]["dense"] == "nothing is sharded"
    assert value["correctness"]["passed"]
    assert summary.row(Result.of(value))["attention"] == "auto"
    assert summary.row(Result.of(value))["options"].split()[0] == chosen["variant"]
