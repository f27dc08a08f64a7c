"""Which passes are run, recorded and played, on CPU tensors in place of a GPU's, of which there is one stream."""

import pytest
import torch

import attention
from attention.planner import MOST_PACKS
from attention.profiling import Recorder, recording
from attention.runtime import launch_replay, launch_trace
from attention.runtime.launch_replay import MOST, TRIES, Launches
from attention.runtime.launch_trace import Tape


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    for name, found in (("getDevice", None), ("getCurrentStream", (0, 0, 0)), ("getCurrentRawStream", 0)):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_, found=found: found, raising=False)
    monkeypatch.setattr(launch_replay, "capturing", lambda device: False)


class Pass:
    """Copies its input, by what a tape knows of or not."""

    def __init__(self, known=True):
        self.known, self.runs = known, 0

    def __call__(self, *inputs):
        self.runs += 1
        if not self.known:
            launch_trace.cannot("not known")
        return tuple(torch.empty_like(x).copy_(x) for x in inputs)


def call(passes, run, *inputs, name="forward", state=0):
    found = passes(name, state, run, inputs)
    for x, y in zip(found, inputs, strict=True):
        assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


def test_a_pass_is_run_then_recorded_then_played():
    passes, run = Launches(), Pass()
    for expected in (1, 2, 2, 2):
        call(passes, run, torch.randn(3, 4))
        assert run.runs == expected
    assert [isinstance(x, Tape) for x in passes.tapes.values()] == [True]


@pytest.mark.parametrize(
    "other",
    [
        {"name": "backward"},
        {"state": 1},
        {"x": torch.randn(4, 4)},
        {"x": torch.randn(4, 3).t()},
        {"x": torch.randn(3, 4, dtype=torch.float64)},
        {"x": torch.randn(13)[1:].view(3, 4)},
    ],
    ids=("name", "state", "shape", "strides", "dtype", "address"),
)
def test_what_a_pass_depends_on_has_a_tape_of_its_own(other):
    other, passes, run = dict(other), Launches(), Pass()
    x = other.pop("x", None)
    for _ in range(3):
        call(passes, run, torch.randn(3, 4))
    assert run.runs == 2
    for expected in (3, 4, 4):
        call(passes, run, torch.randn(3, 4) if x is None else x, **other)
        assert run.runs == expected


def test_what_another_plan_of_the_function_has_a_tape_of_is_recorded_at_once():
    known, run = set(), Pass()
    for expected in (2, 3, 4):
        passes = Launches(known)
        for _ in range(3):
            call(passes, run, torch.randn(3, 4))
        assert run.runs == expected
    call(Launches(known), run, torch.randn(4, 3))
    call(Launches(known), run, torch.randn(4, 3))
    assert run.runs == 6  # of which there is none yet
    run.known = False  # as where something is compiled for this plan alone
    passes = Launches(known)
    call(passes, run, torch.randn(3, 4))
    run.known = True
    for expected in (8, 8):
        call(passes, run, torch.randn(3, 4))
        assert run.runs == expected


def test_plans_of_a_functions_packs_know_of_each_others_tapes():
    fn = attention.make("ulysses", kernel="math")
    x = torch.zeros(96, 2, 8)
    first, second = (fn.plan(x, x, x, cu_seqlens=cu).launches for cu in ((0, 80, 96), (0, 16, 96)))
    assert first is not second and first.known is second.known
    assert attention.make("ulysses", kernel="math").plan(x, x, x, cu_seqlens=(0, 96)).launches.known is not first.known


def test_what_depends_on_more_is_run():
    passes, run = Launches(), Pass()
    for _ in range(4):
        call(passes, run, torch.randn(3), state=None)
    assert run.runs == 4 and not passes.tapes


def test_a_pass_whose_phases_are_recorded_is_run():
    passes, run = Launches(), Pass()
    for _ in range(3):
        call(passes, run, torch.randn(3))
    with recording(Recorder(torch.device("cpu"))):
        call(passes, run, torch.randn(3))
    assert run.runs == 3


def test_what_cannot_be_played_is_tried_a_few_times():
    passes, run = Launches(), Pass(known=False)
    for _ in range(1 + TRIES):
        call(passes, run, torch.randn(3))
    (why,) = passes.tapes.values()
    assert why == ["not known"] * TRIES
    run.known = True  # which nobody looks at any more
    for _ in range(2):
        call(passes, run, torch.randn(3))
    assert run.runs == TRIES + 3


def test_what_cannot_be_played_at_first_is_played_later():
    passes, run = Launches(), Pass(known=False)
    for _ in range(2):
        call(passes, run, torch.randn(3))
    run.known = True
    for expected in (3, 3, 3):
        call(passes, run, torch.randn(3))
        assert run.runs == expected


def test_one_tensor_for_two_inputs_is_run_and_two_are_played():
    passes, run, x = Launches(), Pass(), torch.randn(3)
    for _ in range(5):
        call(passes, run, x, x)
    assert run.runs == 5
    for _ in range(5):
        call(passes, run, torch.randn(3), torch.randn(3))
    assert run.runs == 7


def test_only_so_many_are_kept():
    passes, run = Launches(), Pass()
    for n in range(1, MOST + 4):
        for _ in range(3):
            call(passes, run, torch.randn(n))
    assert len(passes.tapes) == MOST
    before = run.runs
    call(passes, run, torch.randn(MOST + 3))
    assert run.runs == before
    call(passes, run, torch.randn(1))
    assert run.runs == before + 1


def test_an_exception_while_recording_leaves_it_to_the_next_call():
    passes, run = Launches(), Pass()
    call(passes, run, torch.randn(3))

    def fails(x):
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        passes("forward", 0, fails, (torch.randn(3),))
    for expected in (2, 2):
        call(passes, run, torch.randn(3))
        assert run.runs == expected


def test_plans_of_the_packs_used_last_are_kept():
    fn = attention.make("ulysses", kernel="math")
    x = torch.zeros(96, 2, 8)

    def use(*cu):
        given = (x, cu) if cu else (x[None], None)
        fn.plan(*[given[0]] * 3, cu_seqlens=given[1]).launches.tapes["of this"] = []

    def kept():
        return [plan.problem.cu_seqlens for plan in fn.plans.values() if plan.launches.tapes]

    use()
    for _ in range(2):
        for i in range(1, MOST_PACKS + 5):
            use(0, 80, 96)
            use(0, i, 96)
        assert len(fn.plans) == MOST_PACKS + 1
        assert set(kept()) == {(0, 96), (0, 80, 96), *((0, i, 96) for i in range(6, MOST_PACKS + 5))}
