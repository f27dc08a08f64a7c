"""Trains a model of transformers with its sequence sharded over the ranks. The losses are those of one rank.

    torchrun --nproc-per-node 2 examples/huggingface_train.py
    torchrun --nproc-per-node 8 examples/huggingface_train.py --model Qwen/Qwen3-8B --tokens 65536 --variant zigzag_llama3
    python examples/huggingface_train.py                          # one rank

Without --model it is a tiny Llama with random weights. The text is read by bytes, so that no tokenizer is needed. All ranks
have the same model, read the same text and take the same optimizer step: only attention knows of the others."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attention.huggingface import context_parallel

TINY = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def load(name: str | None, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)  # the same weights on every rank
    if name is None:
        return AutoModelForCausalLM.from_config(TINY).to(device)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder for from_pretrained")
    parser.add_argument("--variant", default="zigzag")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    given = parser.parse_args()

    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    model = load(given.model, device).train()
    cp = context_parallel(model, given.variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if given.model is None else 1e-5)
    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8).long().to(device)
    for step in range(given.steps):
        begin = step * given.tokens % max(1, len(text) - given.tokens)
        ids = text[None, begin : begin + given.tokens]  # [1, S], the same on every rank
        loss = model(**cp.shard(input_ids=ids, labels=ids)).loss  # this rank's part
        loss.backward()
        cp.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if cp.fn.world > 1:
            dist.all_reduce(loss)
        if cp.fn.rank == 0:
            print(f"{cp.fn.world} ranks, step {step}: loss {loss:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
