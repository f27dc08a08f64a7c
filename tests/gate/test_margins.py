"""Right results of the kernels use less than half of the gate's tolerances. `tests.gate.margins` prints by how much, over more
and longer cases."""

import pytest

from tests.gate.margins import SMALL, margin


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["math", "sdpa_flash"])
def test_right_results_use_less_than_half_of_the_tolerances(name, dtype):
    found = margin(name, dtype, SMALL)
    assert found is not None
    assert max(found.row, found.gain, found.lse) < 0.5, found
