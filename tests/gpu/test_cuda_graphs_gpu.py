"""Captures and replays on a GPU, in a world of one; over several ranks in test_symmetric_gpu."""

import pytest
import torch

import attention
from attention.batched_copy import copy_all
from attention.gpu import cuda_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")]


def begin(): ...


@pytest.mark.parametrize("pack", (None, [0, 128, 512]))
@pytest.mark.parametrize("kernel", ("flash2", "sdpa_cudnn", "triton"))
def test_replays_give_what_calls_give(kernel, pack):
    plain, replayed = (attention.make("dense", kernel=kernel, replay=way) for way in ("none", "graphs"))
    for i in range(5):
        shape = (512, 8, 64) if pack else (1 + i % 2, 512, 8, 64)
        generator = torch.Generator("cuda").manual_seed(i)
        qkv = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        results = []
        for fn in (plain, replayed):
            q, k, v = qkv.split((4, 2, 2), -2)
            out, lse = fn(q, k, v, causal=True, cu_seqlens=pack, return_lse=True)
            results.append([out, lse, *torch.autograd.grad(out.float().square().sum(), qkv)])
        for wanted, x in zip(*results, strict=True):
            torch.testing.assert_close(x, wanted, atol=1e-2, rtol=1e-2)
    assert all(replayed.graphs.graphs.values())
    assert (
        cuda_graphs.held_bytes(torch.device("cuda", torch.cuda.current_device())) > 0
    )  # what the passes need in between


def test_a_failed_capture_leaves_the_allocator_and_the_stream_as_they_were():
    replays, x = cuda_graphs.GraphReplay(copy_all), torch.ones(4, device="cuda")

    def waits(x):
        return (x * x.sum().item(),)

    assert replays("waits", begin, waits, (x,))[0].tolist() == [4] * 4
    with pytest.raises(attention.UnsupportedCall, match="can't be captured"):
        replays("waits", begin, waits, (x,))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    for _ in range(4):
        assert replays("doubles", begin, lambda x: (2 * x,), (x,))[0].tolist() == [2] * 4
    assert next(graph for key, graph in replays.graphs.items() if key[0] == "doubles") is not None
    large = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del large
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
