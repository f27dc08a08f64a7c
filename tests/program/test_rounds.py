"""Runs that are compared take turns: who is compared, who has how many samples when, and real sweeps."""

from dataclasses import replace

import pandas as pd
import pytest

import runner
from runner import app, pack, rounds
from runner.app import Tally
from runner.output import results
from runner.record.result import Result
from runner.report import runs as report_runs
from runner.report import tables
from tests.support.command import results_in, run
from tests.support.composing import resolved
from tests.support.recorded import measured, write

SIZES = "hardware=cpu world_size=2 seq_len=128 batch=1 heads=2 kv_heads=2 head_dim=32 seed=1 baseline=none phases=false timing.warmup_runs=1"


LONG = "seq_len=8192"  # enough for turns on a CPU


def test_jobs_are_compared_that_differ_in_the_variant_its_options_or_the_kernel_alone():
    lines = [
        "attention=ring seq_len=128 kernel=math",
        "attention=ring seq_len=256 kernel=math",
        "attention=ulysses seq_len=128 kernel=math attention.head_parts=2",
        "+experiment=speed attention=ring seq_len=128",
        "attention=ring seq_len=128 kernel=flex replay=graphs",
    ]
    assert rounds.groups([line.split() for line in lines], "auto") == [[0, 2, 4], [1], [3]]
    # another key
    assert rounds.groups([["seq_len=1"], ["world_size=2"], ["kernels=1"], ["kernels=2"]], "auto") == [
        [0],
        [1],
        [2],
        [3],
    ]


@pytest.mark.parametrize(
    ("order", "line", "compared", "expected"),
    [
        ("auto", f"{LONG} timing.timing_runs=20", 2, 3),
        ("auto", f"{LONG} timing.timing_runs=6", 2, 2),  # what a CPU has
        ("auto", "seq_len=256 timing.timing_runs=20", 2, 1),  # over before a machine drifts
        ("auto", "seq_len=256 timing.timing_runs=2000 timing.layers=5", 2, 3),
        ("auto", f"{LONG} timing.timing_runs=5", 2, 1),  # turns of two samples are mostly warm-up
        ("auto", f"{LONG} timing.timing_runs=20", 1, 1),
        ("auto", f"{LONG} timing=simple timing.timing_runs=20", 2, 1),
        ("auto", f"{LONG} timing.timing_runs=20 launch.fresh=true", 2, 1),
        ("interleaved", "timing.timing_runs=2", 2, 2),
        ("interleaved:seq_len", "timing.timing_runs=20 launch.fresh=true", 2, 3),
        ("sequential", "timing.timing_runs=20", 2, 1),
    ],
)
def test_the_rounds_of_a_run_follow_from_the_order_and_its_samples(order, line, compared, expected):
    assert rounds.number(order, resolved("hardware=cpu", line), compared) == expected


@pytest.mark.parametrize(("runs", "of"), [(2, 2), (12, 3), (2, 3)])
def test_every_round_has_each_run_once_and_starts_with_another(runs, of):
    order = [rounds.turns(runs, this, of) for this in range(of)]
    assert all(sorted(each) == list(range(runs)) for each in order)
    assert len({each[0] for each in order}) == min(runs, of)


@pytest.mark.parametrize(("samples", "of"), [(20, 3), (20, 1)])
def test_the_rounds_of_a_run_have_its_samples_together_and_only_the_first_does_what_is_done_once(samples, of):
    whole = replace(resolved(f"hardware=cpu timing.timing_runs={samples} timing=profiler"), energy=True)
    first, *later = parts = [rounds.part(whole, this, of) for this in range(of)]
    counts = [part.timing.timing_runs for part in parts]
    assert sum(counts) == samples and max(counts) - min(counts) <= 1

    def once(part):
        return part.phases, part.energy, part.baseline, part.timing.method

    assert once(first) == (True, True, "single", "profiler")
    assert [once(part) for part in later] == [(False, False, "none", "warmup")] * (of - 1)
    assert all((part.seed, part.workload, part.check) == (whole.seed, whole.workload, whole.check) for part in parts)


