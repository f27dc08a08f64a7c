"""What is sampled while timing."""

import time

import pytest
import torch

from runner import environment
from runner.measure.sampler import CLOCKS, sampling, summary
from runner.record.fields import Range


def test_a_summary_has_the_range_of_each_number_and_all_reasons_seen():
    series = dict.fromkeys(CLOCKS[1], [None] * 3) | {"sm_mhz": [5, 9, 6], "throttle_reasons": [0, 0x44, 1 << 20]}
    assert summary(series | {"power_w": [7000, None, 9000]}) == dict.fromkeys(CLOCKS[1]) | {
        "samples": 3,
        "sm_mhz": Range(min=5, median=6, max=9),
        "power_w": Range(min=7, median=8, max=9),
        "throttle_reasons": ["bit 20", "hw_thermal_slowdown", "sw_power_cap"],
    }


@pytest.mark.parametrize("kind", ["clocks", "energy"])
def test_a_cpu_has_nothing_to_sample_and_a_gpu_that_nvml_does_not_know_a_reason(monkeypatch, kind):
    monkeypatch.setattr(environment, "gpu_uuid", lambda _: "GPU-none")
    with sampling(torch.device("cpu"), kind) as nothing, sampling(torch.device("cuda"), kind) as sampled:
        pass
    assert nothing == {} and sampled["unavailable"].startswith("NVML: ")
    with pytest.raises(ValueError, match="of the body"), sampling(torch.device("cuda"), kind):
        raise ValueError("of the body")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_clocks_are_sampled_while_it_works():
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with sampling(x.device) as sampled:
        until = time.perf_counter() + 2
        while time.perf_counter() < until:
            x @ x
            torch.cuda.synchronize()
    gpu = summary(sampled["series"])
    assert gpu["sm_mhz"].max > 500 and gpu["power_w"].max > 50 and 10 < gpu["temperature_c"].max < 110
