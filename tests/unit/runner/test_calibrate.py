"""`python -m runner.calibrate`: the rates of kernels, from results of one GPU."""

from dataclasses import replace
from itertools import accumulate, product

import pytest

from attention.geometry.counts import Shapes
from runner import calibrate
from runner.costs import rates
from runner.costs.model import Task
from runner.costs.rates import CallClass
from runner.report import runs
from tests.support.paths import ROOT

CLASSES = [
    CallClass(*values)
    for values in product((64,), ("gqa", "mha"), ("causal", "window"), ("dense", "packed"), ("long", "short"))
]


def test_every_class_is_that_of_the_call_that_represents_it():
    for call in CLASSES:
        tokens = rates.TOKENS[call.length]
        lengths, mask = rates.sequences(call, tokens), rates.mask_of(call, tokens)
        shapes = Shapes(1, 32, 32 if call.heads == "mha" else 8, call.head_dim, 2)
        task = Task(tuple(accumulate(lengths, initial=0)), 1, mask, shapes, call.layout == "packed")
        assert calibrate.call_class(task) == call
        assert calibrate.call_class(replace(task, cu_seqlens=(0, tokens + 1))) is None


def test_the_packages_table_is_what_the_programs_own_results_give():
    table = {(r.gpu, r.call, r.kernel): r for r in rates.table()}
    measured = calibrate.measured(runs.read([ROOT / "results/h200-x1/kernels"]))
    known = [(r, table[r.gpu, r.call, r.kernel]) for r in measured if (r.gpu, r.call, r.kernel) in table]
    assert len(known) > 40
    for one, other in known:
        assert (one.forward, one.backward) == pytest.approx((other.forward, other.backward), rel=0.1)
        assert "torch=2.11.0" in one.versions and "cudnn=91900" in one.versions
