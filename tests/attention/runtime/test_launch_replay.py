"""Which calls are run, recorded and replayed, on CPU tensors, as on a GPU with a single stream."""

import gc
import sys

import pytest
import torch

import attention
from attention.planner import MOST_PACKED_PLANS
from attention.profiling import Recorder, recording
from attention.runtime import launch_replay, private
from attention.runtime.launch_replay import MOST, TRIES, LaunchReplay
from attention.runtime.launch_trace import LaunchTrace
from attention.runtime.strategy import Key, eager
from attention.runtime.submit import refuse_recording


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    for name, found in (("current_device", None), ("stream_id", (0, 0, 0)), ("raw_stream", 0)):
        monkeypatch.setattr(private, name, lambda *_, found=found: found)
    monkeypatch.setattr(launch_replay, "capturing", lambda device: False)


class Owner: ...


OWNER = Owner()


class Pass:
    """Copies its input; with `known=False` in a way that cannot be recorded."""

    def __init__(self, known=True):
        self.known, self.runs = known, 0

    def __call__(self, *inputs):
        self.runs += 1
        if not self.known:
            refuse_recording("not known")
        return tuple(torch.empty_like(x).copy_(x) for x in inputs)


def call(passes, run, *inputs, name="forward", state=0, owner=OWNER):
    found = passes(Key(owner, name, state), run, inputs)
    for x, y in zip(found, inputs, strict=True):
        assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


def test_a_stage_is_run_then_recorded_then_replayed():
    passes, run = LaunchReplay(), Pass()
    for expected in (1, 2, 2, 2):
        call(passes, run, torch.randn(3, 4))
        assert run.runs == expected
    assert [isinstance(x, LaunchTrace) for x in passes.traces[OWNER].values()] == [True]


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
def test_each_thing_that_a_stage_depends_on_has_a_trace_of_its_own(other):
    other, passes, run = dict(other), LaunchReplay(), Pass()
    x = other.pop("x", None)
    for _ in range(3):
        call(passes, run, torch.randn(3, 4))
    assert run.runs == 2
    for expected in (3, 4, 4):
        call(passes, run, torch.randn(3, 4) if x is None else x, **other)
        assert run.runs == expected


def test_a_stage_that_another_plan_of_the_function_has_traced_is_recorded_at_once():
    passes, run = LaunchReplay(), Pass()
    plans = [Owner() for _ in range(5)]
    for expected, plan in zip((2, 3, 4), plans, strict=False):
        for _ in range(3):
            call(passes, run, torch.randn(3, 4), owner=plan)
        assert run.runs == expected
    for plan in plans[:2]:
        call(passes, run, torch.randn(4, 3), owner=plan)
    assert run.runs == 6  # no trace of this shape yet
    run.known = False  # as where something is compiled for this plan alone
    call(passes, run, torch.randn(3, 4), owner=plans[3])
    run.known = True
    for expected in (8, 8):
        call(passes, run, torch.randn(3, 4), owner=plans[3])
        assert run.runs == expected
    before = len(passes.traces)
    del plans, plan
    gc.collect()
    assert len(passes.traces) == 0 < before  # a trace lives as long as its plan


def test_functions_do_not_share_traces():
    first, second = (attention.make("ulysses", kernel="math", replay="launches") for _ in range(2))
    assert first.replay.launches is not second.replay.launches


def test_a_stage_with_unknown_state_is_run():
    passes, run = LaunchReplay(), Pass()
    for _ in range(4):
        call(passes, run, torch.randn(3), state=None)
    assert run.runs == 4 and not passes.traces


def test_a_stage_whose_phases_are_recorded_is_run():
    passes, run = LaunchReplay(), Pass()
    for _ in range(3):
        call(passes, run, torch.randn(3))
    with recording(Recorder(torch.device("cpu"))):
        call(passes, run, torch.randn(3))
    assert run.runs == 3


