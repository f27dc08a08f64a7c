"""What the runs of a sweep share: its folder, its seed, the lengths that failed."""

import pytest

from runner.app import Tally
from runner.config import folders
from runner.config.values import InvalidConfig
from tests.support.command import results_in, run
from tests.support.composing import configured

QUICK = "phases=false baseline=none mode=forward check.enabled=false"


def test_a_sweep_has_the_seed_and_the_overrides_that_its_folder_records(tmp_path):
    (tmp_path / "seed").write_text("1234")
    folders.record(tmp_path, ["seed=1,2"])
    given = folders.resumed([f"resume={tmp_path}", "seed=2"])
    folders.record(tmp_path, given)  # seed=2 is for this time
    assert given[:2] == ["seed=1,2", "seed=2"] and folders.resumed([f"resume={tmp_path}"])[1] == "resume=true"
    assert folders.seed(tmp_path) == 1234
    for damaged in ("", "[x", "-1", "hydra: {overrides: {hydra: [], task: [[x]]}}", "9" * 30):
        for name in ("seed", folders.PLAN):
            (tmp_path / name).write_text(damaged)
        with pytest.raises(InvalidConfig, match=r"no multirun\.yaml of a sweep there; give"):
            folders.resumed([f"resume={tmp_path}"])
        assert folders.seed(tmp_path) == folders.seed(tmp_path / "other") == folders.fresh_seed()


def test_a_folder_that_another_program_has_is_left_to_it(tmp_path):
    assert [folders.create(tmp_path, "now").name for _ in range(3)] == ["now", "now-2", "now-3"]


def test_a_length_that_failed_ends_its_own_series():
    tally = Tally()

    def beyond(length, *overrides):
        return tally.beyond_limit(configured(f"config=tiny seq_len={length} until_limit=true", *overrides))

    def failed(length, status):
        tally.note_failure(configured(f"config=tiny seq_len={length} until_limit=true"), status, "why")

    for status in ("ok", "invalid", "unsupported", "incorrect"):
        failed(64, status)
    assert beyond(128) is None
    failed(512, "oom")
    failed(256, "crash")
    assert beyond(128) is beyond(256) is None
    assert beyond(512) == "seq_len=512: not run, as seq_len=256 ended as crash: why; until_limit=false runs it"
    assert beyond(512, "attention=ring") is beyond(512, "mode=forward") is None
    assert tally.beyond_limit(configured("config=tiny seq_len=512")) is None


def test_a_folder_in_use_keeps_its_plan(tmp_path):
    given = ["-m", f"hydra.sweep.dir='{tmp_path / 's (1)'}'", "attention=ring", QUICK]
    done = run(tmp_path, *given, "seq_len=64,128")
    assert done.returncode == 0 and len(results_in(tmp_path / "s (1)")) == 2, done.stderr
    plan = tmp_path / "s (1)" / "multirun.yaml"
    before = plan.read_bytes()
    with folders.locked(plan.parent):
        done = run(tmp_path, *given, "seq_len=256")
    assert done.returncode == 2 and "another sweep is writing there; wait for its end" in done.stderr
    assert plan.read_bytes() == before
