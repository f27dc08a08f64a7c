"""The examples run as their first lines say."""

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import attention
from examples.inner_attention import InnerAttention, VarlenMetadata
from tests.support.paths import ROOT
from tests.support.ports import free_port

ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_block_has_the_same_loss_and_gradients_on_one_rank_and_on_two():
    pattern = r"(\d) ranks: loss ([\d.]+), gradient norm ([\d.]+)"
    example = "examples/transformer_block.py"
    alone = re.search(pattern, run(example))
    both = re.search(pattern, run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example))
    assert (alone[1], both[1]) == ("1", "2")
    for i in (2, 3):
        assert float(both[i]) == pytest.approx(float(alone[i]), abs=2e-6)


RUNS = {
    "train alone": "1 examples/huggingface_train.py --steps 3",
    "train": "2 examples/huggingface_train.py --steps 3",
    "trainer alone": "1 examples/huggingface_trainer.py",
    "trainer": "2 examples/huggingface_trainer.py",
    "generate alone": "1 examples/huggingface_generate.py --new 6",
    "generate": "2 examples/huggingface_generate.py --new 6",
    "readme": "2 train.py",
    "data parallel": "2 examples/fsdp2_train.py --context-parallel 1",
    "context parallel": "2 examples/fsdp2_train.py",
    "inner attention": "2 examples/inner_attention.py",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of RUNS printed on its ranks; those that need transformers are left out without it."""
    readme = tmp_path_factory.mktemp("readme") / "train.py"
    (code,) = re.findall(r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    readme.write_text(code)
    runs = RUNS if find_spec("transformers") else dict(list(RUNS.items())[7:])
    plan = []
    for port, line in enumerate(runs.values(), free_port()):
        ranks, path, *arguments = line.split()
        plan.append([port if ranks == "2" else None, str(readme) if path == "train.py" else path, *arguments])
    command = [sys.executable, "-m", "tests.support.examples"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, rank, "2", json.dumps(plan)], cwd=ROOT, env=ENV, **pipes) for rank in ("0", "1")
    ]
    found = dict.fromkeys(runs, "")
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=500)
            assert rank.returncode == 0, errors
            for number, text in re.findall(r"^run (\d+)\n(.*?)(?=^run |\Z)", out, re.DOTALL | re.MULTILINE):
                found[list(runs)[int(number)]] += text
    finally:
        for rank in ranks:  # one that waits for another that failed
            rank.kill()
    return found


def numbers(pattern, text):
    return [float(x) for x in re.findall(pattern, text, re.MULTILINE)]


TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[huggingface]'"
)


@TRANSFORMERS
@pytest.mark.nightly
def test_the_readme_trains_a_model_of_transformers_as_written(printed):
    losses = numbers(r"^[01] (\S+)$", printed["readme"])
    assert len(losses) == 2
    assert sum(losses) == pytest.approx(math.log(32000), rel=0.05)  # of a random model


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("one", "other", "steps", "error"),
    [
        pytest.param("train alone", "train", 3, 2e-5, marks=TRANSFORMERS),
        pytest.param(
            "trainer alone", "trainer", 12, 1e-2, marks=TRANSFORMERS
        ),  # losses of training and evaluation, in bf16
        ("data parallel", "context parallel", 5, 2e-5),
    ],
)
def test_the_same_falling_loss_with_and_without_context_parallel_ranks(printed, one, other, steps, error):
    losses, context = (numbers(r"loss (\S+)$", printed[name]) for name in (one, other))
    assert context == pytest.approx(losses, abs=error) and len(context) == steps
    assert context[-1] < context[0] - 0.1


@TRANSFORMERS
@pytest.mark.nightly
def test_generation_gives_the_same_tokens_from_half_the_keys_on_each_of_two_ranks(printed):
    pattern = r"(\d) ranks, (\d+) bytes of keys and values each: (\[.*\])"
    alone, both = (re.search(pattern, printed[name]).groups() for name in ("generate alone", "generate"))
    assert both[2] == alone[2]
    assert int(both[1]) == pytest.approx(int(alone[1]) / 2, rel=0.05)


@pytest.mark.nightly
def test_an_inner_attention_has_the_gradients_of_one_rank_on_documents_with_a_window_and_sinks(printed):
    errors = re.findall(r"\d\.\de[-+]\d+", printed["inner attention"])
    assert len(errors) == 2
    assert max(map(float, errors)) < 2e-6


def test_an_inner_attention_permutes_the_tokens_as_its_function_shards_them_and_refuses_an_epilogue():
    inner = InnerAttention(attention.make("dense"))
    assert inner.permutation(5).tolist() == [[0, 1, 2, 3, 4]]
    lengths, q = torch.tensor([0, 3, 8]), torch.zeros(8, 4, 16)
    metadata = VarlenMetadata(lengths, lengths, 5, 5)
    for given, message in (({}, "4 heads of q, 2 of k"), ({"out_transform": max}, "out_transform: .*give sinks")):
        with pytest.raises(ValueError, match=message):
            inner(q, q[:, :2], q[:, :2], attention_metadata=metadata, **given)
