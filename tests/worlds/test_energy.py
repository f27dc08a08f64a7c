"""The energy of an iteration, from the counters of GPUs. Here the window and the arithmetic; a GPU's own counter where there is
one."""

import pytest
import torch

from runner.measure import energy
from tests.jobs import program
from tests.support.composing import resolved
from tests.worlds.test_job import SHORT, SIZES

MS = 1000  # mJ of a joule


IDLE = [(10.0 + 0.1 * i, 7 * MS * i) for i in range(3)]
BUSY = [(10.3 + 0.1 * i, 21 * MS + 50 * MS * i) for i in range(10)]


@pytest.mark.parametrize(
    ("readings", "begin", "watts"),
    [
        # 400 W, read 3 ms after each change: neither end of the window adds a part of a period
        ([(5.003 + 0.05 * i, 40 * MS * (i // 2)) for i in range(22)], 0.0, 400.0),
        ([(5.003 + 0.1 * i, 40 * MS * i) for i in range(3)], 0.0, None),  # too short
        ([(0.0, 1), (0.1, 1)], 0.0, None),  # no change
        (IDLE + BUSY, 10.0, 500.0),  # before the counter shows the work nothing counts
    ],
)
def test_power_is_the_energy_between_changes_of_the_counter_over_their_time(readings, begin, watts):
    power = energy.power(*zip(*readings, strict=True), begin)
    assert power == (watts and pytest.approx(watts, rel=1e-2))


def test_the_energy_of_a_call_is_that_of_all_gpus_and_a_counter_that_could_not_be_read_a_reason():
    found = energy.of_window([300.0, 500.0], seconds=2.0, calls=100, tokens=1000, flops=32 * 10**12)
    assert found.joules == pytest.approx(16.0)  # 800 W for 20 ms
    assert found.joules_per_token == pytest.approx(0.016)
    assert found.tflops_per_watt == pytest.approx(2.0)  # 32 TFLOP in 20 ms are 1600 TFLOP/s
    lacking = energy.of_window([300.0, None], 2.0, 100, 1000, 1)
    assert lacking.joules is None and lacking.unavailable == "the counter of rank 1's GPU changed too seldom in 2.0 s"


def test_a_window_of_iterations_is_measured_on_all_ranks(in_world):
    plain = resolved(*SIZES, *SHORT, "world_size=2").plain()
    found = in_world(program.energy_by_a_counter, 2, experiment=plain, watts=[200.0, 100.0], period_s=0.05)
    assert found.watts_by_rank == pytest.approx([200.0, 100.0], rel=0.01)
    assert found.seconds >= energy.LEAD_S + energy.WINDOW_S and found.calls % 2 == 0
    assert found.joules == pytest.approx(300 * found.seconds / found.calls, rel=0.01)
    assert found.joules_per_token == pytest.approx(found.joules / 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_energy_is_its_power_over_the_window(in_world):
    spec = resolved("kernel=sdpa_flash", "world_size=1", gpus=1)
    found, sampled_w = in_world(program.energy_and_power, 1, "cuda", experiment=spec.plain())
    (watts,) = found.watts_by_rank
    assert 50 < watts < 1500 and watts == pytest.approx(sampled_w, rel=0.15)
    assert found.joules == pytest.approx(watts * found.seconds / found.calls)
