"""The CPU time of a repeated call beside that of the raw kernel calls which the same rank makes.

    python -m benchmarks.host_time                                      # dense, on a CPU
    torchrun --nproc-per-node 2 -m benchmarks.host_time                 # the variants, over gloo or GPUs
    torchrun --nproc-per-node 2 -m benchmarks.host_time --kernel flash4 --tokens 2048 --heads 8 --head-dim 128
    torchrun --nproc-per-node 2 -m benchmarks.host_time --files zigzag  # our files and functions that a call enters

Prints for each variant the microseconds of a forward, and of a forward with backward, the same for the raw calls, and their
ratios, of rank 0. A raw call is PyTorch's or the package's own differentiable function. On a CPU it is the time of the
calling thread, without that of transfers; on GPUs the time until all is enqueued, in an empty queue. Medians."""

from __future__ import annotations

import argparse
import os
import sys
import time
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
ROOT = str(Path(attention.__file__).parent)
VARIANTS = ["ring", "zigzag", "zigzag_llama3", "ulysses"]


def raw(kernel: str, call: Call) -> Attention:
    """The differentiable function that computes a dense call by this kernel, without anything of ours."""
    causal, scale = call.mask.causal, call.scale
    if kernel == "flash4":
        from flash_attn.cute import flash_attn_func

        return lambda q, k, v: flash_attn_func(q, k, v, causal=causal, softmax_scale=scale)[0]
    if kernel == "sdpa_cudnn":
        return lambda q, k, v: torch._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal, False, scale=scale
        )[0].transpose(1, 2)  # fmt: skip
    if kernel == "sdpa_flash":
        return lambda q, k, v: torch._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale
        )[0].transpose(1, 2)  # fmt: skip
    raise SystemExit(f"--kernel {kernel}: has no raw form here; give sdpa_flash, sdpa_cudnn or flash4")


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


def microseconds(run: Step, device: torch.device, times: int) -> float:
    """The median over some runs after some others."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    samples = []
    for number in range(times + times // 4 + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        run()
        if number >= times // 4 + 3:
            samples.append((clock() - start) * 1e6)
    return median(samples)


def trained(call: Attention, inputs: list[Tensor]) -> Step:
    """A forward and a backward, to gradients that are returned."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    dout = torch.randn_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, dout)


def entered(run: Step) -> dict[str, set[str]]:
    """By file of the library, its functions that `run` enters in this thread."""
    files: dict[str, set[str]] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            files.setdefault(name.removeprefix(ROOT + "/"), set()).add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def listed(run: Attention, inputs: list[Tensor]) -> Iterator[str]:
    """The files and functions that a repeated forward enters."""
    run(*inputs)
    files = entered(lambda: run(*inputs))
    for name, functions in sorted(files.items()):
        yield f"{name:32} {', '.join(sorted(functions))}"
    yield f"{sum(map(len, files.values()))} functions in {len(files)} files"


def compared(run: Attention, inputs: list[Tensor], kernel: str, times: int) -> Iterator[str]:
    """The times of the calls and of their raw kernel calls."""
    calls = [(raw(kernel, call), xs) for xs, call in raw_calls(kernels.KERNELS[kernel], lambda: run(*inputs))]
    steps = [trained(base, xs) for base, xs in calls]
    device = inputs[0].device
    for what, ours, theirs in (
        ("forward", lambda: run(*inputs), lambda: [base(*xs) for base, xs in calls]),
        ("with backward", trained(run, inputs), lambda: [step() for step in steps]),
    ):
        ours_us, theirs_us = (microseconds(x, device, times) for x in (ours, theirs))
        yield f"{what:14} {ours_us:8.1f} µs, {len(calls)} raw {theirs_us:8.1f} µs, ratio {ours_us / theirs_us:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"by default dense, or {', '.join(VARIANTS)}")
    parser.add_argument("--kernel", default="")
    for name, default in (("tokens", 64), ("heads", 2), ("kv-heads", 0), ("head-dim", 16), ("times", 200)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--files", action="store_true", help="list what a repeated forward enters instead")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) if on_gpu else None
        dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    kernel = args.kernel or ("flash4" if on_gpu else "sdpa_flash")
    form = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    torch.manual_seed(0)
    whole = [
        torch.randn(1, args.tokens, h, args.head_dim, **form) for h in (args.heads, *2 * [args.kv_heads or args.heads])
    ]
    for variant in args.variants or (["dense"] if world == 1 else VARIANTS):
        fn = attention.make(variant, kernel=kernel)
        inputs = [fn.shard(x) for x in whole]
        run = partial(fn, causal=True)
        lines = listed(run, inputs) if args.files else compared(run, inputs, kernel, args.times)
        for line in lines:
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"{variant:14} {line}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
