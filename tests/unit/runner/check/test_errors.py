"""Errors against a reference, and the tolerances that they exceed."""

import pytest
import torch

from runner.check.errors import Error, Tolerance

LIMIT = Tolerance(rel_l2=1e-6, absolute=1e-6, row=1e-5, gain=1e-5)


@pytest.mark.parametrize(
    ("x", "faults"),
    [
        ([torch.nan, 1.0], ["is not finite", "rel L2", "row error inf"]),
        ([1.5, 0.5], ["rel L2", "max abs 5.00e-01", "row error"]),
        ([1.01, 1.01], ["rel L2", "max abs", "row error", "is 1.010000 times the reference"]),
        ([1.0, 1.0], []),
    ],
)
def test_each_tolerance_that_is_exceeded_is_a_sentence(x, faults):
    error, value = Error(), torch.ones(64, 1, 2)
    error.add(torch.tensor(x).expand_as(value), value, value.norm(dim=-1), LIMIT.absolute)
    found = error.faults("out", LIMIT)
    assert all(part in text for part, text in zip(faults, found, strict=True)), found
