"""What a launch trace repeats and what the recorder refuses, for calls that only copy memory."""

import ctypes
import gc
import weakref

import pytest
import torch

from attention import tensors
from attention.kernels import interface
from attention.masks.band import CAUSAL
from attention.reduction import grad_sum
from attention.runtime import launch_trace
from attention.runtime.launch_recorder import LaunchRecorder, shared
from attention.runtime.launch_trace import LaunchTrace
from attention.runtime.submit import outside_recording, recording, refuse_recording, submit


def move(target: int, source: int, size: int) -> None:
    submit(ctypes.memmove, target, source, size, pointers=range(2))


def _move_all(targets: tuple[int, ...], sources: tuple[int, ...], size: int) -> None:
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target, source, size)


def move_all(targets: tuple[int, ...], sources: tuple[int, ...], size: int, keep=()) -> None:
    submit(_move_all, targets, sources, size, pointers=range(2), keep=keep)


def _negate(target: torch.Tensor, source: torch.Tensor) -> None:
    target.numpy()[...] = -source.numpy()


def negate(target: torch.Tensor, source: torch.Tensor) -> None:
    submit(_negate, target, source)


def recorded(run, *inputs) -> tuple[LaunchTrace | str, tuple[torch.Tensor, ...]]:
    recorder = LaunchRecorder(inputs, lambda: 0)
    assert recorder.why is None
    results = recorder.record(run)
    return recorder.trace(results), results


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_a_trace_repeats_the_recorded_call_on_the_inputs_of_this_call():
    calls = []

    def run(x, y):
        calls.append(x)
        both = x.new_empty((2, *x.shape))
        first, second = both.unbind()
        move_all((first.data_ptr(), second.data_ptr()), (x.data_ptr(), y.data_ptr()), x.nbytes)
        out = torch.empty_like(x)
        negate(out[1:], first[:-1])
        out[:1].copy_(second[2:3])
        return out, x, both[1]

    made, results = recorded(run, numbers(4, 3), numbers(4, 3, start=50))
    assert isinstance(made, LaunchTrace)
    for i in range(3):
        x, y = numbers(4, 3, start=7 * i), numbers(4, 3, start=100 + i)
        out, same, second = made.replay((x, y))
        assert len(calls) == 1
        assert torch.equal(out[1:], -x[:-1]) and torch.equal(out[:1], y[2:3])
        assert same is x and torch.equal(second, y)
    assert torch.equal(results[0][1:], -numbers(4, 3)[:-1])  # which is the caller's, and not written again
    assert made.replay((x, y))[0] is not out


def test_tokens_are_joined_taken_and_put_by_index():
    number, third = torch.tensor([3, 0]), numbers(1, 3)

    def run(x, y):
        joined = torch.cat([x[2:], y[:1], third])
        taken = joined.index_select(0, number)
        out = x.new_empty(4, 3).fill_(0.0)
        out.index_copy_(0, number, taken)
        return joined, taken, out

    made, first = recorded(run, numbers(4, 3), numbers(4, 3, start=50))
    assert isinstance(made, LaunchTrace)
    for given in ((numbers(4, 3), numbers(4, 3, start=50)), (numbers(4, 3, start=7), numbers(4, 3, start=90))):
        for found, wanted in zip(made.replay(given), run(*given), strict=True):
            assert torch.equal(found, wanted)
    assert torch.equal(first[0], run(numbers(4, 3), numbers(4, 3, start=50))[0])


def test_an_empty_view_holds_no_memory():
    memory = numbers(4, 3).numpy().copy()
    x, seen = torch.from_numpy(memory), weakref.ref(memory)
    del memory

    def run(x):
        return (torch.cat([x[:0], x[2:]]),)

    made, results = recorded(run, x)
    assert torch.equal(made.replay((numbers(4, 3, start=5),))[0], numbers(4, 3, start=5)[2:])
    assert seen() is not None
    del x, results
    gc.collect()
    assert seen() is None


