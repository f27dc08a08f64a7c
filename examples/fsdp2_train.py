"""Trains a transformer with its parameters sharded by FSDP2 and its sequence by context parallelism, on a mesh of data-parallel
times context-parallel ranks. The losses are those of one rank.

    torchrun --nproc-per-node 4 examples/fsdp2_train.py --context-parallel 2      # 2 x 2 ranks
    torchrun --nproc-per-node 8 examples/fsdp2_train.py --tokens 131072 --layers 16 --hidden 2048 --variant zigzag_llama3

FSDP shards the parameters over all ranks and sums their gradients. It divides the sum by the number of ranks, so the loss is
multiplied by it: a rank's loss is already divided by the number of labels on all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attention
from runner.models import Config, Transformer, shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="zigzag")
    parser.add_argument(
        "--context-parallel", type=int, default=None, help="ranks that share a sequence; by default all"
    )
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch, over all ranks")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    ranks = given.context_parallel or world
    mesh = init_device_mesh(device, (world // ranks, ranks), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("everyone")

    torch.manual_seed(0)  # the same parameters on every rank, before they are sharded
    config = Config(
        context=given.tokens, layers=given.layers, heads=given.hidden // 16, hidden=given.hidden, head_dim=16,
        vocabulary=256,
    )  # fmt: skip
    attend = attention.make(given.variant, group=mesh["context"].get_group())
    model = Transformer(config, attend, recompute=True).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    rows = given.rows // mesh["data"].size()
    first = rows * mesh["data"].get_local_rank()
    for step in range(given.steps):
        text = (7 * torch.arange(given.rows * given.tokens).view(given.rows, -1) + step) % 256  # the same on every rank
        mine = text[first : first + rows].to(device)  # this context-parallel group's
        batch = shard(attend, mine, counted=given.rows * (given.tokens - 1))
        loss = batch.loss(model(batch))  # this rank's part of the mean over all labels
        (loss * world).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"{world // ranks} x {ranks} ranks, step {step}: loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
