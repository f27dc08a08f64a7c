"""Jobs with models of transformers: tiny, with random weights."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional as F
from torch.utils.data import DataLoader

from attention import masks
from attention.huggingface import context_parallel
from runner.launch.rank import Rank
from tests.jobs.reference import rel

transformers.logging.set_verbosity_error()

VOCABULARY, ROWS, TOKENS = 64, 2, 30  # tokens that no layout divides
DOCUMENTS = {"odd": (11, 25, 23, 1), "even": (16, 32, 16)}  # packed into one row
DOCUMENTS |= dict.fromkeys(("packed images", "packed mrope"), DOCUMENTS["odd"])
PADDED = {"left": [(11, TOKENS), (0, TOKENS)], "right": [(0, 17), (0, 29)]}  # the tokens of each row
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
    "num_local_experts": 4, "no_rope_layers": [1, 0], "floor_scale": 8,
}  # fmt: skip
ENCODER = dict.fromkeys((f"{x}_token_id" for x in ("pad", "bos", "eos", "cls", "sep")), 0) | {"hidden_size": 64}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
MROPE = {"hidden_size": 64, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
TWO = {
    name: SHAPE | WINDOWS | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "initializer_range": 0.2}
    for name in ("encoder", "decoder")
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", WINDOWS),
    "gpt_oss": ("GptOss", WINDOWS | EXPERTS | {"num_local_experts": 4}),
    "llama4": ("Llama4", CHUNKS),
    "modernbert": ("ModernBert", ENCODER | WINDOWS),
    "gemma3_encoder": ("Gemma3", WINDOWS | {"use_bidirectional_attention": True}),
    "gemma3_images": ("Gemma3", {"text_config": SHAPE | WINDOWS, "vision_config": VISION}),
    "qwen2_vl": ("Qwen2VL", {"text_config": SHAPE | MROPE, "vision_config": VISION, "vision_start_token_id": 1}),
    "deepseek_v3": ("DeepseekV3", LATENT | EXPERTS),
    "deepseek_v2": ("DeepseekV2", LATENT | EXPERTS | PUBLISHED),
}

TEXT = {"Gemma3", "Llama4"}  # whose configuration has other modalities, too
MASKED = {"modernbert"}
# before transformers 5, images and ModernBERT attend otherwise; in 4.56.0, experts of Llama 4 mix tokens
NEW = {"llama4", "modernbert", "gemma3_images"}


def model_of(kind: str, **options: Any) -> Any:
    """A causal LM, or another with a loss for each token, in fp32, the same on every rank."""
    name, own = MODELS[kind]
    images = "vision_config" in own
    config = getattr(transformers, f"{name}{'Text' if name in TEXT and not images else ''}Config")
    task = "ConditionalGeneration" if images else "MaskedLM" if kind in MASKED else "CausalLM"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{task}")(config(**({} if images else SHAPE) | own | options))


def spans_of(form: str | None) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each document of a batch."""
    if form in DOCUMENTS:
        return [(0, *x) for x in pairwise(accumulate(DOCUMENTS[form], initial=0))]
    return [(row, *x) for row, x in enumerate(PADDED.get(form or "", [(0, TOKENS)] * ROWS))]


def batch_of(form: str | None) -> dict[str, torch.Tensor]:
    """Ids, labels and what a form adds. A document's first token has no label, as with transformers' collator."""
    spans = spans_of(form)
    shape = (1, sum(DOCUMENTS[form])) if form in DOCUMENTS else (ROWS, TOKENS)
    random = torch.Generator().manual_seed(1)
    ids, positions = torch.randint(VOCABULARY, shape, generator=random), torch.zeros(shape, dtype=torch.int64)
    real = torch.zeros(shape, dtype=torch.int64)
    for row, start, stop in spans:
        positions[row, start:stop], real[row, start:stop] = torch.arange(stop - start), 1
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, 12:15] = -100
    batch = {"input_ids": ids, "labels": labels}
    if form in DOCUMENTS:
        batch["position_ids"] = positions
    elif form in PADDED:
        batch["attention_mask"] = real
    if form and form.endswith("images"):
        batch["token_type_ids"] = torch.zeros_like(ids)
        for row, start, stop in [(0, 2, 9), (0, 15, 27), (-1, 0, 3), (-1, 5, 18)]:
            batch["token_type_ids"][row, start:stop] = 1
    if form and form.endswith("mrope"):
        mrope = torch.randint(TOKENS, (3, *shape), generator=random)
        batch["position_ids"] = torch.cat([positions[None], mrope]) if form in DOCUMENTS else mrope
    return batch