def test_memory_from_outside_the_call_keeps_its_address():
    outside = [numbers(3, start=20)]
    address = outside[0].data_ptr()

    def run(x):
        out = x.new_empty((2, 3))
        move_all((out[0].data_ptr(), out[1].data_ptr()), (address, x.data_ptr()), 12, keep=outside)
        negate(out[0], outside[0])
        return (out,)

    made, _ = recorded(run, numbers(3))
    outside.clear()
    again = [numbers(3, start=90 + i) for i in range(50)]  # would reuse its memory, had the trace not kept it
    (out,) = made.replay((again[0],))
    assert out.tolist() == [[-20, -21, -22], [90, 91, 92]]


def test_strided_inputs_of_one_memory():
    def run(q, k, v):
        out = torch.empty(q.shape)
        negate(out, k)
        for row in range(2):
            move(out[row].data_ptr(), v[row].data_ptr(), v.shape[1] * 4)
        return out, q

    first = numbers(4, 9).split(3, dim=1)
    assert shared(first) == ((1, 0, 12), (2, 0, 24))
    made, _ = recorded(run, *first)
    q, k, v = given = numbers(4, 9, start=300).split(3, dim=1)
    out, same = made.replay(given)
    assert torch.equal(out, torch.cat((v[:2], -k[2:]))) and same is q


def test_inputs_that_are_one_tensor_are_ambiguous():
    x = numbers(4)
    assert LaunchRecorder((x, x), lambda: 0).why
    assert LaunchRecorder((x, x[2:]), lambda: 0).why
    assert LaunchRecorder((x[:2], x[2:], torch.empty(0)), lambda: 0).why is None


@pytest.mark.parametrize(
    "run, why",
    [
        (lambda x: (x + 1,), "aten.add"),
        (lambda x: (x.clone(),), "aten.clone"),
        (lambda x: (refuse_recording("too long"), x)[1:], "too long"),
        (lambda x: (torch.empty(2, dtype=torch.int32).view(torch.float32).copy_(x[:2]),), "memory of torch.int32"),
    ],
)
def test_an_unknown_launch_gives_no_trace(run, why):
    made, results = recorded(run, numbers(4))
    assert isinstance(made, str) and why in made
    assert len(results) == 1


def test_memory_is_freed_after_its_last_use_unless_another_stream_used_it():
    stream = 0

    def run(x):
        nonlocal stream
        held = [torch.empty_like(x) for _ in range(3)]
        negate(held[0], x)
        stream = 1
        negate(held[1], held[0])
        stream = 0
        negate(held[2], held[0])
        out = torch.empty_like(x)
        negate(out, x)
        return (out,)

    x = numbers(1 << 10)
    recorder = LaunchRecorder((x,), lambda: stream)
    made = recorder.trace(recorder.record(run))
    alive: list[int] = []
    tensors, starts = [None] * (made.count + 1), [0] * (made.count + 1)
    tensors[1], starts[1] = x, x.data_ptr()
    for step in made.steps:
        step(tensors, starts)
        alive.append(sum(y is not None for y in tensors[2:]))
    assert torch.equal(tensors[5], -x)
    assert alive[-1] == 2  # the result, and what the other stream had last
    assert max(alive) == 3


def test_an_unused_tensor_is_not_allocated():
    def run(x):
        torch.empty_like(x)
        out = torch.empty_like(x)
        negate(out, x)
        return out, torch.empty_like(x)

    made, _ = recorded(run, numbers(4))
    tensors = [None] * (made.count + 1)
    tensors[1] = numbers(4)
    for step in made.steps:
        step(tensors, [0] * (made.count + 1))
    assert sum(y is not None for y in tensors) == 3  # the input, and the results


