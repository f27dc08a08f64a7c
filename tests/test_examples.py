"""The examples run as their first lines say."""

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec

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


TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[huggingface]'"
)
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@TRANSFORMERS
@pytest.mark.slow
def test_the_readme_trains_a_model_of_transformers_as_written(tmp_path):
    (code,) = re.findall(r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    losses = [float(x) for x in re.findall(r"^\d (\S+)$", run(*TWO_RANKS, str(tmp_path / "train.py")), re.MULTILINE)]
    assert len(losses) == 2
    assert sum(losses) == pytest.approx(math.log(32000), rel=0.05)  # a random model's loss