def test_a_stage_that_cannot_be_replayed_is_tried_a_few_times():
    passes, run = LaunchReplay(), Pass(known=False)
    for _ in range(TRIES):
        call(passes, run, torch.randn(3))
    with pytest.warns(UserWarning, match="replay=launches: this forward stays eager: not known"):
        call(passes, run, torch.randn(3))
    (why,) = passes.traces[OWNER].values()
    assert why == ["not known"] * TRIES
    run.known = True  # too late: it is not tried again
    for _ in range(2):
        call(passes, run, torch.randn(3))
    assert run.runs == TRIES + 3


def test_a_stage_that_cannot_be_replayed_at_first_is_replayed_later():
    passes, run = LaunchReplay(), Pass(known=False)
    for _ in range(2):
        call(passes, run, torch.randn(3))
    run.known = True
    for expected in (3, 3, 3):
        call(passes, run, torch.randn(3))
        assert run.runs == expected


def test_one_tensor_for_two_inputs_is_run_and_two_tensors_are_replayed():
    passes, run, x = LaunchReplay(), Pass(), torch.randn(3)
    for _ in range(5):
        call(passes, run, x, x)
    assert run.runs == 5
    for _ in range(5):
        call(passes, run, torch.randn(3), torch.randn(3))
    assert run.runs == 7


def test_only_so_many_are_kept():
    passes, run = LaunchReplay(), Pass()
    for n in range(1, MOST + 4):
        for _ in range(3):
            call(passes, run, torch.randn(n))
    assert len(passes.traces[OWNER]) == MOST
    before = run.runs
    call(passes, run, torch.randn(MOST + 3))
    assert run.runs == before
    call(passes, run, torch.randn(1))
    assert run.runs == before + 1


def test_an_exception_while_recording_leaves_it_to_the_next_call():
    passes, run = LaunchReplay(), Pass()
    call(passes, run, torch.randn(3))

    def fails(x):
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        passes(Key(OWNER, "forward", 0), fails, (torch.randn(3),))
    for expected in (2, 2):
        call(passes, run, torch.randn(3))
        assert run.runs == expected


def test_plans_of_the_packed_batches_used_last_are_kept():
    fn = attention.make("ulysses", kernel="math")
    x = torch.zeros(96, 2, 8)
    used = {}

    def use(*cu):
        given = (x, cu) if cu else (x[None], None)
        plan = fn.plan(*[given[0]] * 3, cu_seqlens=given[1])
        used[id(plan)] = plan

    def kept():
        return [plan.problem.cu_seqlens for plan in fn.plans.values() if id(plan) in used]

    use()
    for _ in range(2):
        for i in range(1, MOST_PACKED_PLANS + 5):
            use(0, 80, 96)
            use(0, i, 96)
        assert len(fn.plans) == MOST_PACKED_PLANS + 1
        assert set(kept()) == {(0, 96), (0, 80, 96), *((0, i, 96) for i in range(6, MOST_PACKED_PLANS + 5))}


@pytest.mark.parametrize("name, options", [("dense", {}), ("zigzag", {}), ("zigzag_llama3", {"own_first": False})])
def test_by_default_a_breakpoint_in_an_executor_is_hit_in_each_call(name, options):
    fn = attention.make(name, kernel="math", **options)
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    hit: list[str] = []

    def trace(frame, event, _):
        if "attention/executors/" in frame.f_code.co_filename:
            hit.append(frame.f_code.co_name)
        return

    for _ in range(5):
        hit.clear()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            out = fn(x, x, x, causal=True)
            out.sum().backward()
        finally:
            sys.settrace(before)
        assert "forward" in hit
    assert fn.replay.strategy(fn.plan(x, x, x, causal=True)) is eager


def test_launches_that_cannot_be_replayed_are_eager_with_one_warning():
    fn = attention.make("dense", kernel="math", replay="launches")
    with pytest.warns(UserWarning) as warned:
        for tokens in (16, 16, 8):
            q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
            fn(q, k, v, causal=True)
    assert [(str(w.message).partition("=none")[0], w.filename) for w in warned] == [
        ("replay=launches: calls stay eager: transport", __file__)
    ]
