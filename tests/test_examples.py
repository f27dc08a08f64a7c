"""The examples run as their first lines say."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_block_has_the_same_loss_and_gradients_on_one_rank_and_on_two():
    pattern = r"(\d) ranks: loss ([\d.]+), gradient norm ([\d.]+)"
    example = "examples/transformer_block.py"
    alone = re.search(pattern, run(example))
    both = re.search(pattern, run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example))
    assert (alone[1], both[1]) == ("1", "2")
    for i in (2, 3):
        assert float(both[i]) == pytest.approx(float(alone[i]), abs=2e-6)
