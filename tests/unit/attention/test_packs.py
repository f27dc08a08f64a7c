"""The lengths of a packed batch as callers give them."""

import numpy
import pytest
import torch

import attention

FORMS = {
    "list": list,
    "tensor": lambda cu: torch.tensor(cu, dtype=torch.int64),  # an empty one, too
    "int32": lambda cu: torch.tensor(cu, dtype=torch.int32),
    "numpy": numpy.array,
    "numbers of NumPy": lambda cu: [numpy.int32(n) for n in cu],
    "numbers of PyTorch": lambda cu: [torch.tensor(n) for n in cu],
}


def plan(cu_seqlens, tokens=8):
    x = torch.zeros(tokens, 2, 4)
    return attention.make("dense", kernel="math").plan(x, x, x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_come_in_many_forms(form):
    for _ in range(2):  # what was seen before is not looked at again
        found = plan(FORMS[form]([0, 3, 3, 8])).problem.cu_seqlens
        assert found == (0, 3, 3, 8) and all(type(n) is int for n in found)


@pytest.mark.parametrize("wrong", ([0, 2.0, 8], torch.tensor([0.0, 8.0]), [0, None, 8], 5, torch.tensor([[0, 2, 8]])))
def test_lengths_that_are_not_integers_are_refused(wrong):
    plan([0, 2, 8])  # a check that is kept must not stand for 2.0
    with pytest.raises(ValueError, match=r"cu_seqlens.* must be .*integer"):
        plan(wrong)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [[0, 5, 3, 8], [1, 8], [0, 7], []])
def test_lengths_that_are_none_are_refused_each_time(form, wrong):
    for _ in range(2):
        with pytest.raises(ValueError, match="must rise from 0 to the global number of tokens, 8"):
            plan(FORMS[form](wrong))
    plan([0, 7], tokens=7)
