"""Generates with a model of transformers whose keys and values are sharded over the ranks: the same tokens as on one rank.

    torchrun --nproc-per-node 2 examples/huggingface_generate.py
    torchrun --nproc-per-node 8 examples/huggingface_generate.py --model Qwen/Qwen3-8B --prompt "Once upon a time" --new 200
    python examples/huggingface_generate.py                          # one rank

Without --model it is a tiny gpt-oss with random weights: windows, sinks and experts. Each rank computes all tokens, but holds
only its share of the keys and values, and their partial results are reduced over the ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

from attention.huggingface import context_parallel

TINY = GptOssConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    pad_token_id=0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder for from_pretrained")
    parser.add_argument("--prompt", default="In a hole in the ground there lived")
    parser.add_argument("--new", type=int, default=24, help="tokens to generate")
    given = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)  # the same weights on every rank, and the same draws if it samples
    if given.model is None:
        model = AutoModelForCausalLM.from_config(TINY).to(device).eval()
        ids = torch.tensor([list(given.prompt.encode())], device=device)
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).to(device).eval()
        ids = AutoTokenizer.from_pretrained(given.model)(given.prompt, return_tensors="pt").input_ids.to(device)

    cp = context_parallel(model, "tree")
    cache = cp.cache(tokens=ids.shape[1] + given.new)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)

    if cp.fn.rank == 0:
        held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        print(f"{cp.fn.world} ranks, {held} bytes of keys and values each: {out[0, ids.shape[1] :].tolist()}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
