"""Jobs with models of transformers: tiny, with random weights."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F

from attention import masks
from attention.huggingface import context_parallel
from runner.launch.rank import Rank
from tests.jobs.reference import rel

transformers.logging.set_verbosity_error()

VOCABULARY, ROWS, TOKENS = 64, 2, 30  # tokens that no layout divides
DOCUMENTS = {"odd": (11, 25, 23, 1), "even": (16, 32, 16)}  # packed into one row
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PUBLISHED = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {
    "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 7, "intermediate_size_mlp": 32,
    "num_local_experts": 2, "no_rope_layers": [1, 0], "floor_scale": 8,
}  # fmt: skip
ENCODER = dict.fromkeys((f"{x}_token_id" for x in ("pad", "bos", "eos", "cls", "sep")), 0) | {"hidden_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", WINDOWS),
    "gpt_oss": ("GptOss", WINDOWS | EXPERTS | {"num_local_experts": 4}),
    "llama4": ("Llama4", CHUNKS),
    "modernbert": ("ModernBert", ENCODER | WINDOWS),
    "gemma3_encoder": ("Gemma3", WINDOWS | {"use_bidirectional_attention": True}),
    "deepseek_v3": ("DeepseekV3", LATENT | EXPERTS),
    "deepseek_v2": ("DeepseekV2", LATENT | EXPERTS | PUBLISHED),
}

TEXT = {"Gemma3", "Llama4"}  # whose configuration has other modalities, too
MASKED = {"modernbert"}


def model_of(kind: str, **options: Any) -> Any:
    """A causal LM in fp32, the same on every rank."""
    name, own = MODELS[kind]
    config = getattr(transformers, f"{name}{'Text' if name in TEXT else ''}Config")(**SHAPE | own | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{'MaskedLM' if kind in MASKED else 'CausalLM'}")(config)


def batch_of(documents: str | None) -> dict[str, torch.Tensor]:
    """Ids, labels and, with documents, positions. A document's first token has no label, as with transformers' collator."""
    lengths = DOCUMENTS[documents] if documents else (TOKENS,) * ROWS
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    labels = ids.masked_fill(positions == 0, -100)
    labels[2:5] = -100
    shape = (1, -1) if documents else (ROWS, TOKENS)
    found = {"input_ids": ids.view(shape), "labels": labels.view(shape)}
    return found | {"position_ids": positions.view(shape)} if documents else found


@cache
def alone(kind: str, documents: str | None) -> list[torch.Tensor]:
    """(loss, logits, gradients) of transformers' own attention, each document by itself."""
    model, batch = model_of(kind), batch_of(documents)
    model.set_attn_implementation("eager")
    lengths = DOCUMENTS[documents] if documents else (TOKENS,) * ROWS
    ids, labels = (batch[name].flatten().split(lengths) for name in ("input_ids", "labels"))
    logits = [model(input_ids=x[None]).logits[0] for x in ids]
    if kind not in MASKED:
        labels = [F.pad(y[1:], (0, 1), value=-100) for y in labels]
    loss = F.cross_entropy(torch.cat(logits), torch.cat([*labels]))
    loss.backward()
    return [loss.detach(), torch.cat(logits).view(*batch["input_ids"].shape, -1).detach(), *gradients_of(model)]


