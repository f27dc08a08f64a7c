"""Numbers of a tensor on the host: read again when they were written, and not before."""

import gc

import numpy
import torch

from attention import tensors


def test_an_unchanged_tensor_is_read_once():
    x = torch.tensor([0, 4, 8])
    found = tensors.kept(x)
    assert found == (0, 4, 8)
    assert tensors.kept(x) is found


def test_a_tensor_that_was_written_is_read_again():
    x = torch.tensor([0, 4, 8, 9])
    tensors.kept(x)
    x[1] = 5
    assert tensors.kept(x) == (0, 5, 8, 9)
    x[1:3].fill_(6)  # through a view
    assert tensors.kept(x) == (0, 6, 6, 9)
    x.data = torch.tensor([0, 9])
    assert tensors.kept(x) == (0, 9)


def test_tensors_of_equal_numbers_are_told_apart_and_none_is_kept_alive():
    gc.collect()
    before = len(tensors._read)
    some = [torch.tensor([0, n]) for n in range(100)]
    assert [tensors.kept(x) for x in some] == [(0, n) for n in range(100)]
    del some
    gc.collect()
    assert len(tensors._read) == before
    assert tensors.kept(torch.tensor([0, 1000])) == (0, 1000)


def test_an_inference_tensor_is_read_each_time():
    with torch.inference_mode():
        x = torch.tensor([0, 4, 8])
        assert tensors.kept(x) == (0, 4, 8)
        x[1] = 5
        assert tensors.kept(x) == (0, 5, 8)


def test_what_numpy_wrote_to_a_cpu_tensor_is_seen():
    numbers = numpy.array([0, 4, 8])
    x = torch.from_numpy(numbers)
    assert tensors.on_host(x) == (0, 4, 8)
    numbers[1] = 5
    assert tensors.on_host(x) == (0, 5, 8)
