"""Trains a model of transformers by its Trainer, with the sequence sharded over the ranks. Losses and tokens are those of one rank.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py
    torchrun --nproc-per-node 8 examples/huggingface_trainer.py --context-parallel 4 --fsdp --model Qwen/Qwen3-8B
    python examples/huggingface_trainer.py                          # one rank

Without --model it is a tiny Qwen3 with random weights. The text is read by bytes, and its paragraphs are packed into batches, two a
step, in bf16. After every fifth step the Trainer evaluates and saves, and the model continues a prompt, with its keys sharded."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from attention.huggingface import context_parallel

TINY = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0,
)  # fmt: skip


class Continuation(TrainerCallback):
    """After an evaluation, every rank generates with a cache of `tree`, and rank 0 prints."""

    def __init__(self, tree: Any):
        self.tree = tree

    def on_evaluate(self, args: TrainingArguments, state: Any, *unused: Any, model: Any, **others: Any) -> None:
        ids = torch.tensor([list(b"The Trainer")], device=args.device)
        cache = self.tree.cache(tokens=ids.shape[1] + 8)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        if state.is_world_process_zero:
            print(f"step {state.global_step} continues with {out[0, ids.shape[1] :].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder for from_pretrained")
    parser.add_argument("--variant", default="zigzag")
    parser.add_argument("--context-parallel", type=int, help="ranks that share rows; by default all")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP, on GPUs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "huggingface_trainer"))
    given = parser.parse_args()

    args = TrainingArguments(
        str(given.output), max_steps=given.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
        learning_rate=3e-3 if given.model is None else 1e-5, logging_steps=1, eval_strategy="steps", eval_steps=5,
        save_steps=5, fsdp="full_shard auto_wrap" if given.fsdp else "", fsdp_config={"version": 2} if given.fsdp else None,
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    torch.manual_seed(0)  # the same weights on every rank
    if given.model is None:
        model = AutoModelForCausalLM.from_config(TINY)
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model)
    texts = given.text.read_text().split("\n\n")
    documents = [{"input_ids": list(text.encode())} for text in texts]

    group = None
    if given.context_parallel:
        groups = dist.get_world_size() // given.context_parallel
        mesh = init_device_mesh(args.device.type, (groups, given.context_parallel), mesh_dim_names=("data", "context"))
        group = mesh["context"].get_group()
    cp, tree = (context_parallel(model, variant, group) for variant in (given.variant, "tree"))
    trainer = Trainer(
        model, args, DataCollatorWithFlattening(), train_dataset=documents, eval_dataset=documents[:4],
        callbacks=[Continuation(tree)],
    )  # fmt: skip
    cp.prepare(trainer).train()
    for step in trainer.state.log_history:
        for name in {"loss", "eval_loss"} & step.keys():
            if cp.fn.rank == 0:
                print(f"{cp.fn.world} ranks share rows, step {step['step']}: {name} {step[name]:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