def test_views_of_freed_memory_are_dropped():
    def run(x):
        held = torch.empty_like(x)
        negate(held[:2], x[:2])
        out = x.new_empty(2)
        negate(out, held[:2])
        return (out,)

    made, _ = recorded(run, numbers(4))
    tensors = [None] * (made.count + 1)
    tensors[1] = numbers(4)
    for step in made.steps:
        step(tensors, [0] * (made.count + 1))
    assert sum(y is not None for y in tensors) == 3  # the input, its view, the result


def test_a_trace_holds_no_tensor_of_a_call():
    made_in_it = []

    def run(x):
        held, out = torch.empty_like(x), torch.empty_like(x)
        move_all((held.data_ptr(),), (x.data_ptr(),), x.nbytes, keep=((held,), x))
        out[:0].copy_(x[:0])
        negate(out[1:], held[1:])
        made_in_it.extend(weakref.ref(y) for y in (held, out))
        return (out,)

    gc.disable()
    try:
        x = numbers(4)
        given = weakref.ref(x)
        made, results = recorded(run, x)
        assert isinstance(made, LaunchTrace)
        results = made.replay((numbers(4),))
        del x, results
        assert given() is None and all(y() is None for y in made_in_it)
    finally:
        gc.enable()


def test_a_recording_holds_no_memory_for_longer_than_the_call():
    alive, places = [], []

    def run(x):
        out = torch.empty_like(x)
        for i in range(20):
            held = torch.empty_like(x)
            alive.append(weakref.ref(held))
            places.append(held.data_ptr())
            negate(held, x)
            negate(out[i:], held[i:])
            assert sum(y() is not None for y in alive) == 1
            del held
        return (out,)

    x = numbers(1 << 18)  # large enough for a mapping of its own, whose place the next one takes
    made, _ = recorded(run, x)
    assert len(set(places)) < 20  # so that several lay in one place
    assert torch.equal(made.replay((x + 1,))[0], x + 1)


def test_after_an_exception_the_launches_that_others_wait_for_are_done():
    told = []

    def fail(x: torch.Tensor) -> None:
        if x.numpy()[0] < 0:
            raise RuntimeError("no")
        told.append("called")

    def run(x):
        submit(told.append, "ready", cleanup=True)
        submit(fail, x)
        submit(told.append, "done", cleanup=True)
        return (x,)

    made, _ = recorded(run, numbers(2))
    told.clear()
    with pytest.raises(RuntimeError, match="no"):
        made.replay((-1 - numbers(2),))
    assert told == ["ready", "done"]
    made.replay((numbers(2),))
    assert told[2:] == ["ready", "called", "done"]


def test_nothing_is_recorded_after_a_broken_recording():
    def run(x):
        raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        LaunchRecorder((numbers(2),), lambda: 0).record(run)
    refuse_recording("nobody listens")
    made, _ = recorded(lambda x: (torch.empty_like(x).copy_(x),), numbers(2))
    assert isinstance(made, LaunchTrace)


def test_a_stream_is_made_current_only_for_launches_that_depend_on_it():
    current = "caller"
    switches: list[str] = []
    seen: list[tuple[str, str]] = []

    def switch(name: str) -> None:
        nonlocal current
        current = name
        switches.append(name)

    def note(what: str) -> None:
        seen.append((what, current))

    def fail(x: torch.Tensor) -> None:
        if x.numpy()[0] < 0:
            raise RuntimeError("no")

    def on(name: str) -> None:
        submit(switch, name, cleanup=True, scope="switch")

    def call(what: str, anywhere: bool = False) -> None:
        submit(note, what, scope="any" if anywhere else "stream")

    def run(x):
        on("caller")
        on("side")
        call("told its own", anywhere=True)
        on("caller")
        call("first")
        on("side")
        call("second")
        on("caller")
        on("side")
        call("third")
        submit(fail, x)
        on("other")
        on("caller")
        return (x,)

    recorder = LaunchRecorder((numbers(2),), lambda: current)
    made = recorder.trace(recorder.record(run))
    recorded_as = list(seen)
    assert len(switches) == 8
    switches.clear()
    seen.clear()
    made.replay((numbers(2),))
    depends = [x for x in recorded_as if x[0] != "told its own"]
    assert [x for x in seen if x[0] != "told its own"] == depends == [
        ("first", "caller"), ("second", "side"), ("third", "side"),
    ]  # fmt: skip
    assert switches == ["side", "caller"] and current == "caller"
    with pytest.raises(RuntimeError, match="no"):
        made.replay((-1 - numbers(2),))
    assert current == "caller"


