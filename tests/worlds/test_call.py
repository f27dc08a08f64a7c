"""What a caller may give and do: functions in groups, modules, copies and pickles."""

import copy
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import attention
from attention.api import ContextParallel
from tests.jobs import groups, training

torch.set_num_threads(1)


def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(("queries", "keys", "prefix"), ((0, 4, None), (0, 0, 3), (1, 0, None), (1, 0, 3)))
@pytest.mark.parametrize("name", ("tree", "ring_decode"))
def test_a_decode_may_have_no_queries_and_no_keys(name, queries, keys, prefix):
    q, k = torch.randn(2, queries, 4, 8), torch.randn(2, keys, 2, 8)
    shared = None if prefix is None else (torch.randn(1, prefix, 2, 8),) * 2
    out, lse = attention.make(name)(q, k, k, prefix=shared, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, queries)
    assert prefix or ((out == 0).all() and (lse == -torch.inf).all())


def test_a_window_may_be_of_numpys_integers():
    fn, tensors = attention.make("ring"), qkv()
    assert torch.equal(fn(*tensors, window=np.array([3, 0])), fn(*tensors, window=(3, 0)))


def test_a_function_made_before_the_process_group_is_refused_in_it(in_world):
    """Each rank would attend to its own shard alone."""
    for said in in_world(groups.made_alone, 2):
        assert re.search(r"made or unpickled before init_process_group, and there are 2 ranks now: ", said)


def test_a_rank_outside_the_group_is_refused(in_world):
    for said in in_world(groups.outside, 2, kinds=["ring", "auto"]):
        assert re.fullmatch(r"group=.*: rank 1 is not in the group; call make on the group's ranks only", said)


def test_a_second_derivative_is_refused_in_a_world(in_world):
    for name, same, refusals in in_world(
        training.second_derivatives, 2, names=["ring", "zigzag", "zigzag_llama3", "ring_allgather", "ulysses"]
    ):
        assert same, name
        assert refusals == [f"create_graph=True: {name} has no second derivative"] * 3 + [
            "create_graph=True: unshard has no second derivative"
        ]


@pytest.mark.parametrize("name", ("ring", "llama3", "ulysses"))
def test_an_output_without_a_gradient_can_be_changed_in_place(name):
    bias = torch.randn(8, requires_grad=True)
    out = attention.make(name)(*(x.detach() for x in qkv()), causal=True)
    out += bias
    assert torch.autograd.grad(out.sum(), bias)[0].eq(16).all()
    with torch.inference_mode():
        attention.make(name)(*qkv(), causal=True).add_(1)


class Layer(torch.nn.Module):
    def __init__(self, fn: ContextParallel):
        super().__init__()
        self.fn, self.weight = fn, torch.nn.Parameter(torch.ones(8))

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return self.fn(*(x * self.weight.to(x.dtype) for x in xs), causal=True)


@pytest.mark.parametrize("called", (False, True))
def test_a_module_that_holds_a_function_can_be_copied_and_pickled(called):
    layer, xs = Layer(attention.make("zigzag_llama3", kernel="math", deterministic=True, heads_k_stride=1)), qkv()
    if called:
        layer(*xs).sum().backward()
    for fn in (copy.deepcopy(layer).fn, pickle.loads(pickle.dumps(layer)).fn, copy.copy(layer.fn)):
        assert fn is not layer.fn and fn.variant is layer.fn.variant and not fn.plans and not fn.transports
        assert (fn.settings, fn.group, fn.rank, fn.world) == (layer.fn.settings, layer.fn.group, 0, 1)
        assert torch.equal(fn(*xs, causal=True), layer.fn(*xs, causal=True))
    auto = attention.make("auto", tokens=8, heads=2, head_dim=16, dtype=torch.float32)
    assert copy.deepcopy(auto).choice == pickle.loads(pickle.dumps(auto)).choice == auto.choice is not None


def test_functions_over_groups_can_be_copied_and_over_the_default_one_pickled(in_world):
    same_group, same, refusal = in_world(training.copied, 2)
    assert same_group and same
    assert re.match(r"ring\(rank 0 of 2, kernel=auto\): its process group can't be pickled; make it", refusal)


def test_an_import_sets_no_environment_variable():
    code = """
import os
before = dict(os.environ)
import attention, attention.transports, attention.transports.symmetric, attention.kernels.flash4
assert dict(os.environ) == before, set(os.environ) - set(before)
"""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("TORCH_SYMM")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
