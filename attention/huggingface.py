"""Context parallelism for any model of transformers that uses its attention interface.

    cp = context_parallel(model, "zigzag")                                # once, on every rank
    model(**cp.shard(input_ids=ids, labels=labels)).loss.backward()       # this rank's part of the global mean
    cp.reduce_gradients()

    cp = context_parallel(model, "tree")                                  # generation, with the keys sharded
    model.generate(ids, past_key_values=cp.cache(tokens=4096))

What a model asks of its attention is done, or refused by its name: masks, keyword arguments, padding, dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention.api import ContextParallel, make
from attention.arguments import Lengths
from attention.masks.of_transformers import RequestedMask, asked, check_padding
from attention.models.cache import ShardedKV
from attention.models.gradients import reduce_used_gradients
from attention.models.locality import check_layers, check_tokens
from attention.models.split import IGNORED, Split, check_same, counted, shifted, split_of

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(f"{error}: pip install 'attention-runner[huggingface]'", name=error.name) from error

# Arguments that attention need not know: the tensors have them already, or the loss needs them
UNUSED = {"position_ids", "cache_position", "use_cache", "shift_labels", "num_items_in_batch", "past_key_values"}
FOLLOW = {"cu_seq_lens_k", "max_length_q", "max_length_k"}  # from cu_seq_lens_q
OURS = {"scaling": "scale", "softcap": "softcap", "s_aux": "sinks"}  # names of transformers and of a call
_numbers = count()


def context_parallel(
    model: Any, variant: str | ContextParallel = "zigzag", group: dist.ProcessGroup | None = None, **options: Any
) -> HuggingFace:
    """Shards the attention of a transformers model over the ranks of `group`, by one of `attention.names()` or by a function
    of `attention.make`. Call it on every rank, before FSDP or DDP wraps the model. A later call replaces the variant.

    options: those of `attention.make`, with the variant's own. Raises ValueError for a model whose layers mix tokens
    outside of transformers' attention interface."""
    check_layers(model)
    cp = HuggingFace(model, variant if isinstance(variant, ContextParallel) else make(variant, group, **options))
    name = f"context_parallel_{next(_numbers)}"
    AttentionInterface.register(name, cp.attend)
    AttentionMaskInterface.register(name, asked)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _refused(model, "the model does not use the attention interface of transformers; use one that does")
    if getattr(model.loss_function, "func", None) is not shifted_loss:  # of an earlier call
        model.loss_function = partial(shifted_loss, model.loss_function)
    return cp


