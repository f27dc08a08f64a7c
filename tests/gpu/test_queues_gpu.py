"""Streams beside the compute and flags of another device than the current one."""

from types import SimpleNamespace

import pytest
import torch

import attention
from attention.transports.fabric import CudaFabric
from attention.transports.queues import CudaQueue
from tests.support.gpus import own_gpus

pytestmark = [pytest.mark.gpu, own_gpus(2)]
DEVICE = torch.device("cuda", 1)
CYCLES = 200_000_000  # some 0.1 s


def filled_late(x):
    """x is 1 once the stream that `DEVICE` has as its current one is through."""
    with torch.cuda.device(DEVICE):
        torch.cuda._sleep(CYCLES)
    return x.fill_(1)


def test_a_transfer_follows_the_callers_stream_of_the_queues_device():
    with torch.cuda.device(0):
        queue = CudaQueue(DEVICE)
        source, target = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))
        filled_late(source)
        handle = queue.issue(lambda: target.copy_(source), [source, target], "kv", 0)
        handle.wait()
        assert bool((target == 1).all())


def test_what_is_aside_follows_the_callers_stream_and_holds_it_up_in_no_replay():
    queue = CudaQueue(DEVICE)
    x, y = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))

    def run():
        filled_late(x.zero_())

        def late():
            filled_late(torch.empty(1, device=DEVICE))
            y.copy_(x)

        queue.aside(late)
        x.add_(1)
        queue.join()

    with torch.cuda.device(0):
        run()
        assert bool((y == 1).all()) and bool((x == 2).all())
    with torch.cuda.device(DEVICE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        assert bool((y == 2).all()) and bool((x == 2).all())


def test_a_flag_is_written_on_the_default_stream_of_the_flags_device():
    """Whichever device is the current one; the default streams of both have the same name."""
    flag, x = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, device=DEVICE)
    fabric = object.__new__(CudaFabric)
    fabric.device, fabric.flags, fabric.remote = DEVICE, [0, flag.data_ptr()], SimpleNamespace(others=[1])
    other = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.device(0):
        filled_late(x)
        fabric.signalling(0)()
        with torch.cuda.stream(other):
            assert int(flag) == 0  # x is not filled yet
        torch.cuda.synchronize(DEVICE)
        assert int(flag) == 1


def test_a_call_runs_on_its_tensors_device():
    q = torch.randn(1, 256, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    out, expected = (attention.make("dense", kernel=kernel)(q, q, q) for kernel in ("flash4", "math"))
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
