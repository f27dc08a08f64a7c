"""Runs that are compared take turns: who is compared, who has how many samples when, and real sweeps."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest

from runner import app, pack, rounds, sweep
from runner.app import Tally
from runner.config.values import InvalidConfig
from runner.output import results
from runner.report import runs as report_runs
from runner.report import tables
from tests.support.command import environment, results_in, run
from tests.support.composing import resolved
from tests.support.recorded import measured, unnamed

SIZES = [
    "hardware=cpu", "world_size=2", "seq_len=128", "batch=1", "heads=2", "kv_heads=2", "head_dim=32", "seed=1",
    "baseline=none", "phases=false", "timing.warmup_runs=1",
]  # fmt: skip


LONG = "seq_len=8192"  # enough for turns on a CPU


def spec(*overrides):
    return resolved("hardware=cpu", *overrides)


def test_jobs_are_compared_that_differ_in_the_variant_its_options_or_the_kernel_alone():
    jobs = [
        ["attention=ring", "seq_len=128", "kernel=math"],
        ["attention=ring", "seq_len=256", "kernel=math"],
        ["attention=ulysses", "seq_len=128", "kernel=math", "attention.head_parts=2"],
        ["+experiment=speed", "attention=ring", "seq_len=128"],
        ["attention=ring", "seq_len=128", "kernel=flex", "replay=graphs"],
    ]
    assert rounds.groups(jobs, "auto") == [[0, 2, 4], [1], [3]]
    assert rounds.groups([["seq_len=1"], ["seq_len=2"], ["world_size=2"]], "auto") == [[0], [1], [2]]
    assert rounds.groups([["kernels=1"], ["kernels=2"]], "auto") == [[0], [1]]  # another key


@pytest.mark.parametrize(
    ("order", "overrides", "compared", "expected"),
    [
        ("auto", [LONG, "timing.timing_runs=20"], 2, 3),
        ("auto", [LONG, "timing.timing_runs=6"], 2, 2),  # what a CPU has
        ("auto", ["seq_len=256", "timing.timing_runs=20"], 2, 1),  # over before a machine drifts
        ("auto", ["seq_len=256", "timing.timing_runs=10000"], 2, 3),
        ("auto", ["seq_len=256", "timing.timing_runs=2000", "timing.layers=5"], 2, 3),
        ("auto", [LONG, "timing.timing_runs=5"], 2, 1),  # turns of two samples are mostly warm-up
        ("auto", [LONG, "timing.timing_runs=20"], 1, 1),
        ("auto", [LONG, "timing=simple", "timing.timing_runs=20"], 2, 1),
        ("auto", [LONG, "timing.timing_runs=20", "launch.fresh=true"], 2, 1),
        ("interleaved", ["timing.timing_runs=2"], 2, 2),
        ("interleaved", ["timing.timing_runs=20", "launch.fresh=true"], 2, 3),
        ("interleaved", ["timing.timing_runs=20"], 1, 1),
        ("sequential", ["timing.timing_runs=20"], 2, 1),
    ],
)
def test_the_rounds_of_a_run_follow_from_the_order_and_its_samples(order, overrides, compared, expected):
    assert rounds.number(order, spec(*overrides), compared) == expected


def test_one_mean_is_not_taken_in_rounds():
    with pytest.raises(InvalidConfig, match=r"order=interleaved timing=simple: .*use timing=warmup or order=auto"):
        spec("order=interleaved", "timing=simple")
    with pytest.raises(InvalidConfig, match="order=alternating"):
        spec("order=alternating")


@pytest.mark.parametrize(("runs", "of"), [(2, 2), (3, 3), (12, 3), (2, 3), (5, 4)])
def test_every_round_has_each_run_once_and_starts_with_another(runs, of):
    order = [rounds.turns(runs, this, of) for this in range(of)]
    assert all(sorted(each) == list(range(runs)) for each in order)
    assert len({each[0] for each in order}) == min(runs, of)


@pytest.mark.parametrize(("samples", "of"), [(20, 3), (6, 2), (3, 3), (20, 1)])
def test_the_rounds_of_a_run_have_its_samples_together_and_only_the_first_does_what_is_done_once(samples, of):
    whole = replace(spec(f"timing.timing_runs={samples}", "timing=profiler"), energy=True)
    parts = [rounds.part(whole, this, of) for this in range(of)]
    counts = [part.timing.timing_runs for part in parts]
    assert sum(counts) == samples and max(counts) - min(counts) <= 1
    assert [part.phases for part in parts] == [True] + [False] * (of - 1)
    assert [part.energy for part in parts] == [True] + [False] * (of - 1)
    assert [part.baseline for part in parts] == ["single"] + ["none"] * (of - 1)
    assert [part.timing.method for part in parts] == ["profiler"] + ["warmup"] * (of - 1)
    assert {(part.seed, part.workload, str(part.check)) for part in parts} == {
        (whole.seed, whole.workload, str(whole.check))
    }


def test_samples_are_read_as_they_were_written(tmp_path):
    samples = [
        {"forward": [1.0, 2.0, 3.0], "backward": [4.0, 5.0, 6.0]},
        {"forward": [7.0, 8.0, 9.0], "backward": [1.0] * 3},
    ]
    results.write_samples(tmp_path / "samples.parquet", samples, [2, 1])
    assert results.read_samples(tmp_path / "samples.parquet") == samples
    table = pd.read_parquet(tmp_path / "samples.parquet")
    assert list(table[(table["rank"] == 1) & (table["pass"] == "forward")]["round"]) == [0, 0, 1]


def begun(folder, name, samples) -> app.Unfinished:
    """A run with one round of three, of one sample, and its samples."""
    value = measured(name)
    one = {"samples": 1, "median_ms": {"forward": 4.0}}
    value["timing"]["passes"] = {which: value["timing"]["passes"][which] for which in samples[0]}
    value["timing"]["rounds"] = {"done": 1, "of": 3, "drift": {}, "by_round": [one]}
    results.write_result(folder / name, value)
    results.write_samples(folder / name / "samples.parquet", samples)
    return app.Unfinished(0, folder / name, value)


def test_an_error_of_the_program_in_a_later_round_is_a_crash_of_that_run_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "tally", Tally())
    runs = [begun(tmp_path, name, [{"forward": [1.0]}]) for name in ("ring", "zigzag")]
    for each in runs:
        each.value["experiment"]["workload"]["unheard_of"] = 1  # no Experiment can be made of it
    sweep._take_turns(runs)
    assert app.tally.statuses == ["crash", "crash"]
    for each in runs:
        value = json.loads((each.folder / "result.json").read_text())
        assert value["status"] == "crash" and value["timing"] is None
        assert value["reason"].startswith("in round 2 of 3: TypeError: ") and "unheard_of" in value["reason"]
        assert "Traceback" in (each.folder / "run.log").read_text()
        assert not (each.folder / "samples.parquet").exists()


def test_a_stop_in_a_later_round_is_no_crash():
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("of unwinding")
    except RuntimeError as error:
        assert app._stopping(error) and not app._stopping(RuntimeError())


def test_a_run_that_lacks_rounds_is_marked_in_reports_and_named_when_packed(tmp_path, capsys):
    begun(tmp_path, "ring", [{"forward": [1.0]}])
    table = tables.runs_table(report_runs.read([tmp_path])).markdown()
    assert "rounds" in table and "1 of 3" in table and "without all rounds" in table
    assert pack.main([str(tmp_path)]) == 0
    assert "without all their rounds: ring" in capsys.readouterr().err


@pytest.mark.slow
def test_compared_runs_take_turns_and_one_that_crashes_harms_no_other(tmp_path):
    done = run(tmp_path, "attention=ring,zigzag", "ab=launch.fault:null,'1:timing:raise'", "timing.timing_runs=7",
               *SIZES, small=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = results_in(tmp_path)
    assert sorted(value["status"] for value in found.values()) == ["crash", "crash", "ok", "ok"]
    turns = []
    for folder in (path.parent for path in tmp_path.rglob("result.json")):
        value = found[folder.name]
        assert list(unnamed(value)) == []
        if value["status"] == "crash":
            assert value["timing"] is None and not (folder / "samples.parquet").exists()
            continue
        taken = value["timing"]["rounds"]
        assert (taken["done"], taken["of"], rounds.of_samples(value)) == (3, 3, [3, 2, 2])
        assert value["timing"]["passes"]["total"]["n"] == value["experiment"]["timing"]["timing_runs"] == 7
        assert value["timing"]["warmup_iterations"] == sum(one["warmup_iterations"] for one in taken["by_round"]) >= 3
        assert taken["drift"]["forward"] >= 0
        turns += [(one["started_at"], this, folder.name) for this, one in enumerate(taken["by_round"])]
        table = pd.read_parquet(folder / "samples.parquet")
        mine = table[(table["rank"] == 0) & (table["pass"] == "forward")]
        assert list(mine["round"]) == [0, 0, 0, 1, 1, 2, 2]
        slowest = table.groupby(["pass", "iteration", "round"], as_index=False)["ms"].max()
        for which in ("forward", "backward"):  # recomputed from the file
            ms = slowest[slowest["pass"] == which]
            assert value["timing"]["passes"][which]["median"] == pytest.approx(ms["ms"].median())
            medians = [one["median_ms"][which] for one in taken["by_round"]]
            assert medians == pytest.approx(list(ms.groupby("round")["ms"].median()))
        whole = value["metrics"]["passes"]["total"]["tokens_per_s"]
        assert whole == pytest.approx(128 / value["timing"]["passes"]["total"]["median"] * 1e3)
    assert [this for _, this, _ in sorted(turns)] == [0, 0, 1, 1, 2, 2]  # none ran two rounds in a row before the other
    assert done.stdout.count(": ok, ") == 2 and done.stdout.count(": round 2 of 3, ") == 2


@pytest.mark.slow
def test_an_interrupted_sweep_has_valid_results_and_resuming_it_runs_those_that_lack_rounds_anew(
    tmp_path, pool, monkeypatch
):
    arguments = ["-m", "attention=ring,zigzag", "timing.timing_runs=2", "order=interleaved",
                 f"hydra.sweep.dir={tmp_path / 'sweep'}", *SIZES]  # fmt: skip
    program = subprocess.Popen(
        [sys.executable, "-m", "runner", f"output={tmp_path}", *arguments, "timing.warmup_ms=800"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(tmp_path),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )  # fmt: skip
    assert program.stdout is not None
    said = ""
    while said.count(": round 1 of 2, ") < 2:
        line = program.stdout.readline()
        assert line, said  # it ended
        said += line
    program.send_signal(signal.SIGINT)  # while the first takes its second turn
    program.stdout.read()
    assert program.wait(60) == 130
    before = results_in(tmp_path / "sweep")
    assert [value["status"] for value in before.values()] == ["ok", "ok"]
    for value in before.values():
        assert (value["timing"]["rounds"]["done"], value["timing"]["passes"]["forward"]["n"]) == (1, 1)
    assert list(pd.read_csv(tmp_path / "sweep" / "summary.csv")["rounds"]) == ["1 of 2"] * 2

    # a later turn that crashes leaves no times
    name, value = next(iter(before.items()))
    shutil.copytree(tmp_path / "sweep" / name, tmp_path / "copy" / name)
    value["experiment"]["launch"]["fault"] = "1:timing:raise"
    monkeypatch.setattr(app, "pool", pool)
    monkeypatch.setattr(app, "tally", Tally())
    assert app.further(app.Unfinished(0, tmp_path / "copy" / name, value)) is None
    (failed,) = results_in(tmp_path / "copy").values()
    assert (failed["status"], failed["timing"], app.tally.statuses) == ("crash", None, ["crash"])
    assert failed["reason"].startswith("in round 2 of 2: rank 1 in phase timing")
    assert not (tmp_path / "copy" / name / "samples.parquet").exists()

    start = time.time()
    done = run(tmp_path, *arguments, "timing.warmup_ms=800", "resume=true", small=False)
    assert done.returncode == 0, done.stderr
    for value in results_in(tmp_path / "sweep").values():
        assert rounds.of_samples(value) == [1, 1] and value["timing"]["rounds"]["by_round"][0]["started_at"] > start
    assert "kept from before" not in done.stdout
