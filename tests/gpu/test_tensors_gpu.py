"""Lengths given as a GPU tensor: the device is waited for once."""

import pytest
import torch

import attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")]


def test_a_training_loop_with_one_gpu_tensor_of_lengths_does_not_synchronise():
    fn = attention.make("llama3", kernel="flash2")
    q, k, v = (torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 128, 512], dtype=torch.int32, device="cuda")

    def step(lengths):
        out = fn(q, k, v, causal=True, cu_seqlens=lengths)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step(cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = step(cu)
        fn.shard(q, cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cu[1] = 256
    second = step(cu)
    for found, lengths in ((first, [0, 128, 512]), (second, [0, 256, 512])):
        assert torch.equal(found[0], step(lengths)[0])
