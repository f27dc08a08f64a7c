"""What is captured and replayed when, and what a replay gives, with runs in place of captures: CUDA graphs need a GPU
(test_symmetric_gpu)."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attention
from attention import replay as replay_option
from attention.batched_copy import copy_all
from attention.gpu import cuda_graphs as graphs
from attention.profiling import Recorder, recording
from attention.transports import Transport, release
from attention.variants.registry import VARIANTS

CPU = torch.device("cpu")


def begin(): ...


synchronized = []


class Again(graphs._Graph):
    """A replay runs again, and writes into what the capture made."""

    def _captured(self, run):
        def replay():
            for i, x in zip(self.positions, run(*self.inputs), strict=True):
                if i >= len(self.inputs):
                    self.made[i - len(self.inputs)].copy_(x)

        self.graph = type("Graph", (), {"replay": staticmethod(replay)})()
        return run(*self.inputs)


class Place:
    def __init__(self, device):
        self.device, self.pool, self.done = device, (0, 1), Mock()


@pytest.fixture(autouse=True)
def runs_for_captures(monkeypatch):
    monkeypatch.setattr(graphs, "_Graph", Again)
    monkeypatch.setattr(graphs, "_Place", Place)
    monkeypatch.setattr(graphs, "capturing", lambda device: False)
    monkeypatch.setattr(graphs, "current", Mock())
    monkeypatch.setattr(replay_option, "graphs_obstacle", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)


def captured(replays: graphs.GraphReplay) -> list[bool]:
    return [graph is not None for graph in replays.graphs.values()]


def test_a_stage_is_run_twice_then_replayed_and_leaves_its_inputs_alone():
    replays, calls = graphs.GraphReplay(copy_all), []

    def run(x, y):
        calls.append((x, y))
        total = x + y
        return total, x, total, y.float()

    x, y = torch.arange(6.0, dtype=torch.float64).view(2, 3).t(), torch.ones(3, 2, dtype=torch.float64)
    before = x.clone()
    for already in (False, True):
        found = replays("pass", begin, run, (x, y))
        assert calls[-1][0].is_contiguous() and torch.equal(found[0], x + y)
        assert captured(replays) == [already]
    for _ in range(2):
        y = y + 1
        total, same, again, narrow = replays("pass", begin, run, (x, y))
        assert captured(replays) == [True]
        assert torch.equal(total, x + y) and again is total
        assert same is x  # an input that is a result is the caller's own
        assert torch.equal(narrow, y.float())
    assert replays("pass", begin, run, (x, y))[0] is not total  # which is the caller's, and not written again
    assert torch.equal(x, before)


def test_names_and_shapes_have_graphs_of_their_own_and_the_oldest_makes_room(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 3)
    replays = graphs.GraphReplay(copy_all)

    def doubled(name, n):
        (out,) = replays(name, begin, lambda x: (2 * x,), (torch.ones(n),))
        assert torch.equal(out, torch.full((n,), 2.0))

    for _ in range(3):
        for name, n in (("a", 2), ("a", 3), ("b", 2)):
            doubled(name, n)
    assert captured(replays) == [True] * 3
    doubled("a", 2)  # needed again, so the next oldest goes
    before = len(synchronized)
    doubled("c", 2)
    assert len(synchronized) == before + 1
    assert captured(replays) == [True, True, False]
    assert {form[0] for form in replays.graphs} == {"a", "b", "c"}
    release()  # symmetric memory is given back
    assert not replays.graphs and not replays.places


@pytest.mark.parametrize("by", ["recorder", "capture"])
def test_what_is_recorded_or_captured_by_the_caller_is_run_as_it_is(by, monkeypatch):
    replays = graphs.GraphReplay(copy_all)
    monkeypatch.setattr(graphs, "capturing", lambda device: by == "capture")
    with recording(Recorder(CPU)) if by == "recorder" else nullcontext():
        for _ in range(3):
            replays("pass", begin, lambda x: (x,), (torch.ones(2),))
    assert not replays.graphs


@pytest.mark.parametrize("pack", ({}, {"cu_seqlens": [0, 5, 24]}), ids=str)
def test_a_replayed_function_gives_what_a_plain_one_gives(pack):
    plain, replayed = (attention.make("dense", replay=way) for way in ("none", "graphs"))
    for i in range(8):
        results = []
        for fn in (plain, replayed):
            torch.manual_seed(i)
            qkv = torch.randn((24, 8, 16) if pack else (1 + i % 2, 24, 8, 16), requires_grad=True)
            inputs = qkv.split((4, 2, 2), -2)
            if i > 5:
                with torch.inference_mode(i == 6), torch.no_grad():
                    results.append([fn(*inputs, causal=True, **pack).clone()])
                continue
            out = fn(*inputs, causal=True, scale=0.1 + i % 2, **pack)
            out = out * checkpoint(fn, *inputs, causal=True, use_reentrant=False, **pack)
            once = torch.autograd.grad(out.square().sum(), qkv, retain_graph=True, create_graph=i == 3)
            results.append([out, *once, *torch.autograd.grad(out.sum(), qkv)])
        torch.testing.assert_close(*results)
    assert not plain.graphs.graphs and any(captured(replayed.graphs))


@pytest.mark.parametrize(
    "name, options, ranks, reason",
    [
        ("zigzag_llama3", {"grouping": "packed"}, 1, "grouping=packed sends lengths"),
        ("tree", {}, 1, "a decode's keys grow"),
        ("zigzag", {}, 2, "transport=none may hang"),
        ("zigzag", {}, 1, "None"),
    ],
)
def test_what_no_graph_can_hold_is_refused(monkeypatch, name, options, ranks, reason):
    monkeypatch.undo()
    variant, problem = VARIANTS[name], SimpleNamespace(ranks=ranks)
    plan = SimpleNamespace(variant=variant, options=variant.parse(options), transport=Transport(), problem=problem)
    assert reason in str(replay_option.graphs_obstacle(plan, torch.device("cuda", 0)))


@pytest.mark.parametrize("or_eager", [False, True])
def test_a_failed_capture_leaves_nothing_to_replay_and_no_place(or_eager, monkeypatch):
    def broken(self, run):
        raise attention.UnsupportedCall("replay=graphs: this call can't be captured: no")

    monkeypatch.setattr(Again, "_captured", broken)
    replays = graphs.GraphReplay(copy_all, or_eager=or_eager)

    def call():
        return replays("pass", begin, lambda x: (2 * x,), (torch.ones(2),))[0].tolist()

    call()
    if or_eager:
        with pytest.warns(UserWarning, match="can't be captured: no; it stays eager"):
            call()
        assert [call() for _ in range(3)] == [[2, 2]] * 3  # and is not captured again
    else:
        with pytest.raises(attention.UnsupportedCall):
            call()
        assert captured(replays) == [False]
    assert not replays.places
