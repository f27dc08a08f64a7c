"""A few minutes' look at everything that runs on a GPU: `pytest -m gpu_smoke`. Each exchange between ranks, which share a GPU
where there is one, and replays; kernels, decodes, calls beside replays, waits that end and the command line are marked beside
their own tests."""

import pytest

from tests.support.cases import Case, assert_right
from tests.support.gpus import need_one

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_smoke, need_one]


@pytest.mark.parametrize("name", ("ring", "zigzag", "ring_allgather", "zigzag_llama3", "ulysses", "usp"))
def test_an_exchange_matches_fp64(pool, name):
    common = {"head_dim": 64, "seed": 1, "dtype": "bf16", "transport": "auto"}
    assert_right(pool, [Case(name, 2, 1024, 8, 2, lengths=x, **common) for x in (None, (256, 768))], "cuda")
