"""A start of a Triton kernel, made ready once: what it hands to the compiled kernel. A recording kernel stands in, since the
interpreter compiles nothing; test_triton_kernels.py has the real ones on a GPU."""

import pytest
import torch

pytest.importorskip("triton")


from attention.gpu.triton_launcher import TritonLauncher


class Recording:
    """As a Triton kernel: a first start compiles, gives back what was compiled, and runs."""

    arg_names = ("out", "parts", "n", "a", "b", "LEFT", "RIGHT")

    def __init__(self):
        self.compiled, self.ran = 0, []

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

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, out, parts, n, a, b, left, right):
        known = stream, function, metadata, launch_metadata, enter, leave
        assert known == (0, self.function, self.packed_metadata, None, None, None)
        self.kernel.ran.append(((x, y, z), out, parts, n, a, b, {"LEFT": left, "RIGHT": right}))


def tensors(offset=0, dtype=torch.float32):
    return [torch.zeros(64 + offset, dtype=dtype)[offset:] for _ in range(3)]


def given(out, parts, n):
    addresses = tuple(x.data_ptr() for x in parts)
    return (5, 2, 1), out.data_ptr(), addresses, n, 7, (8, 9), {"LEFT": 1, "RIGHT": 2}


@pytest.fixture
def kernel():
    return Recording()


@pytest.fixture
def start(kernel):
    return TritonLauncher(kernel, (5, 2), (7, (8, 9)), RIGHT=2, num_warps=4, LEFT=1)


def test_a_second_start_hands_the_same_arguments_to_what_was_compiled(kernel, start):
    """A number that changes within its kind compiles nothing."""
    calls = [(tensors(), n) for n in (100, 100, 101, 3, 2**31 - 1)]
    for (out, *parts), n in calls:
        start(out, tuple(parts), changing=(n,))
    assert kernel.compiled == 1
    assert kernel.ran == [given(out, parts, n) for (out, *parts), n in calls]


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
