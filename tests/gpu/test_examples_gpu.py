"""The examples of models of transformers and of FSDP2 on GPUs."""

import re

import pytest

from tests.program.test_examples import TRANSFORMERS, free_port, run
from tests.support.gpus import GPUS, need_one

pytestmark = [pytest.mark.gpu, need_one]
RANKS = min(GPUS, 2)


def launched(*command):
    ranks = ("--nproc-per-node", str(RANKS), "--master-port", str(free_port()))
    return run("-m", "torch.distributed.run", *ranks, *command)


TRAINED = ["huggingface_train.py", "huggingface_trainer.py", "huggingface_trainer.py --fsdp"]


@pytest.mark.parametrize("example", ["fsdp2_train.py", *(pytest.param(x, marks=TRANSFORMERS) for x in TRAINED)])
def test_the_loss_of_a_trained_model_falls(example):
    losses = [float(x) for x in re.findall(r"loss (\S+)$", launched(*f"examples/{example}".split()), re.MULTILINE)]
    assert len(losses) >= 5
    assert losses[-1] < losses[0] - 0.1


@TRANSFORMERS
def test_generated_tokens_are_those_of_one_rank():
    example, pattern = ("examples/huggingface_generate.py", "--new", "6"), r"keys and values each: (\[.*\])"
    assert re.findall(pattern, launched(*example)) == re.findall(pattern, run(*example)) != []
