"""The kernels of a GPU use less than half of the gate's tolerances."""

import pytest
import torch

from attention.kernels import KERNELS
from tests.gate.test_planted_faults import worst_parts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CALLS = ["seq_len=4096", "seq_len=2048 causal=false", "seq_len=512 head_dim=256", "seq_len=512 head_dim=8 softcap=15"]
CALLS += ["seq_len=1024 window=[70,0]", "seq_len=1024 seqlens=[100,1,300,29,594]"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "flex"])  # which compiles for each shape
def test_right_results_use_less_than_half_of_the_tolerances(in_world, name, dtype):
    parts = worst_parts(in_world, f"kernel={name} dtype={dtype} hardware=cuda", CALLS)
    if not parts:
        pytest.skip(f"{name} does no call of these in {dtype} here")
    assert max(parts.values()) < 0.5, parts
