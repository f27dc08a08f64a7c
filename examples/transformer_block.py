"""A transformer block with its sequence sharded over the ranks. Loss and gradients are the same on one rank and on many.

    torchrun --nproc-per-node 2 examples/transformer_block.py
    python examples/transformer_block.py                          # one rank

Everything that belongs to the tokens (ids, positions, labels) goes through the same `shard`. Labels are shifted first, then
sharded. A rank's loss is the sum over its tokens divided by the global number of tokens. So losses and parameter gradients
are summed over the ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 4, 2, 16
BATCH, TOKENS = 2, 256


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x `[B, s, H, D]` at the global positions `[B, s]`."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-torch.arange(half) / half)  # [B, s, 1, D / 2]
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    """Embedding, causal attention, SwiGLU, and an output layer tied to the embedding."""

    def __init__(self, attend: attention.ContextParallel):
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.project = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits `[B, s, V]` of this rank's tokens, from their ids and positions `[B, s]`."""
        x = self.embedding(ids)
        heads = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))  # [B, s, H + 2 Hk, D]
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 2)
        out = self.attend(rotate(q, positions), rotate(k, positions), v, causal=True)
        x = x + self.project(out.flatten(2))
        gate, up = self.up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)) @ self.embedding.weight.T


def step(attend: attention.ContextParallel) -> tuple[Tensor, Tensor]:
    """(global loss, norm of the summed parameter gradients) of one training step."""
    torch.manual_seed(0)  # the same parameters and text on every rank
    model = Block(attend)
    text = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    ids, labels, positions = (attend.shard(x) for x in (text[:, :-1], text[:, 1:], positions))
    logits = model(ids, positions)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * TOKENS)
    loss.backward()
    loss = loss.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if dist.is_initialized():
        for x in (loss, *gradients):
            dist.all_reduce(x)
    return loss, torch.cat([x.flatten() for x in gradients]).norm()


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    loss, norm = step(attention.make("zigzag"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        print(f"{ranks} ranks: loss {loss:.6f}, gradient norm {norm:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
