"""Numbers of a tensor on the host, read again when they were written and not before, and tables on their way to a device."""

import gc
import time

import numpy
import pytest
import torch

from attention import tensors
from attention.gpu import uploads


def test_a_tensor_that_was_written_is_read_again():
    x = torch.tensor([0, 4, 8, 9])
    assert tensors.read_once(x) is tensors.read_once(x)
    x[1] = 5
    assert tensors.read_once(x) == (0, 5, 8, 9)
    x[1:3].fill_(6)  # through a view
    assert tensors.read_once(x) == (0, 6, 6, 9)
    x.data = torch.tensor([0, 9])
    assert tensors.read_once(x) == (0, 9)


def test_tensors_of_equal_numbers_are_told_apart_and_none_is_kept_alive():
    gc.collect()
    before = len(tensors._read)
    some = [torch.tensor([0, n]) for n in range(100)]
    assert [tensors.read_once(x) for x in some] == [(0, n) for n in range(100)]
    del some
    gc.collect()
    assert len(tensors._read) == before
    assert tensors.read_once(torch.tensor([0, 1000])) == (0, 1000)


def test_an_inference_tensor_is_read_each_time():
    with torch.inference_mode():
        x = torch.tensor([0, 4, 8])
        assert tensors.read_once(x) == (0, 4, 8)
        x[1] = 5
        assert tensors.read_once(x) == (0, 5, 8)


def test_what_numpy_wrote_to_a_cpu_tensor_is_seen():
    numbers = numpy.array([0, 4, 8])
    x = torch.from_numpy(numbers)
    assert tensors.on_host(x) == (0, 4, 8)
    numbers[1] = 5
    assert tensors.on_host(x) == (0, 5, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_is_uploaded_is_there_for_all_streams_and_waits_for_none():
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = numpy.arange(50_000, dtype=numpy.int32)
    assert uploads.uploaded(numbers, torch.device("cuda")).device == device  # takes pinned memory
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
        started = time.perf_counter()
        found = uploads.uploaded(numbers, device)
        took = time.perf_counter() - started
        assert not busy.query() and took < 0.1
        late = found.clone()
    with torch.cuda.stream(other):
        assert torch.equal(found.cpu(), torch.from_numpy(numbers)) and not busy.query()
    del found  # `busy` has still to read it
    for _ in range(50):
        uploads.uploaded(numpy.full_like(numbers, -1), device)
    assert not busy.query()
    torch.cuda.synchronize()
    assert torch.equal(late.cpu(), torch.from_numpy(numbers))