def test_the_current_stream_is_restored_even_if_no_launch_follows():
    current = "caller"

    def switch(name: str) -> None:
        nonlocal current
        current = name

    def run(x):
        for name in ("side", "caller"):
            submit(switch, name, cleanup=True, scope="switch")
            torch.empty_like(x).copy_(x) if name == "side" else None
        return (x,)

    recorder = LaunchRecorder((numbers(2),), lambda: current)
    made = recorder.trace(recorder.record(run))
    made.replay((numbers(2),))
    assert current == "caller" and len([x for x in made.cleanup if x]) == 2


def test_equal_steps_are_written_once_whatever_their_addresses_and_numbers():
    outside = [numbers(3, start=20), numbers(3, start=30)]

    def run(at: int):
        def moved(x):
            out = x.new_empty((2, 3))
            y = outside[at]
            move_all((out[0].data_ptr(), out[1].data_ptr()), (y.data_ptr(), x[at:].data_ptr()), 4 * (2 - at), keep=(y,))
            return (out,)

        return moved

    first, _ = recorded(run(0), numbers(3))
    written = launch_trace._compiled.cache_info().misses
    second, _ = recorded(run(1), numbers(3))
    assert launch_trace._compiled.cache_info().misses <= written + 1  # an offset more
    third, _ = recorded(run(1), numbers(3, start=5))
    assert launch_trace._compiled.cache_info().misses <= written + 1
    (out,) = first.replay((numbers(3, start=7),))
    assert out[:, :2].tolist() == [[20, 21], [7, 8]]
    for made in (second, third):
        (out,) = made.replay((numbers(3, start=7),))
        assert out[:, 0].tolist() == [30, 8]


def test_a_table_kept_for_all_calls_is_not_part_of_the_trace():
    tables = []
    told = []

    def run(x):
        out = torch.empty_like(x)
        if not tables:
            with outside_recording():
                assert not recording()
                tables.append(torch.ones(4) + 1)
                submit(told.append, "table")
        assert recording()
        negate(out, tables[0])
        return (out,)

    made, _ = recorded(run, numbers(4))
    assert isinstance(made, LaunchTrace) and told == ["table"]
    tables[0].fill_(5)
    assert made.replay((numbers(4),))[0].tolist() == [-5] * 4 and told == ["table"]
    with outside_recording():
        assert not recording()


def test_a_cached_table_is_not_recorded_and_one_made_in_each_call_prevents_a_trace(monkeypatch):
    def sent(x, device):  # as to a GPU, by an operator that the recorder does not know
        return torch.from_numpy(x).clone()

    for module in (tensors, grad_sum, interface):
        monkeypatch.setattr(module, "uploaded", sent)
    cpu, stretches = torch.device("cpu"), ((1, 2), (5, 6))
    kept = [
        lambda: tensors.token_indices(stretches, cpu),
        lambda: grad_sum._numbers(8, stretches, cpu),
    ]
    for make in kept:
        tensors._token_indices.cache_clear()
        grad_sum._numbers.cache_clear()

        made, _ = recorded(lambda x, make=make: (torch.empty_like(x).copy_(x), make())[:1], numbers(4))
        assert isinstance(made, LaunchTrace)

    def lengths(x):
        interface.Call(1.0).of_packed(CAUSAL, [4], [4], cpu)
        return (torch.empty_like(x).copy_(x),)

    made, _ = recorded(lengths, numbers(4))
    assert isinstance(made, str) and "clone" in made