def test_samples_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "samples.parquet"
    samples = [{"forward": [ms, 2.0, 3.0], "backward": [4.0, 5.0, ms]} for ms in (1.0, 7.0)]
    results.write_samples(path, samples, [2, 1])
    assert results.read_samples(path) == samples
    table = pd.read_parquet(path)
    assert list(table[(table["rank"] == 1) & (table["pass"] == "forward")]["round"]) == [0, 0, 1]


def test_a_run_that_lacks_rounds_is_marked_in_reports_and_named_when_packed(tmp_path, capsys):
    value = measured("ring")
    one = {"samples": 1, "median_ms": {"forward": 4.0}}
    value["timing"]["rounds"] = {"done": 1, "of": 3, "drift": {}, "by_round": [one]}
    write(tmp_path / "ring", value)
    table = tables.runs_table(report_runs.read([tmp_path])).markdown()
    assert "1 of 3" in table and "without all rounds" in table
    assert pack.main([str(tmp_path)]) == 0
    assert "without all their rounds: ring" in capsys.readouterr().err


def test_compared_runs_take_turns_one_that_crashes_harms_no_other_and_there_is_a_verdict(tmp_path):
    swept = ["ab=launch.fault:null,'1:timing:raise'", "attention=ring,zigzag", "timing.timing_runs=7"]
    done = run(tmp_path, *swept, SIZES, small=False)
    assert done.returncode == 1, done.stderr
    values = results_in(tmp_path)
    assert sorted(value["status"] for value in values.values()) == ["crash", "crash", "ok", "ok"]
    assert done.stdout.count("no verdict: launch.fault='1:timing:raise' is crash") == 2
    turns = []
    for folder in (path.parent for path in tmp_path.rglob("result.json")):
        value = values[folder.name]
        if value["status"] == "crash":
            assert value["timing"] is None and not (folder / "samples.parquet").exists()
            continue
        taken, passes = value["timing"]["rounds"], value["timing"]["passes"]
        assert (taken["done"], taken["of"], [one["samples"] for one in taken["by_round"]]) == (3, 3, [3, 2, 2])
        turns += [(one["started_at"], this, folder.name) for this, one in enumerate(taken["by_round"])]
        samples = pd.read_parquet(folder / "samples.parquet")  # from which the medians are recomputed
        slowest = samples.groupby(["pass", "round", "iteration"])["ms"].max()
        for which in ("forward", "backward"):
            assert passes[which]["median"] == pytest.approx(slowest[which].median()) and passes[which]["n"] == 7
            medians = [one["median_ms"][which] for one in taken["by_round"]]
            assert medians == pytest.approx(list(slowest[which].groupby("round").median()))
    assert [this for _, this, _ in sorted(turns)] == [0, 0, 1, 1, 2, 2]  # none ran two rounds in a row before the other


def test_a_sweep_that_lacks_rounds_is_resumed_by_its_folder_and_a_round_that_crashes_leaves_no_times(
    tmp_path, pool, monkeypatch
):
    monkeypatch.setattr(app, "pool", pool)
    asked = f"{SIZES} output={tmp_path} attention=ring timing.timing_runs=2".split()
    swept = runner.multirun([*asked, "kernel=sdpa_flash,math", "order=interleaved"])
    folder = swept[0].folder.parent
    value = swept[0].plain()
    value["timing"]["rounds"] |= {"done": 1, "by_round": value["timing"]["rounds"]["by_round"][:1]}
    write(swept[0].folder, value)
    again = runner.multirun([f"resume={folder}"])
    assert again[0].environment.started_at > swept[0].environment.started_at
    assert again[1].environment.started_at == swept[1].environment.started_at
    assert rounds.of_samples(again[0]) == [1, 1]

    monkeypatch.setattr(app, "tally", Tally())
    value["experiment"]["launch"]["fault"] = "1:timing:raise"
    assert app.further(app.Unfinished(0, Result.of(value, swept[0].folder))) is None
    (failed,) = (one for one in results_in(folder).values() if one["status"] != "ok")
    assert (failed["status"], failed["timing"], app.tally.statuses) == ("crash", None, ["crash"])
    assert failed["reason"].startswith("in round 2 of 2: rank 1 in phase timing")
    assert not (swept[0].folder / "samples.parquet").exists()
