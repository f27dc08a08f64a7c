"""The correctness check knows nothing of attention: a workload of another kind plugs in by its registration."""

import pytest
import torch

from runner.check import gate
from runner.check.errors import Compared, Error, Tolerance, verdict
from runner.launch.rank import Rank
from tests.support.composing import resolved

LIMIT = Tolerance(rel_l2=1e-6, absolute=1e-6, row=1e-5, gain=1e-5)


class Linear:
    """logits `[tokens, 1, D]` of a linear layer, whose weights are all 2; `factor` is a fault."""

    passes = ("forward",)
    factor, logits = 1.0, None

    def __init__(self):
        self.x = torch.arange(12.0).view(4, 1, 3) - 5

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


def compare(me, experiment, work, outputs) -> Compared:
    error, expected = Error(), 2 * work.x
    error.add(outputs["logits"], expected, expected.norm(dim=-1), LIMIT.absolute)
    return Compared(verdict(error.faults("logits", LIMIT)), {"logits": LIMIT})


def test_a_workload_is_checked_before_and_after_the_timing(monkeypatch):
    monkeypatch.setitem(gate.COMPARISONS, Linear, compare)
    me = Rank(0, 1, torch.device("cpu"), None, None)
    monkeypatch.setattr(me, "say", lambda *_, **__: None)
    monkeypatch.setattr(me, "gather", lambda value: [value])
    spec, work = resolved("attention=ring", "hardware=cpu", "world_size=1"), Linear()
    checked = gate.check(me, spec, work)
    assert checked.fields == {"passed": True, "why": None}
    work.run("forward")
    found = gate.check_timed(me, work, work, checked)
    assert found["passed"] and found["last"].keys() == found["negated"].keys() == {"logits"}
    work.factor = 1.01
    work.run("forward")
    why = gate.check_timed(me, work, work, checked)["why"]
    assert "the last timed iteration: logits" in why and "token 10" in why
    assert "logits rel L2" in gate.check(me, spec, work).fields["why"]


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
    error.add(torch.tensor(x).expand(64, 1, 2), value, value.norm(dim=-1), LIMIT.absolute)
    found = error.faults("out", LIMIT)
    assert len(found) == len(faults) and all(part in text for part, text in zip(faults, found, strict=True)), found