def given(model: Any, form: str | None) -> dict[str, torch.Tensor]:
    """The batch of a form; embeddings in place of ids where images go into them."""
    batch = batch_of(form)
    if form and form.endswith(("embeddings", "images")):
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    return batch


@cache
def alone(kind: str, form: str | None, **options: Any) -> list[torch.Tensor]:
    """(loss, logits, gradients) of transformers' own attention, each document by itself."""
    model = model_of(kind, **options)
    model.set_attn_implementation("eager")
    batch = given(model, form)
    labels = batch.pop("labels")
    batch.pop("attention_mask", None)
    if "position_ids" in batch and batch["position_ids"].dim() == 2:
        del batch["position_ids"]
    logits = torch.zeros(*labels.shape, VOCABULARY)
    counted = torch.full_like(labels, -100)
    for row, start, stop in spans_of(form):
        of = {name: x[..., row : row + 1, start:stop] for name, x in batch.items() if name != "inputs_embeds"}
        if "inputs_embeds" in batch:
            of["inputs_embeds"] = batch["inputs_embeds"][row : row + 1, start:stop]
        logits[row, start:stop] = model(**of).logits[0]
        y = labels[row, start:stop]
        counted[row, start:stop] = y if kind in MASKED else F.pad(y[1:], (0, 1), value=-100)
    loss = F.cross_entropy(logits.flatten(0, 1), counted.flatten())
    loss.backward()
    return [loss.detach(), logits.detach(), *gradients_of(model)]


