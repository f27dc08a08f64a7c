"""A Llama layer, eager and by `torch.compile(fullgraph=True)`, with its attention alone and sharded over the ranks: ms a training step.

    torchrun --nproc-per-node 2 -m benchmarks.compiled_layer --tokens 16384 --hidden 4096 --heads 32 --kv-heads 8
    torchrun --nproc-per-node 2 -m benchmarks.compiled_layer                # a small one, on a CPU too

Alone, a rank has a sequence of its own, as long as its share of the sharded one. The losses and gradients of eager and compiled steps
are compared before anything is timed; a difference above `MOST_ERROR` ends the program."""

import argparse
import os
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from attention.huggingface import context_parallel

MOST_ERROR = 2e-2  # relative, of a bf16 step's gradients; fp32 has 1e-6
STEPS, WARM = 20, 3


def step(model: torch.nn.Module, batch: dict) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def timed(model: torch.nn.Module, batch: dict, device: torch.device) -> float:
    """The median ms of a step, of the slowest rank."""
    samples = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        start = perf_counter()
        step(model, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((perf_counter() - start) * 1e3)
    slowest = torch.tensor([median(samples[WARM:])], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 512), ("hidden", 64), ("heads", 4), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", default="zigzag")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)  # the same weights and batch on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=1,
        num_attention_heads=given.heads, num_key_value_heads=given.kv_heads, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(256, (1, given.tokens), device=device)
    share = ids[:, : given.tokens // dist.get_world_size()]
    for name in ("alone", given.variant):
        model = LlamaForCausalLM(config).to(device, torch.bfloat16 if cuda else torch.float32)
        batch = {"input_ids": share, "labels": share}
        if name != "alone":
            batch = context_parallel(model, name).shard(input_ids=ids, labels=ids)
        compiled = torch.compile(model, fullgraph=True)
        eager, again = ([x.clone() for x in step(m, batch)] for m in (model, compiled))
        error = max(float((x - y).norm() / x.norm()) for x, y in zip(eager, again, strict=True))
        if error > MOST_ERROR:
            raise SystemExit(f"{name}: compiled differs from eager by {error:.1e}")
        times = [timed(m, batch, device) for m in (model, compiled)]
        if dist.get_rank() == 0:
            print(
                f"{name}: eager {times[0]:.2f} ms, compiled {times[1]:.2f} ms, which differ by {error:.1e}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
