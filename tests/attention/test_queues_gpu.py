"""Streams beside the compute, of another device than the current one."""

import pytest
import torch

from attention.transports.queues import Captures, CudaAside, CudaQueue
from runner.environment import gpu_count

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() < 2, reason="needs 2 CUDA GPUs")]
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


def test_a_wait_holds_up_the_callers_stream_of_the_queues_device():
    with torch.cuda.device(0):
        queue = CudaQueue(DEVICE)
        x = torch.zeros(1 << 20, device=DEVICE)
        queue.issue(lambda: filled_late(x), [x], "kv", 0).wait()
        assert bool((x == 1).all())


def test_what_is_aside_is_before_and_after_the_callers_stream_of_its_device():
    with torch.cuda.device(0):
        aside = CudaAside(DEVICE, Captures())
        x, y = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))
        aside.before(lambda: filled_late(x))
        assert bool((x == 1).all())
        filled_late(x.zero_())
        aside.after(lambda: y.copy_(x))
        aside.stream.synchronize()
        assert bool((y == 1).all())
