"""A start of a Triton kernel, made ready once: what it hands to the compiled kernel. A recording kernel stands in, since the
interpreter compiles nothing; test_triton_kernels_gpu.py has the real ones."""

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from attention.gpu.triton_launcher import TritonLauncher


class Recording:
    """As a Triton kernel: a first start compiles, gives back what was compiled, and runs."""

    arg_names = ("out", "parts", "n", "a", "b", "LEFT", "RIGHT")

    def __init__(self):
        self.compiled, self.watched, self.ran = 0, 0, []

    def __getitem__(self, grid):
        def first(out, parts, n, a, b, num_warps, **constants):
            self.compiled += 1
            self.ran.append((grid, out.data_ptr(), tuple(x.data_ptr() for x in parts), n, a, b, constants))
            return _Compiled(self)

        return first


class _Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        known = stream, function, metadata, launch_metadata, enter, leave
        assert known == (0, self.function, self.packed_metadata, None, None, None)
        self._ran((x, y, z), *arguments)

    def __getitem__(self, grid):
        def again(*arguments):
            self.kernel.watched += 1
            self._ran(grid, *arguments)

        return again

    def _ran(self, grid, out, parts, n, a, b, left, right):
        self.kernel.ran.append((grid, out, parts, n, a, b, {"LEFT": left, "RIGHT": right}))


def tensors(offset=0, dtype=torch.float32):
    return [torch.zeros(64 + offset, dtype=dtype)[offset:] for _ in range(3)]


@pytest.fixture
def kernel():
    return Recording()


@pytest.fixture
def start(kernel):
    return TritonLauncher(kernel, (5, 2), (7, (8, 9)), RIGHT=2, num_warps=4, LEFT=1)


def given(out, parts, n):
    addresses = tuple(x.data_ptr() for x in parts)
    return (5, 2, 1), out.data_ptr(), addresses, n, 7, (8, 9), {"LEFT": 1, "RIGHT": 2}


def test_a_second_start_hands_the_same_arguments_to_what_was_compiled(kernel, start):
    calls = [tensors(), tensors()]
    for out, *parts in calls:
        start(out, tuple(parts), changing=(100,))
    assert kernel.compiled == 1 and not kernel.watched
    assert kernel.ran == [given(out, parts, 100) for out, *parts in calls]


def test_a_profiler_that_watches_tritons_launches_sees_every_one(kernel, start):
    out, *parts = tensors()
    start(out, tuple(parts), changing=(100,))

    def watch(*_):
        raise AssertionError("called by what launches, which here does not")

    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(watch)
        try:
            start(out, tuple(parts), changing=(100,))
        finally:
            hook.remove(watch)
    start(out, tuple(parts), changing=(100,))
    assert kernel.compiled == 1 and kernel.watched == 2 and kernel.ran == 4 * [given(out, parts, 100)]


@pytest.mark.parametrize(
    "other, n",
    [(tensors(1), 100), (tensors(dtype=torch.bfloat16), 100), (tensors(), 1), (tensors(), 96), (tensors(), 2**31 + 4)],
    ids=["address", "dtype", "one", "multiple of 16", "wide"],
)
def test_what_triton_compiles_other_code_for_is_compiled_anew(kernel, start, other, n):
    for (out, *parts), number in ((tensors(), 100), (other, n), (tensors(), 100), (other, n)):
        start(out, tuple(parts), changing=(number,))
        assert kernel.ran[-1] == given(out, parts, number)
    assert kernel.compiled == 2


def test_a_number_that_changes_within_its_kind_compiles_nothing(kernel, start):
    out, *parts = tensors()
    for n in (100, 101, 3, 2**31 - 1):
        start(out, tuple(parts), changing=(n,))
    assert kernel.compiled == 1 and [ran[3] for ran in kernel.ran] == [100, 101, 3, 2**31 - 1]


def test_parts_of_which_one_lies_otherwise_are_told_apart(kernel, start):
    (out, a, b), (_, c, _) = tensors(), tensors(1)
    for parts in ((a, b), (c, b), (a, c), (b, a)):
        start(out, parts, changing=(3,))
    assert kernel.compiled == 3
