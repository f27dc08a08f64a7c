"""The plan of a command before it starts, in this process and without a world; where a sweep is while it runs."""

import shutil
from types import SimpleNamespace

import pytest

from runner import app, plan, sweep
from runner.app import Tally
from runner.config import overrides
from runner.config.resolve import identity, run_name
from runner.launch.processes import cores
from runner.measure import duration, metrics
from runner.output import display
from tests.support.composing import configured, resolved
from tests.support.paths import ROOT
from tests.support.recorded import measured, write

CPU = ["hardware=cpu", "config=tiny", "world_size=2", "seed=3"]


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plans a command with dry_run=true, which leaves nothing in its output folder."""
    shown, show = [], plan.show
    monkeypatch.setattr(plan, "show", lambda found: (shown.append(found), show(found)))

    def run(*given, multirun=True):
        before = set(tmp_path.rglob("*"))
        plan.dry_run([*CPU, f"output={tmp_path}", *given], multirun)
        assert set(tmp_path.rglob("*")) == before and not app.pool.worlds
        return shown.pop()

    return run


def test_a_plan_says_which_runs_are_impossible_and_why_and_starts_nothing(planned, capsys):
    found = planned("attention=zigzag", "seq_len=${per_rank:128},510", "kernel=math,flash2", "causal=true")
    assert found.of == len(found.runs) == 4
    first, missing, *refused = found.runs
    about = "hardware=cpu", "config=tiny", "world_size=2", "seq_len=256"
    assert (first.state, first.flops) == (plan.TO_DO, metrics.flops(resolved(*about))["total"])
    assert first.name == run_name(configured(*about, "kernel=math seed=3"), 0)
    assert first.seconds > duration.start_s(resolved(*CPU)) and first.basis.startswith("FLOPs (")
    assert missing.state == "unsupported" and "kernel=flash2: " in missing.reason and "sdpa_flash" in missing.reason
    for run in refused:
        assert (run.state, run.flops, run.seconds) == ("invalid", None, 0)
        assert "seq_len=510: the zigzag layout needs a multiple of 2 * world_size = 4; 512 would" in run.reason
    said = " ".join(capsys.readouterr().out.split())
    assert "Plan: 4 runs: 3 impossible, " in said and "estimated by FLOPs (" in said
    assert (
        "seq_len=${per_rank:128}" in said and "seq_len=510" in said and "invalid" in said and "unsupported" in said
    )  # the rows of the table


def test_a_single_run_is_planned_too(planned, capsys):
    (run,) = planned("model=decoder_tiny", multirun=False).runs
    assert run.state == plan.TO_DO and "Plan: 1 run: " in capsys.readouterr().out
    assert run.flops == metrics.flops(resolved(*CPU, "model=decoder_tiny"))["total"]
    (run,) = planned(f"world_size={33 * cores()}", f"seq_len={66 * cores()}", "attention=ring", multirun=False).runs
    assert run.state == "invalid" and "cores, which take at most" in run.reason


def test_a_resumed_sweep_keeps_what_is_ok_with_all_its_rounds(planned, tmp_path):
    for variant, done, status in (("ring", 3, "ok"), ("zigzag", 1, "ok"), ("ulysses", 3, "incorrect")):
        cfg = configured(*CPU, f"attention={variant}")
        value = measured(run_name(cfg, 0)) | {"key": identity(cfg), "status": status}
        value["timing"]["rounds"] = {"done": done, "of": 3, "drift": {}, "by_round": [{"samples": 1}]}
        write(tmp_path / "sweep" / value["name"], value)
    given = ["attention=ring,zigzag,ulysses", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    found = planned(*given, "resume=true")
    assert [run.state for run in found.runs] == [plan.KEPT, plan.TO_DO, plan.TO_DO]  # one lacks rounds, one failed
    assert found.runs[0].seconds == 0 and "1 done before" in found.line()
    assert plan.KEPT not in [run.state for run in planned(*given).runs]


def test_stored_runs_are_kept_whatever_their_limits_were(planned, tmp_path):
    shutil.copytree(ROOT / "results" / "cpu-x2" / "model_sharded", tmp_path / "sweep")  # packed
    given = ["+experiment=model_sharded", "world_size=1,2,4", "config=default", "seed=null", "resume=true"]
    runs = planned(*given, "launch.timeout_s=900", f"hydra.sweep.dir={tmp_path / 'sweep'}").runs
    assert [run.state for run in runs] == [plan.KEPT] * 3


def test_before_a_sweep_the_plan_is_a_line_that_the_time_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(app, "tally", Tally())
    jobs = overrides.jobs([*CPU, "attention=ring", "seq_len=256,512"])
    monkeypatch.setattr(sweep, "PLAN_S", 100.0)
    sweep._say_plan(jobs, tmp_path)
    assert len(app.tally.expected) == 2 and min(app.tally.expected.values()) > 0
    monkeypatch.setattr(sweep, "PLAN_S", 0.0)
    sweep._say_plan(jobs, tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Plan: 2 runs: ") and second.startswith("Plan: 2 runs; the first 1 of them: ")


def test_a_model_that_takes_a_cpu_more_than_minutes_is_refused_with_the_way_out(planned):
    large = ["model=gpt_oss_layer", "config=large", "attention=ring", "mode=training"]
    (run,) = planned(*large, multirun=False).runs
    assert run.state == "unsupported" and "check.enabled=false, fewer layers" in run.reason
    (run,) = planned(*large, "launch.timeout_s=1e9", multirun=False).runs
    assert run.state == plan.TO_DO and run.seconds > duration.MOST_CPU_S


def test_the_time_left_follows_what_the_runs_took(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tally = Tally()
    assert tally.counts() == ""
    tally.runs, now[0] = 4, 130.0
    assert tally.counts() == "0 done, 0 failed, 0 skipped"
    tally.over("a", None, 0.5)
    assert tally.seconds_left() == 30 / 0.5 * 3.5
    tally.over("a", "ok", 0.5)
    tally.over("b", "invalid", ran=False)
    assert tally.counts() == "1 done, 0 failed, 1 skipped, about 60 s left"
    tally = Tally()
    tally.runs, now[0] = 3, 160.0
    tally.expect({"a": 10.0, "b": 40.0, "c": 0.0})
    assert tally.seconds_left() == 50
    tally.over("c", "ok", ran=False)
    tally.over("a", "ok")
    assert tally.seconds_left() == 120  # three times as slow as planned


def test_the_spinner_shows_the_run_the_counts_and_the_phase():
    progress = display.Progress("ring, 2 ranks", 1e9, "run 3 of 12, 40 s", lambda: "2 done, 0 failed, 0 skipped")
    assert progress.text("timing") == "run 3 of 12 (2 done, 0 failed, 0 skipped): ring, 2 ranks: timing"
    assert display.Progress("ring", 1e9).text("timing") == "ring: timing"
