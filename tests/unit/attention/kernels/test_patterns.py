"""What kernels that take patterns do on a CPU."""

import pytest
import torch

from attention.kernels import KERNELS, Call
from tests.support.naive import TOLERANCES, assert_lse, inputs, reference, relative
from tests.support.patterns import PATTERNS


@pytest.mark.parametrize(
    "pattern", ["window_and_global", "documents", "rows_without_keys", "prefix_documents", "nothing"]
)
def test_the_forward_of_flex_matches_plain_attention(pattern):
    """PyTorch has no backward of it on a CPU."""
    made = PATTERNS[pattern]
    q, k, v, dout, call = inputs(lambda: Call(0.25, pattern=made), (made.n_q, made.n_k), 4, 2, 16, torch.float32)
    out, lse = KERNELS["flex"].forward(q, k, v, call)
    expected_out, expected_lse, *_ = reference(q, k, v, dout, call)
    assert relative(out, expected_out) < TOLERANCES[torch.float32][0]
    assert_lse(lse, expected_lse, TOLERANCES[torch.float32][0])