def gradients_of(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def worst(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest relative error but of what is 0 in both, such as gradients of parameters that no token meets."""
    return max(rel(x, y) for x, y in zip(results, exact, strict=True) if x.any() or y.any())


def trained(me: Rank, kind: str, cases: list[tuple[str, str | None]], autocast: bool = False) -> list[float]:
    """For each case (variant, form) the largest relative error of loss, logits and gradients. All are sharded
    before the first is computed, by functions that share the model. Under autocast all experts are chosen: which two a router
    prefers may depend on the rounding."""
    options = {"num_experts_per_tok": 4} if autocast else {}
    model = model_of(kind, **options)
    functions = [context_parallel(model, variant, **options_of(variant, form)) for variant, form in cases]
    batches = [cp.shard(**given(model, form)) for cp, (_, form) in zip(functions, cases, strict=True)]
    errors = []
    for cp, batch, (_, form) in zip(functions, batches, cases, strict=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**batch)
        out.loss.backward()
        cp.reduce_gradients()
        loss = out.loss.detach().clone()
        dist.all_reduce(loss)
        results = [loss, cp.unshard(out.logits, batch), *gradients_of(model)]
        errors.append(worst(results, alone(kind, form, **options)))
    return [max(x) for x in zip(*me.gather(errors), strict=True)]


def crossed(me: Rank, cases: list[tuple[str, int, int, int]]) -> list[float]:
    """For each case (variant, encoder's tokens, decoder's, padding of each one's last row) the largest relative error of an
    encoder-decoder's loss, logits and gradients."""
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(**TWO, vocab_size=VOCABULARY))
    errors = []
    for variant, *lengths, padding in cases:
        ids, labels = (torch.randint(3, VOCABULARY, (ROWS, tokens)) for tokens in lengths)
        ids[-1, lengths[0] - padding :], labels[-1, lengths[1] - padding :] = 0, -100
        batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}
        results = []
        for cp in (context_parallel(model, variant), None):
            model.set_attn_implementation("context_parallel" if cp else "eager")
            model.zero_grad()
            out = model(**(cp.shard(**batch) if cp else batch))
            out.loss.backward()
            loss, logits = out.loss.detach().clone(), out.logits
            if cp:
                cp.reduce_gradients()
                dist.all_reduce(loss)
                logits = cp.unshard(logits)
            results.append([loss, logits[labels != -100], *gradients_of(model)])
        errors.append(worst(*results))
    return [max(x) for x in zip(*me.gather(errors), strict=True)]


def compiled(me: Rank, kind: str, forms: list[str | None]) -> list[float]:
    """For each form the largest relative error of a compiled model's gradients against the eager one's."""
    model = model_of(kind)
    cp = context_parallel(model, "llama3")
    in_graphs = torch.compile(model, backend="aot_eager", fullgraph=True)
    errors = []
    for form in forms:
        results = []
        for either in (model, in_graphs):
            model.zero_grad()
            either(**cp.shard(**given(model, form))).loss.backward()
            results.append(gradients_of(model))
        errors.append(worst(*results))
    return [max(x) for x in zip(*me.gather(errors), strict=True)]


def options_of(variant: str, form: str | None) -> dict[str, Any]:
    tokens = sum(DOCUMENTS[form]) if form in DOCUMENTS else TOKENS
    return {"tokens": tokens, "mask": masks.causal()} if variant == "balanced" else {}


def used_by_one_rank(me: Rank) -> list[float | None]:
    """The gradients' sums after a reduction of 1 on rank 0 only, 1 on every rank, and of none."""
    model = model_of("llama")
    some = list(model.parameters())[:3]
    for x, mine in zip(some, (me.rank == 0, True, False), strict=True):
        x.grad = torch.ones_like(x) if mine else None
    context_parallel(model, "ring").reduce_gradients()
    return [None if x.grad is None else float(x.grad.mean()) for x in some]


def differing(me: Rank) -> list[tuple[str, list[str]]]:
    """By argument, what each rank says to a batch in which this argument differs on rank 1; at last, to a prompt."""
    cp, batch = context_parallel(model_of("llama"), "ring"), batch_of("odd")
    positions, swapped = batch["position_ids"].clone(), batch["input_ids"].clone()
    positions[0, 5:11] = torch.arange(6)  # another document
    swapped[0, :2] += torch.tensor([2, -1])  # the weighted sum of ids is that of the others
    others = {
        "input_ids": swapped, "labels": batch["labels"].roll(1), "position_ids": positions,
        "cu_seq_lens_q": [0, *accumulate(DOCUMENTS["odd"])], "num_items_in_batch": 7, "pixel_values": swapped,
    }  # fmt: skip
    calls = [(name, cp.shard, batch | ({name: other} if me.rank else {})) for name, other in others.items()]
    prompt, cache = batch["input_ids"][:, me.rank :: 2], context_parallel(cp.model, "tree").cache(tokens=99)
    calls.append(("input_ids", cp.model.generate, {"inputs": prompt, "past_key_values": cache}))
    return [(name, me.gather(refusal(call, **arguments))) for name, call, arguments in calls]


def in_worker(me: Rank) -> list[str]:
    """By rank, what is said of a batch that a forked worker would shard."""
    cp = context_parallel(model_of("llama"), "ring")
    loader = DataLoader([batch_of(None)], None, num_workers=1, collate_fn=lambda batch: refusal(cp.shard, **batch))
    return me.gather(*loader)


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


def stepped(me: Rank, way: str, extra: str, kind: str, folder: str) -> list[float]:
    """What two steps of training give, each of two batches of two packed documents: by step the loss and the norm of all gradients,
    and all parameters at last; from a Trainer also what it evaluates, predicts, saves and generates. Each two ranks share rows; one
    rank has transformers' own attention."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh

    model = tuned = model_of(kind)
    model.config.use_cache = False  # with a cache, transformers' own attention does not separate documents
    groups, cp = (me.world + 1) // 2, None
    low_rank = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if extra == "PEFT before":
        tuned = get_peft_model(model, low_rank)
    if me.world > 1:
        mesh = init_device_mesh("cpu", (groups, 2), mesh_dim_names=("data", "context"))
        cp = context_parallel(tuned, "zigzag", mesh["context"].get_group())
    if extra == "PEFT after":
        tuned = get_peft_model(model, low_rank)
    lengths = 11, 23, 7, 19, 5, 29, 13, 16
    data = [{"input_ids": [(7 * n + i * i) % VOCABULARY for i in range(n)]} for n in lengths]
    if way.startswith("Trainer"):
        results = by_trainer(cp, tuned, data, groups, folder, way, extra, **HOW.get(extra, {}))
    else:
        results = by_loop(me, cp, tuned, data, groups, way, extra)
    return results + [x for p in model.parameters() for x in whole(p.detach()).flatten().tolist()]


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# Arguments of a Trainer
HOW: dict[str, dict[str, Any]] = {
    "autocast": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "mean of ranks": {"average_tokens_across_devices": False},
}


def by_trainer(
    cp: Any, model: Any, data: list[Any], groups: int, folder: str, way: str, extra: str, **how: Any
) -> list[float]:
    """Losses, norms, losses of evaluation, each by step; logits of predictions; the parameters that were saved, but for FSDP, which
    saves on GPUs; tokens generated after each step, but not in bf16, where they may flip."""
    from safetensors.torch import load_file

    tokens: list[int] = []

    class Generation(transformers.TrainerCallback):
        def on_step_end(self, args: Any, *unused: Any, model: Any, **others: Any) -> None:
            cache = context_parallel(model, "tree", cp.fn.group).cache(tokens=12) if cp else None
            ids = torch.arange(1, 9)[None]
            new = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, past_key_values=cache)
            tokens.extend([] if args.bf16 else new[0].tolist())

    how |= {
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "num_train_epochs": 1,
        "save_steps": 2,
    }
    how |= {"logging_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "report_to": "none", "disable_tqdm": True}
    how |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 // groups, "use_cpu": True}
    args = transformers.TrainingArguments(folder, per_device_eval_batch_size=4 // groups, **how)
    collator = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(model, args, collator, data, data[:4], callbacks=[Generation()])
    if cp:
        cp.prepare(trainer)
    if way == "Trainer, FSDP2":
        use_fsdp(trainer.accelerator, extra)
        trainer.is_fsdp_enabled, args.save_strategy = True, "no"
    trainer.train()
    logits = trainer.predict(data[4:]).predictions
    names = "loss", "grad_norm", "eval_loss"
    steps = [step[name] for name in names for step in trainer.state.log_history if name in step]
    saved = [load_file(path) for path in Path(folder).glob("checkpoint-2/*model.safetensors")]
    parameters = [x for file in saved for name in sorted(file) for x in file[name].flatten().tolist()]
    assert bool(parameters) == (way == "Trainer")
    return [*steps, *logits[logits != -100].tolist(), *parameters, *tokens]


def by_loop(me: Rank, cp: Any, model: Any, data: list[Any], groups: int, way: str, extra: str) -> list[float]:
    """Losses and norms by step."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    loader = DataLoader(data, 2, collate_fn=transformers.DataCollatorWithFlattening())
    batches = list(loader)
    numbers = [sum(int((x["labels"] >= 0).sum()) for x in batches[i : i + 2]) for i in (0, 2)]  # of all ranks in a step
    batches = batches[me.rank // 2 :: groups]
    if extra == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "FSDP2":
        for module in (*(x for x in model.modules() if "DecoderLayer" in type(x).__name__), model):
            fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if way == "DDP":
        model = DistributedDataParallel(model)
    if accelerated := way.startswith("accelerate"):
        accelerator = accelerator_of(way, extra)
        if cp:
            cp.prepare(accelerator)
        loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
        batches = list(loader)
    if extra == "compile":
        model = torch.compile(model, backend="eager", fullgraph=way == "own loop")
    scale = 1 if way == "own loop" else me.world
    results = []
    for number in numbers:
        total = torch.zeros(())
        for batch in [batches.pop(0) for _ in range(2 // groups)]:
            batch |= {"num_items_in_batch": number}
            with torch.autocast("cpu", torch.bfloat16, enabled=extra == "autocast" and not accelerated):
                loss = model(**cp.shard(**batch) if cp else batch).loss
            (scale * loss).backward()
            total += loss.detach()
        if cp and way == "own loop":
            cp.reduce_gradients()
        dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results += [float(total), float(whole(norm))]
    return results


def accelerator_of(way: str, extra: str) -> Any:
    """An Accelerator, whose state is of the process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if extra == "autocast" else "no")
    if way == "accelerate, FSDP2":
        use_fsdp(accelerator, extra)
    return accelerator


def use_fsdp(accelerator: Any, extra: str) -> None:
    """What accelerate does by itself on GPUs only."""
    from accelerate import FullyShardedDataParallelPlugin

    layer: dict[str, Any] = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap", **layer)
    if extra == "autocast":  # the parameters are cast, too
        plugin.set_mixed_precision("bf16")
    accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, "FSDP"


def apart(me: Rank) -> str:
    """The refusal of groups that have every other rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))
    return refusal(context_parallel(model_of("llama"), "ring", mesh["context"].get_group()).prepare, trainer=None)
