"""Ceilings of a machine: only the highest that was ever measured is one."""

from types import SimpleNamespace

import pytest
import torch

from runner.measure import ceilings, ceilings_file
from tests.jobs import program
from tests.support.composing import resolved


@pytest.mark.parametrize(("times_ms", "best"), [((10, 9.9, 1), 9.9), ((5, 2, 1, 1.1), 1), ((6, 5, 4, 3, 2, 1, 0.5), 1)])
def test_a_measurement_is_repeated_until_it_no_longer_grows(monkeypatch, times_ms, best):
    rounds = iter(times_ms)
    monkeypatch.setattr(ceilings.Stopwatch, "times_ms", lambda *_: [next(rounds)])
    me = SimpleNamespace(device=torch.device("cpu"), world=1, gather=lambda x: [x])
    assert ceilings._rate(me, 1.0, lambda: None, 1) == pytest.approx(1e3 / best)


def test_a_file_that_is_none_is_measured_anew(tmp_path):
    for text in ("", "[]", "{}", '{"matmul_tflops": 0, "copy_gb_s": 1, "measured_at": 1}', '{"matmul_tflops": "a"}'):
        (tmp_path / "x").write_text(text)
        assert ceilings_file.read(tmp_path / "x") is None


def test_a_ceiling_that_a_run_goes_above_is_measured_again_once_and_kept(in_world, tmp_path):
    spec = resolved("config=tiny hardware=cpu world_size=2 dtype=fp32 timing.timing_runs=3 phases=false baseline=none")
    found = in_world(program.with_false_ceilings, 2, experiment=spec.plain(), cache=str(tmp_path))
    first, second = found["runs"]
    after = first["ceilings"]
    assert after["source"] == "measured again"
    for name in ceilings.RATES:
        assert after[name] == found["kept"][name] > 3 * found["true"][name] / 1000  # on a machine as busy as it likes
    assert second["ceilings"] == after  # not a third time
    assert found["without_memory"] == "cached", "measured in memory that there was none of"
