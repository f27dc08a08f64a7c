"""Streams beside the compute, of another device than the current one."""

import pytest
import torch

from attention.transports.queues import CudaQueue
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


def test_a_handles_event_serves_the_next_once_it_was_waited_for():
    with torch.cuda.device(0):
        queue = CudaQueue(DEVICE)
        x, y = (torch.zeros(1 << 20, device=DEVICE) for _ in range(2))
        first = queue.issue(lambda: filled_late(x), [x], "kv", 0)
        first.wait()
        assert len(queue.spare) == 1
        second = queue.issue(lambda: filled_late(y), [y], "kv", 1)
        assert not queue.spare
        first.wait()  # again: of nothing
        assert bool((x == 1).all()) and not queue.spare
        second.wait()
        assert bool((y == 1).all())


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_aside_follows_the_callers_stream_and_is_in_its_graph(captured):
    with torch.cuda.device(DEVICE):
        queue = CudaQueue(DEVICE)
        x, y, z = (torch.zeros(1 << 20, device=DEVICE) for _ in range(3))

        def run():
            filled_late(x.zero_())
            queue.aside(lambda: y.copy_(x))
            z.add_(1)
            queue.join()

        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        for turn in (1, 2):
            y.zero_()
            run()
            torch.cuda.current_stream().synchronize()
            assert bool((y == 1).all()) and bool((z == turn).all())
