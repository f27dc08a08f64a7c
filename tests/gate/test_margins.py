"""Right results of the kernels use less than half of the gate's tolerances."""

import pytest

from tests.gate.margins import SMALL, margin


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["math", "sdpa_flash"])
def test_right_results_use_less_than_half_of_the_tolerances(name, dtype):
    used = margin(name, dtype, SMALL)
    assert used and not {place: part for place, part in used.items() if part >= 0.5}
