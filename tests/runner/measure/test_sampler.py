"""What is sampled while timing."""

import os
import time

import pytest
import torch

from runner.measure import sampler, timing
from runner.measure.sampler import Sampler, reasons, sampling, summary
from runner.measure.statistics import summarize
from runner.measure.stopwatch import CudaStopwatch


def test_throttle_reasons_have_the_drivers_names():
    assert reasons(0) == []
    assert reasons(0x4 | 0x40) == ["sw_power_cap", "hw_thermal_slowdown"]
    assert reasons(1 << 20) == ["bit 20"]


def test_a_summary_has_the_range_of_each_number_and_all_reasons_seen():
    readings = [
        {"a": {"sm_mhz": mhz, "power_w": None, "throttle_reasons": bits}} for mhz, bits in ((5, 0), (9, 4), (6, 1))
    ]
    assert summary(readings)["a"] == {
        "samples": 3,
        "sm_mhz": {"min": 5, "median": 6, "max": 9},
        "power_w": None,
        "throttle_reasons": ["gpu_idle", "sw_power_cap"],
    }


@pytest.fixture
def forgotten():
    yield
    while sampler._samplers:
        sampler._samplers.popitem()[1].close()


def test_a_cpu_is_sampled_meanwhile_by_one_process_of_each_node(forgotten):
    for _ in range(2):
        with sampling("cpu", here=True) as found:
            time.sleep(0.3)
        (cpu,) = found["of"].values()
        assert cpu["samples"] >= 2
        assert cpu["running"]["max"] >= 1 and cpu["load"]["min"] >= 0
    assert len(sampler._samplers) == 1
    with sampling("cpu", here=False) as found:
        pass
    assert found == {}


def test_a_sampler_that_is_lost_is_said_and_does_not_hold_up_the_run(forgotten):
    with sampling("cpu", here=True) as found:
        sampler._samplers["cpu"].process.kill()
        sampler._samplers["cpu"].process.wait()
    assert "unavailable" in found
    with sampling("cpu", here=True) as found:
        pass
    assert found["of"]["cpu"]["samples"] >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_without_nvml_it_is_said(forgotten):
    with sampling("cuda", here=True) as found:
        pass
    assert "libnvidia-ml" in found["unavailable"]


def test_a_sampler_ends_with_its_input():
    lonely = Sampler("cpu")
    lonely.input.close()
    assert lonely.process.wait(20) == 0
    lonely.output.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_sampling_costs_what_is_timed_less_than_a_percent(forgotten):
    q = torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)
    sizes = {"long": q, "short": q[:, :, :1024].contiguous()}

    class Work:
        passes = ("forward",)

        def __init__(self, x):
            self.x = x

        def run(self, which: str) -> None:
            torch.nn.functional.scaled_dot_product_attention(self.x, self.x, self.x, is_causal=True)

    watch = CudaStopwatch(torch.device("cuda", torch.cuda.current_device()), together=False)
    for name, x in sizes.items():
        work, medians = Work(x), {True: [], False: []}
        timing.warm(work, watch, 3, 1000, lambda more: more)
        for turn in range(10):  # of half a second each, with and without
            runs = 100 if name == "long" else 4000
            with sampling("cuda", here=bool(turn % 2)):
                medians[bool(turn % 2)].append(summarize(timing.sample(work, watch, runs)["forward"]).median)
        assert min(medians[True]) < 1.01 * min(medians[False]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_clocks_are_sampled_while_it_works(forgotten):
    from runner import environment

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with sampling("cuda", here=True) as found:
        until = time.perf_counter() + 1
        while time.perf_counter() < until:
            x @ x
            torch.cuda.synchronize()
    gpu = found["of"][environment.gpu_uuid(torch.cuda.current_device())]
    assert gpu["samples"] >= 5
    assert gpu["sm_mhz"]["max"] > 500 and gpu["power_w"]["max"] > 50 and 10 < gpu["temperature_c"]["max"] < 110
    assert environment.gpu_uuid(0) in {each["uuid"] for each in environment.gpu_state()} or os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    )
