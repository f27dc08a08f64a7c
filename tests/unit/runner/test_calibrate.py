"""`python -m runner.calibrate`: the rates of kernels, from results of one GPU."""

import pytest

from runner import calibrate
from runner.costs import rates
from runner.report import runs
from tests.support.paths import ROOT


def test_the_packages_table_is_what_the_programs_own_results_give():
    table = {(r.gpu, r.call, r.kernel): r for r in rates.table()}
    measured = calibrate.measured(runs.read([ROOT / "results/h200-x1/kernels"]))
    known = [(r, table[r.gpu, r.call, r.kernel]) for r in measured if (r.gpu, r.call, r.kernel) in table]
    assert len(known) > 40
    for one, other in known:
        assert (one.forward, one.backward) == pytest.approx((other.forward, other.backward), rel=0.1)