class HuggingFace:
    """A model with sharded attention; `context_parallel` makes it. `fn` is the variant's function."""

    def __init__(self, model: Any, fn: ContextParallel):
        self.model, self.fn = model, fn
        self.last: Split | None = None

    def shard(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seq_lens_q: Lengths = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """This rank's part `[B, s]` of a batch, as arguments of the model.

        input_ids, labels: `[B, S]`, the same on every rank. Labels are shifted, then sharded. This rank's loss is the sum
        over its tokens divided by num_items_in_batch, by default the number of shifted labels in the whole batch.
        position_ids: `[B, S]` from 0. A document begins where they restart at 0; its tokens see no others.
        cu_seq_lens_q says the same, over all rows. A batch with documents is sharded as one row.
        Lengths that do not divide are padded, which `unshard` cuts off.
        Raises ValueError for padding in attention_mask, for ids that differ between ranks, and for other arguments."""
        if self.fn.variant.decode:
            raise ValueError(f"{self.fn.variant.name} is for model.generate, with past_key_values=cp.cache(tokens=...)")
        if unknown := {name for name, x in others.items() if x is not None} - FOLLOW:
            raise ValueError(f"{', '.join(sorted(unknown))}: not known how to shard; leave it out")
        check_tokens(self.model)
        check_padding(attention_mask)
        check_same(self.fn, input_ids, self.model.device)
        self.last, positions = split_of(self.fn, input_ids, position_ids, cu_seq_lens_q)
        part = partial(self.last.part, self.fn)
        batch: dict[str, Any] = {"input_ids": part(input_ids), "position_ids": part(positions), "use_cache": False}
        if labels is not None:
            of_model = getattr(self.model.loss_function.args[0], "__name__", "of its own")
            if of_model != "ForCausalLMLoss":
                raise ValueError(f"labels: the model's loss is {of_model}, sharded is ForCausalLMLoss; use the logits")
            batch["shift_labels"] = part(labels := shifted(labels), IGNORED)
            batch["num_items_in_batch"] = counted(self.fn, labels, num_items_in_batch)
            batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)  # asks for the loss; none is shifted again
        return batch | {"context_parallel": self.last}

    def unshard(self, x: Tensor, batch: dict[str, Any] | None = None) -> Tensor:
        """The whole `[B, S, ...]` of x `[B, s, ...]`, such as logits, on every rank. batch: that of x, if not the last."""
        split = batch["context_parallel"] if batch else self.last
        if split is None:
            raise ValueError("batch=None: nothing was sharded yet; give what cp.shard returned")
        return split.whole(self.fn, x)

    def cache(self, tokens: int) -> Cache:
        """A cache for `model.generate` with a decode (`tree`): each rank holds its share of the keys and values of
        `tokens` tokens, prompt included. A cache is for one call."""
        if not self.fn.variant.decode:
            raise ValueError(f"{self.fn.variant.name} is no decode: context_parallel(model, 'tree') is")
        layers = range(self.model.config.get_text_config().num_hidden_layers)
        return Cache(layers=[CacheLayer(ShardedKV(self.fn.rank, self.fn.world, tokens)) for _ in layers])

    def reduce_gradients(self) -> None:
        """Sums the gradients over the ranks. FSDP and DDP over these ranks do so by themselves, but to the mean: leave this
        out, and multiply the loss by `cp.fn.world`."""
        reduce_used_gradients(self.model, self.fn.group)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: query `[B, H, s, D]`, key `[B, Hk, s, D]`, value `[B, Hk, s, Dv]` to out
        `[B, s, H, Dv]`. Raises ValueError for what it does not understand."""
        if not isinstance(attention_mask, RequestedMask):
            raise _refused(module, f"attention_mask is {type(attention_mask)}, not of the mask registry; leave it out")
        causal, window = attention_mask.causal, attention_mask.window
        for name, same in (("is_causal", causal), ("sliding_window", None if window[0] < 0 else window[0] + 1)):
            if (x := given.pop(name, None)) not in (None, same):
                raise _refused(module, f"{name}={x}: the model's mask says {same}; make them agree in its config")
        if dropout := given.pop("dropout", 0.0):
            raise _refused(module, f"dropout={dropout}: not supported; build the model with attention_dropout=0")
        split = given.pop("context_parallel", None)
        options: dict[str, Any] = {"causal": causal, "window": window}
        options |= {ours: x for name, ours in OURS.items() if (x := given.pop(name, None)) is not None}
        if unknown := {name for name, x in given.items() if x is not None and x is not False} - UNUSED:
            raise _refused(module, f"{', '.join(sorted(unknown))}: not understood by context_parallel; leave it out")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.fn.variant.decode:
            options |= {"kv_lengths": [attention_mask.tokens] * len(q), "kv_tokens": k.shape[1] * self.fn.world}
            return self.fn(q, k, v, **options), None
        if split is None:
            raise _refused(module, "context_parallel=None: the model must get all of cp.shard(...), and pass it on")
        options |= {"padding": split.padding, "cu_seqlens": split.cu_seqlens}
        if split.cu_seqlens is None:
            return self.fn(q, k, v, **options), None
        return self.fn(q[0], k[0], v[0], **options)[None], None


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's `ShardedKV` as transformers calls it; before transformers 5, get_mask_sizes with the new tokens' positions."""

    is_sliding = False

    def __init__(self, kv: ShardedKV):
        super().__init__()
        self.kv = kv

    def lazy_initialization(self, *states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = states[0].dtype, states[0].device, True

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states)
        self.keys, self.values = self.kv.append(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self, *unused: Any) -> int:
        return self.kv.seen

    def get_mask_sizes(self, new: Any) -> tuple[int, int]:
        return self.kv.seen + (new if isinstance(new, int) else len(new)), 0

    def get_max_length(self) -> int:
        return self.kv.tokens

    get_max_cache_shape = get_max_length  # before transformers 5

    def reset(self) -> None:
        super().reset()
        self.kv.seen = 0


def shifted_loss(of_model: Callable[..., Tensor], *args: Any, **given: Any) -> Tensor:
    """The model's loss over shift_labels. Raises ValueError if the model does not pass them on: it would shift again."""
    if missing := {"shift_labels", "num_items_in_batch"} - given.keys():
        raise ValueError(f"the model passes no {', '.join(sorted(missing))} to its loss; compute it from the logits")
    return of_model(*args, **given)


def _refused(what: object, why: str) -> ValueError:
    return ValueError(f"{type(what).__name__}: {why}")