def gradients_of(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def worst(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(rel(x, y) for x, y in zip(results, exact, strict=True))


def trained(
    me: Rank, kind: str, cases: list[tuple[str, str | None]], recompute: bool = False, autocast: bool = False
) -> list[float]:
    """For each case (variant, documents) the largest relative error of loss, logits and gradients. All are sharded
    before the first is computed, by functions that share the model."""
    model = model_of(kind)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    functions = [context_parallel(model, variant, **options_of(variant, documents)) for variant, documents in cases]
    batches = [cp.shard(**batch_of(documents)) for cp, (_, documents) in zip(functions, cases, strict=True)]
    errors = []
    for cp, batch, (_, documents) in zip(functions, batches, cases, strict=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**batch)
        out.loss.backward()
        cp.reduce_gradients()
        loss = out.loss.detach().clone()
        dist.all_reduce(loss)
        errors.append(worst([loss, cp.unshard(out.logits), *gradients_of(model)], alone(kind, documents)))
    return [max(x) for x in zip(*me.gather(errors), strict=True)]


def options_of(variant: str, documents: str | None) -> dict[str, Any]:
    tokens = sum(DOCUMENTS[documents]) if documents else TOKENS
    return {"tokens": tokens, "mask": masks.causal()} if variant == "balanced" else {}


def fully_sharded(me: Rank) -> float:
    """The largest relative error of a gradient under FSDP2 over data-parallel times context-parallel ranks, each group of
    the latter with a row of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("everyone")
    model = model_of("llama")
    cp = context_parallel(model, "zigzag", mesh["context"].get_group())
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=everyone)
    batch, row = batch_of(None), mesh["data"].get_local_rank()
    labels = int((batch["labels"][:, 1:] >= 0).sum())
    mine = {name: x[row : row + 1] for name, x in batch.items()}
    (me.world * model(**cp.shard(**mine, num_items_in_batch=labels)).loss).backward()
    return worst([x.grad.full_tensor() for x in model.parameters()], alone("llama", None)[2:])


def used_by_one_rank(me: Rank) -> list[float | None]:
    """The gradients' sums after a reduction of 1 on rank 0 only, 1 on every rank, and of none."""
    model = model_of("llama")
    some = list(model.parameters())[:3]
    for x, mine in zip(some, (me.rank == 0, True, False), strict=True):
        x.grad = torch.ones_like(x) if mine else None
    context_parallel(model, "ring").reduce_gradients()
    return [None if x.grad is None else float(x.grad.mean()) for x in some]


def differing(me: Rank) -> dict[str, list[str]]:
    """By argument, what each rank says to a batch in which this argument differs on rank 1."""
    cp, batch = context_parallel(model_of("llama"), "ring"), batch_of("odd")
    positions, swapped = batch["position_ids"].clone(), batch["input_ids"].clone()
    positions[0, 5:11] = torch.arange(6)  # another document
    swapped[0, :2] += torch.tensor([2, -1])  # the weighted sum of ids is that of the others
    others = {
        "input_ids": swapped, "labels": batch["labels"].roll(1), "position_ids": positions,
        "cu_seq_lens_q": [0, *accumulate(DOCUMENTS["odd"])], "num_items_in_batch": 7, "token_type_ids": swapped,
    }  # fmt: skip
    return {
        name: me.gather(refusal(cp.shard, **batch | ({name: other} if me.rank else {})))
        for name, other in others.items()
    }


def refusal(call: Any, **arguments: Any) -> str:
    try:
        call(**arguments)
    except ValueError as error:
        return str(error)
    return ""


def summed_twice(me: Rank) -> tuple[str, float]:
    """The refusal of a second sum after another backward, and the relative error of the gradients after zero_grad()."""
    model = model_of("llama")
    cp, optimizer = context_parallel(model, "ring"), torch.optim.SGD(model.parameters(), 0.0)

    def backward() -> None:
        model(**cp.shard(**batch_of(None))).loss.backward()

    for set_to_none in (False, True):  # a step of the optimizer or None for a gradient: both begin anew
        backward()
        cp.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    backward()
    cp.reduce_gradients()
    backward()
    message = refusal(cp.reduce_gradients)
    model.zero_grad()
    backward()
    cp.reduce_gradients()
    return message, worst(gradients_of(model), alone("llama", None)[2:])


def generated(me: Rank, kind: str, rows: int = ROWS, **options: Any) -> list[Any]:
    """Generation by tree against transformers' own attention and cache, by rank: whether the tokens are the same, the relative
    error of logits, and the most keys that a layer holds. options: of generate."""
    prompt, new = 13, 8
    ids = torch.randint(VOCABULARY, (rows, prompt), generator=torch.Generator().manual_seed(2))
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    model = model_of(kind).eval()
    model.set_attn_implementation("eager")
    exact = model.generate(ids, **how)
    cp = context_parallel(model, "tree")
    cache = cp.cache(tokens=prompt + new)
    out = model.generate(ids, past_key_values=cache, **how)
    same = torch.equal(out.sequences, exact.sequences)
    held = max(layer.keys.shape[2] for layer in cache.layers)
    return me.gather([same, rel(*map(torch.stack, (out.logits, exact.logits))), held])


def by_trainer(me: Rank, folder: str) -> float:
    """The relative error of the parameters' change in two steps of a Trainer with bf16=True, against a loop under autocast."""
    model, other = model_of("llama"), model_of("llama")
    before = torch.cat([x.detach().flatten() for x in model.parameters()])
    data = [{"input_ids": x, "labels": y} for x, y in zip(*batch_of(None).values(), strict=True)]
    cp = context_parallel(model, "zigzag")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, ROWS // 2)  # the same rows on every rank

        def compute_loss(self, model: Any, inputs: Any, *unused: Any, **given: Any) -> Any:
            return cp.fn.world * model(**cp.shard(**inputs)).loss  # DDP takes the mean

    how = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    args = transformers.TrainingArguments(folder, bf16=True, use_cpu=True, num_train_epochs=1, **how, **quiet)
    Trainer(model, args).train()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for row in data:
        with torch.autocast("cpu", torch.bfloat16):
            other(**{name: x[None] for name, x in row.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changes = [torch.cat([x.detach().flatten() for x in m.parameters()]) - before for m in (model, other)]
    return rel(*changes)
