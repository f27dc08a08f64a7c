"""The kernels of a GPU use less than half of the gate's tolerances."""

import pytest
import torch

from attention.kernels import KERNELS
from tests.gate.margins import CASES, margin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "flex"])  # which compiles for each shape
def test_right_results_use_less_than_half_of_the_tolerances(name, dtype):
    used = margin(name, dtype, CASES, "cuda")
    if not used:
        pytest.skip(f"{name} does no call of these in {dtype} here")
    assert not {place: part for place, part in used.items() if part >= 0.5}
