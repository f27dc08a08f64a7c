"""The correctness check knows nothing of attention: a workload of another kind plugs in by its registration."""

import pytest
import torch

from runner.check import gate
from runner.check.errors import Compared, Error, Tolerance, verdict
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from tests.support.composing import resolved

LIMITS = {"logits": Tolerance(rel_l2=1e-6, absolute=1e-6, row=1e-5, gain=1e-5)}


class Linear:
    """logits `[tokens, 1, D]` of a linear layer, whose weights are all 2; `factor` is a fault."""

    passes = ("forward",)

    def __init__(self):
        self.x = torch.arange(12.0).view(4, 1, 3) - 5
        self.factor = 1.0
        self.release()

    def run(self, which: str) -> None:
        self.logits = 2 * self.factor * self.x

    def outputs(self) -> dict[str, torch.Tensor]:
        return {} if self.logits is None else {"logits": self.logits}

    def negate(self) -> None:
        self.x.neg_()

    def release(self) -> None:
        self.logits = None

    def rows(self, name: str) -> torch.Tensor:
        return torch.arange(4) + 100


def compare(me: Rank, experiment: Experiment, work: Linear, outputs) -> Compared:
    error, expected = Error(), 2 * work.x
    error.add(outputs.pop("logits"), expected, expected.norm(dim=-1), LIMITS["logits"].absolute)
    return Compared(verdict(error.faults("logits", LIMITS["logits"])), LIMITS)


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setitem(gate.COMPARISONS, Linear, compare)
    me = Rank(0, 1, torch.device("cpu"), None, None)
    monkeypatch.setattr(me, "say", lambda *_, **__: None)
    monkeypatch.setattr(me, "gather", lambda value: [value])
    spec = resolved("attention=ring", "hardware=cpu", "world_size=1")
    return lambda work: (me, work, gate.check(me, spec, work))


def test_a_right_workload_passes_before_and_after_the_timing(check):
    me, work, checked = check(Linear())
    assert checked.fields == {"passed": True, "why": None}
    work.run("forward")
    found = gate.check_timed(me, work, work, checked)
    assert found["passed"] and found["last"].keys() == found["negated"].keys() == {"logits"}


def test_a_wrong_one_fails_before_and_one_that_goes_wrong_later_after_the_timing(check):
    wrong = Linear()
    wrong.factor = 1.01
    assert "logits rel L2" in check(wrong)[-1].fields["why"]
    me, work, checked = check(Linear())
    work.factor = 1.01
    work.run("forward")
    why = gate.check_timed(me, work, work, checked)["why"]
    assert "the last timed iteration: logits" in why and "token 10" in why
