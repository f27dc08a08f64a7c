"""The CPU time of a repeated call beside that of the raw kernel calls which the same rank makes.

    python -m benchmarks.host_time                                      # dense, on a CPU
    torchrun --nproc-per-node 2 -m benchmarks.host_time                 # the variants, over gloo or GPUs
    torchrun --nproc-per-node 2 -m benchmarks.host_time --kernel flash4 --shape 2048 8 8 128
    torchrun --nproc-per-node 2 -m benchmarks.host_time --files zigzag  # our files and functions that a call enters

--shape: tokens of all ranks, heads, KV heads, head dim; by default 64 2 2 16.
Prints for each variant the microseconds of a forward, and of a forward with backward, the same for the raw calls, and their
ratios, of rank 0. A raw call is PyTorch's or the package's own differentiable function. On a CPU it is the time of the
calling thread, without that of transfers; on GPUs the time until all is enqueued, in an empty queue. Medians."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attention
from attention import kernels
from attention.kernels.interface import Call

Step = Callable[[], object]
Attention = Callable[..., Tensor]
ROOT = f"{Path(attention.__file__).parent}/"
TIMES = 200


def raw(kernel: str, call: Call) -> Attention:
    """The differentiable function that computes a dense call by this kernel, without anything of ours."""
    causal, scale = call.mask.causal, call.scale
    if kernel == "flash4":
        from flash_attn.cute import flash_attn_func

        return lambda *qkv: flash_attn_func(*qkv, causal=causal, softmax_scale=scale)[0]
    function, more = {
        "sdpa_cudnn": (torch._scaled_dot_product_cudnn_attention, (None, True, 0.0, causal, False)),
        "sdpa_flash": (torch._scaled_dot_product_flash_attention_for_cpu, (0.0, causal)),
    }[kernel]
    return lambda *qkv: function(*(x.transpose(1, 2) for x in qkv), *more, scale=scale)[0].transpose(1, 2)


def raw_calls(kernel: Any, run: Step) -> list[tuple[list[Tensor], Call]]:
    """Tensors like those of each forward that the kernel computes in `run`, and its call."""
    calls: list[tuple[list[Tensor], Call]] = []
    plain = type(kernel).attend

    def attend(self: Any, tensors: Sequence[Tensor], call: Call, *more: Any) -> Any:
        calls.append(([torch.randn_like(x.detach(), memory_format=torch.contiguous_format) for x in tensors], call))
        return plain(self, tensors, call, *more)

    type(kernel).attend = attend
    try:
        run()
    finally:
        type(kernel).attend = plain
    return calls


def microseconds(run: Step, device: torch.device) -> float:
    """The median over `TIMES` runs after a quarter as many."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    samples = []
    for _ in range(TIMES + TIMES // 4):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        run()
        samples.append(clock() - start)
    return 1e6 * median(samples[-TIMES:])


def trained(call: Attention, inputs: list[Tensor]) -> Step:
    """A forward and a backward, to gradients that are returned."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    dout = torch.randn_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, dout)


def listed(run: Attention, inputs: list[Tensor]) -> Iterator[str]:
    """The files and functions of the library that a repeated forward enters in this thread."""
    files: dict[str, set[str]] = defaultdict(set)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            files[name.removeprefix(ROOT)].add(frame.f_code.co_qualname)

    run(*inputs)
    sys.setprofile(profile)
    try:
        run(*inputs)
    finally:
        sys.setprofile(None)
    for name, functions in sorted(files.items()):
        yield f"{name:32} {', '.join(sorted(functions))}"
    yield f"{sum(map(len, files.values()))} functions in {len(files)} files"


def compared(run: Attention, inputs: list[Tensor], kernel: str) -> Iterator[str]:
    """The times of the calls and of their raw kernel calls."""
    calls = [(raw(kernel, call), xs) for xs, call in raw_calls(kernels.KERNELS[kernel], lambda: run(*inputs))]
    steps = [trained(base, xs) for base, xs in calls]
    device = inputs[0].device
    for what, ours, theirs in (
        ("forward", lambda: run(*inputs), lambda: [base(*xs) for base, xs in calls]),
        ("with backward", trained(run, inputs), lambda: [step() for step in steps]),
    ):
        ours_us, theirs_us = (microseconds(x, device) for x in (ours, theirs))
        yield f"{what:14} {ours_us:8.1f} µs, {len(calls)} raw {theirs_us:8.1f} µs, ratio {ours_us / theirs_us:5.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu, world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("variants", nargs="*", default=["dense"] if world == 1 else ["zigzag", "ulysses"])
    parser.add_argument(
        "--kernel", choices=("sdpa_flash", "sdpa_cudnn", "flash4"), default="flash4" if on_gpu else "sdpa_flash"
    )
    parser.add_argument("--shape", nargs=4, type=int, default=(64, 2, 2, 16), metavar=("S", "H", "Hk", "D"))
    parser.add_argument("--files", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    tokens, heads, kv_heads, head_dim = args.shape
    whole = [torch.randn(1, tokens, h, head_dim, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    for variant in args.variants:
        fn = attention.make(variant, kernel=args.kernel)
        inputs = [fn.shard(x) for x in whole]
        run = partial(fn, causal=True)
        lines = listed(run, inputs) if args.files else compared(run, inputs, args.kernel)
        for line in lines:
            if world == 1 or dist.get_rank() == 0:
                print(variant, line, sep="\t")
    if world > 1:
        dist.destroy_process_group()
