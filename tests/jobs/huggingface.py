"""Jobs with models of transformers: tiny, with random weights."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy

import attention
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
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", WINDOWS),
    "gpt_oss": ("GptOss", WINDOWS | EXPERTS | {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", LATENT | EXPERTS),
}
REAL_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # the head dims of the published models
    "deepseek_v3_192_128": ("DeepseekV3", LATENT | EXPERTS | REAL_HEADS),
    "deepseek_v2_192_128": ("DeepseekV2", LATENT | EXPERTS | REAL_HEADS),
}


def model_of(kind: str, **options: Any) -> Any:
    """A causal LM in fp32, the same on every rank."""
    name, own = (MODELS | OTHERS)[kind]
    config = getattr(transformers, f"{name}{'Text' if kind == 'gemma3' else ''}Config")(**SHAPE | own | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


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
    found = [model(input_ids=x[None], use_cache=False).logits[0] for x in ids]
    losses = [cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in zip(found, labels, strict=True) if len(y) > 1]
    loss = torch.stack(losses).sum() / sum(int((y[1:] >= 0).sum()) for y in labels)
    loss.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return [loss.detach(), torch.cat(found).view(*batch["input_ids"].shape, -1).detach(), *gradients]


@cache
def groups(world: int, of: int) -> list[Any]:
    return [dist.new_group(list(range(first, first + of))) for first in range(0, world, of)]


def trained(me: Rank, kind: str, world: int, cases: list[tuple[str, dict[str, Any], str | None]]) -> list[Any]:
    """For each case (variant, options, documents) the relative errors of loss, logits and gradients in groups of `world`
    ranks, or the refusal. Each group does some of the cases."""
    mine, every = me.rank // world, groups(me.world, world)
    found: list[Any] = [None] * len(cases)
    model = model_of(kind)
    for number in range(mine, len(cases), len(every)):
        variant, options, documents = cases[number]
        if variant == "balanced":
            tokens = sum(DOCUMENTS[documents]) if documents else TOKENS
            options = {"tokens": tokens, "mask": attention.masks.causal()}
        model.zero_grad()
        try:
            cp = context_parallel(model, variant, every[mine], **options)
            out = model(**cp.shard(**batch_of(documents)))
        except ValueError as error:
            found[number] = str(error)
            continue
        out.loss.backward()
        cp.reduce_gradients()
        loss = out.loss.detach().clone()
        dist.all_reduce(loss, group=every[mine])
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
        exact = alone(kind, documents)
        found[number] = max(rel(a, b) for a, b in zip([loss, cp.unshard(out.logits), *gradients], exact, strict=True))
    everyone: list[Any] = [None] * me.world
    dist.all_gather_object(everyone, found)
    return [next(x for x in each if x is not None) for each in zip(*everyone, strict=True)]


def checkpointed(me: Rank) -> float:
    """The largest relative error of a gradient with activation checkpointing."""
    model = model_of("gemma2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    cp = context_parallel(model, "ring")
    model(**cp.shard(**batch_of("odd"))).loss.backward()
    cp.reduce_gradients()
    return max(rel(x.grad, exact) for x, exact in zip(model.parameters(), alone("gemma2", "odd")[2:], strict=True))


def fully_sharded(me: Rank) -> float:
    """The largest relative error of a gradient under FSDP2 over 2 data-parallel times 2 context-parallel ranks. Each
    group of the latter has a row of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("everyone")
    model = model_of("llama")
    cp = context_parallel(model, "zigzag", mesh["context"].get_group())
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    batch, row = batch_of(None), mesh["data"].get_local_rank()
    labels = int((batch["labels"][:, 1:] >= 0).sum())
    mine = {name: x[row : row + 1] for name, x in batch.items()}
    (me.world * model(**cp.shard(**mine, num_items_in_batch=labels)).loss).backward()
    gradients = [x.grad.full_tensor() for x in model.parameters()]
    return max(rel(x, exact) for x, exact in zip(gradients, alone("llama", None)[2:], strict=True))


def used_by_one_rank(me: Rank) -> list[float | None]:
    """The gradients' sums after a reduction of 1 on rank 0 only, 1 on every rank, and of none."""
    model = model_of("llama")
    cp = context_parallel(model, "ring")
    some = list(model.parameters())[:3]
    for x, mine in zip(some, (me.rank == 0, True, False), strict=True):
        x.grad = torch.ones_like(x) if mine else None
    cp.reduce_gradients()
    return [None if x.grad is None else float(x.grad.mean()) for x in some]


