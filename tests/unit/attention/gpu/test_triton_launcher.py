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


@pytest.mark.parametrize(
    "other, n, compiled",
    [
        *((tensors(), n, 1) for n in (101, 3, 2**31 - 1)),  # a number that changes within its kind
        *((tensors(), n, 2) for n in (1, 96, 2**31 + 4)),  # one, a multiple of 16, a wide one
        (tensors(1), 100, 2),
        (tensors(dtype=torch.bfloat16), 100, 2),
    ],
)
def test_a_start_hands_its_arguments_to_what_was_compiled_for_their_kind(kernel, start, other, n, compiled):
    for (out, *parts), number in ((tensors(), 100), (other, n), (tensors(), 100), (other, n)):
        start(out, tuple(parts), changing=(number,))
        assert kernel.ran[-1] == given(out, parts, number)
    assert kernel.compiled == compiled