def differing(me: Rank) -> list[dict[str, str]]:
    """By argument, what each rank says to a batch in which this argument differs on rank 1."""
    cp = context_parallel(model_of("llama"), "ring")
    batch = batch_of("odd")
    positions, swapped = batch["position_ids"].clone(), batch["input_ids"].clone()
    positions[0, 5:11] = torch.arange(6)  # another document
    swapped[0, :2] += torch.tensor([2, -1])  # the weighted sum of ids is that of the others
    others = {
        "input_ids": swapped, "labels": batch["labels"].roll(1), "position_ids": positions,
        "cu_seq_lens_q": [0, *accumulate(DOCUMENTS["odd"])], "num_items_in_batch": 7, "token_type_ids": swapped,
    }  # fmt: skip
    messages = {}
    for name, other in others.items():
        try:
            cp.shard(**batch | ({name: other} if me.rank == 1 else {}))
        except ValueError as error:
            messages[name] = str(error)
    everyone: list[Any] = [None] * me.world
    dist.all_gather_object(everyone, messages)
    return everyone


def summed_twice(me: Rank) -> tuple[str, float]:
    """The refusal of a second sum after another backward, and the relative error of the gradients after zero_grad()."""
    model = model_of("llama")
    cp, optimizer = context_parallel(model, "ring"), torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):  # a step of the optimizer or None for a gradient: both begin anew
        model(**cp.shard(**batch_of(None))).loss.backward()
        cp.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model(**cp.shard(**batch_of(None))).loss.backward()
    cp.reduce_gradients()
    model(**cp.shard(**batch_of(None))).loss.backward()
    try:
        cp.reduce_gradients()
        message = ""
    except ValueError as error:
        message = str(error)
    model.zero_grad()
    model(**cp.shard(**batch_of(None))).loss.backward()
    cp.reduce_gradients()
    exact = alone("llama", None)[2:]
    return message, max(rel(x.grad, y) for x, y in zip(model.parameters(), exact, strict=True))


def several_variants(me: Rank) -> list[float]:
    """Relative errors of losses on one model: of a batch that zigzag sharded, after tree generated and ring trained, and of one
    that ring sharded before."""
    model, batch = model_of("llama"), batch_of(None)
    zigzag, tree, ring = (context_parallel(model, name) for name in ("zigzag", "tree", "ring"))
    first, second = zigzag.shard(**batch), ring.shard(**batch)
    how = {"attention_mask": torch.ones(ROWS, TOKENS), "max_new_tokens": 2, "pad_token_id": 0}
    model.generate(batch["input_ids"], past_key_values=tree.cache(tokens=TOKENS + 2), **how)
    losses = torch.stack([model(**x).loss.detach() for x in (second, first, zigzag.shard(**batch))])
    dist.all_reduce(losses)
    return [rel(x, alone("llama", None)[0]) for x in losses]


def under_autocast(me: Rank, kind: str) -> list[float]:
    """The relative errors of the loss and of all gradients under autocast, against transformers' own attention under autocast."""
    results = []
    for sharded in (True, False):
        model, batch = model_of(kind), batch_of(None)
        cp = context_parallel(model, "ring")
        if not sharded:
            model.set_attn_implementation("eager")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**cp.shard(**batch) if sharded else batch).loss
        loss.backward()
        loss = loss.detach().clone()
        if sharded:
            cp.reduce_gradients()
            dist.all_reduce(loss)
        results.append((loss, torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])))
    return [rel(x, y) for x, y in zip(*results, strict=True)]


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


def generated(
    me: Rank, kind: str, worlds: list[int], prompt: int = 13, new: int = 8, rows: int = ROWS, **options: Any
) -> dict[str, Any]:
    """Generation by tree in groups of each size, against transformers' own attention and cache: whether all ranks have the same
    tokens, the largest relative error of logits, and the keys and values that this rank holds of a layer. options: of
    generate."""
    ids = torch.randint(VOCABULARY, (rows, prompt), generator=torch.Generator().manual_seed(2))
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    model = model_of(kind).eval()
    model.set_attn_implementation("eager")
    exact = model.generate(ids, **how)
    found: dict[str, Any] = {"same": True, "error": 0.0, "held": []}
    for world in worlds:
        cp = context_parallel(model, "tree", groups(me.world, world)[me.rank // world])
        cache = cp.cache(tokens=prompt + new)
        out = model.generate(ids, past_key_values=cache, **how)
        mine = torch.tensor(
            [not torch.equal(out.sequences, exact.sequences), rel(*map(torch.stack, (out.logits, exact.logits)))]
        )
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found["same"] &= not mine[0]
        found["error"] = max(found["error"], float(mine[1]))
        found["held"].append([x.shape[2] for layer in cache.layers for x in (layer.keys, layer.values)])
    return found
