"""A model of transformers with sharded attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attention.api import ContextParallel, make
from attention.arguments import Lengths, check_cu_seqlens
from attention.huggingface.cache import Cache, sharded_cache
from attention.huggingface.checks import check_layers, check_loss, check_padding, check_sharded, shifted_loss
from attention.huggingface.masks import Asked, asked, documents

NO_LABEL = -100  # of a token without a loss, in transformers and in PyTorch
# Arguments that attention need not know: the tensors have them already, or the loss needs them
UNUSED = {"position_ids", "cache_position", "use_cache", "shift_labels", "num_items_in_batch", "past_key_values"}
FOLLOW = {"cu_seq_lens_k", "max_length_q", "max_length_k"}  # from cu_seq_lens_q
_numbers = count()


@dataclass(frozen=True)
class Sharded:
    """How a batch was sharded. It is an argument of the model, which passes it to every attention call."""

    shape: tuple[int, int]  # of the global batch
    cu_seqlens: tuple[int, ...] | None  # of its documents; None: each row is one
    padding: int


def context_parallel(
    model: Any, variant: str | ContextParallel = "zigzag", group: dist.ProcessGroup | None = None, **options: Any
) -> HuggingFace:
    """Shards the attention of a transformers model over the ranks of `group`, by one of `attention.names()` or by a function
    of `attention.make`. Call it on every rank, before FSDP or DDP wraps the model. A later call replaces the variant.

    options: those of `attention.make`, with the variant's own. Raises ValueError for a model whose layers mix tokens
    outside of transformers' attention interface."""
    check_layers(model)
    fn = variant if isinstance(variant, ContextParallel) else make(variant, group, **options)
    cp = HuggingFace(model, fn)
    name = f"context_parallel_{next(_numbers)}"
    AttentionInterface.register(name, cp.attend)
    AttentionMaskInterface.register(name, asked)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not use the attention interface of transformers; use one that does"
        )
    if getattr(model.loss_function, "func", None) is not shifted_loss:  # of an earlier call
        model.loss_function = partial(shifted_loss, model.loss_function)
    return cp


class HuggingFace:
    """A model with sharded attention; `context_parallel` makes it. `fn` is the variant's function."""

    def __init__(self, model: Any, fn: ContextParallel):
        self.model, self.fn = model, fn
        self.last: Sharded | None = None

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
        check_sharded(self.model)
        check_padding(attention_mask)
        self._check_same(input_ids)
        rows, tokens = input_ids.shape
        by_row = tuple(range(0, rows * tokens + 1, tokens))
        given = None if cu_seq_lens_q is None else tuple(dict.fromkeys(check_cu_seqlens(cu_seq_lens_q, rows * tokens)))
        if position_ids is None:
            each = [torch.arange(stop - start) for start, stop in pairwise(given or by_row)]
            position_ids = torch.cat(each).view(rows, tokens).to(input_ids.device)
        position_ids = position_ids.expand(rows, tokens)
        found = documents(position_ids)
        if given not in (None, found):
            raise ValueError(f"cu_seq_lens_q={given}: position_ids begin documents at {found}; give one of them")
        packed = None if found == by_row else found

        def part(x: Tensor, fill: int = 0) -> tuple[Tensor, int]:
            x, padding = self.fn.shard((x - fill).reshape(1, -1) if packed else x - fill, packed, pad=True)
            return x + fill, padding

        ids, padding = part(input_ids)
        self.last = Sharded((rows, tokens), packed, padding)
        batch = {"input_ids": ids, "position_ids": part(position_ids)[0], "use_cache": False}
        batch["context_parallel"] = self.last
        if labels is not None:
            check_loss(self.model)
            shifted = F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
            counted = (shifted != NO_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
            batch["num_items_in_batch"] = counted * (self.fn.world if self.fn.layout.replicated else 1)
            batch["shift_labels"] = part(shifted, NO_LABEL)[0]
            batch["labels"] = torch.full_like(ids, NO_LABEL)  # makes the model compute its loss; none is shifted again
        return batch

    def unshard(self, x: Tensor, batch: dict[str, Any] | None = None) -> Tensor:
        """The whole `[B, S, ...]` of x `[B, s, ...]`, such as logits, on every rank. batch: what `shard` returned for x, by
        default the last."""
        how = batch["context_parallel"] if batch else self.last
        if how is None:
            raise ValueError("batch=None: nothing was sharded yet; give what cp.shard returned")
        flat = x.reshape(*x.shape[:2], 1, -1)
        whole = self.fn.unshard(flat[0] if how.cu_seqlens else flat, how.cu_seqlens, how.padding)
        return whole.reshape(*how.shape, *x.shape[2:])

    def cache(self, tokens: int) -> Cache:
        """A cache for `model.generate` with a decode (`tree`): each rank holds its share of the keys and values of
        `tokens` tokens, prompt included. A cache is for one call."""
        if not self.fn.variant.decode:
            raise ValueError(f"{self.fn.variant.name} is no decode: context_parallel(model, 'tree') is")
        layers = self.model.config.get_text_config().num_hidden_layers
        return sharded_cache(layers, self.fn.rank, self.fn.world, tokens)

    def reduce_gradients(self) -> None:
        """Sums the gradients over the ranks. FSDP and DDP over these ranks do so by themselves, but to the mean: leave this
        out, and multiply the loss by `cp.fn.world`."""
        parameters = [x for x in self.model.parameters() if x.requires_grad]
        if any(hasattr(x, "full_tensor") for x in parameters):
            raise ValueError("parameters are DTensors: FSDP reduces them; multiply the loss by cp.fn.world instead")
        if self.fn.world == 1:
            return
        # experts that got no token of this rank have no gradient here
        used = torch.tensor([x.grad is not None for x in parameters], dtype=torch.int32, device=self.model.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.fn.group)
        for x in (x for x, is_used in zip(parameters, used.tolist(), strict=True) if is_used):
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            dist.all_reduce(x.grad, group=self.fn.group)

    def _check_same(self, ids: Tensor) -> None:
        """Raises ValueError on every rank unless all have the same ids."""
        if self.fn.world > 1:
            weighted = ids.flatten() * torch.arange(1, ids.numel() + 1, device=ids.device)
            mine = torch.stack([weighted.sum(), ids.new_tensor(ids.numel())]).to(self.model.device)
            most = torch.cat([mine, -mine])
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.fn.group)
            if not torch.equal(most[:2], -most[2:]):
                raise ValueError(
                    "input_ids differ between the ranks: all ranks of the group share a batch; give the same"
                )

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: query `[B, H, s, D]`, key `[B, Hk, s, D]`, value `[B, Hk, s, Dv]` to out
        `[B, s, H, Dv]`. Raises ValueError for what it does not understand."""
        where = f"{type(module).__name__}: "
        if not isinstance(attention_mask, Asked):
            raise ValueError(f"{where}attention_mask is {type(attention_mask)}, not of the mask registry; leave it out")
        causal, window = attention_mask.causal, attention_mask.window
        for name, same in (("is_causal", causal), ("sliding_window", None if window[0] < 0 else window[0] + 1)):
            if (x := given.pop(name, None)) not in (None, same):
                raise ValueError(f"{where}{name}={x}: the model's mask says {same}; make them agree in its config")
        if dropout := given.pop("dropout", 0.0):
            raise ValueError(f"{where}dropout={dropout}: not supported; build the model with attention_dropout=0")
        how = given.pop("context_parallel", None)
        options: dict[str, Any] = {"causal": causal, "window": window}
        for name, ours in (("scaling", "scale"), ("softcap", "softcap"), ("s_aux", "sinks")):
            if (x := given.pop(name, None)) is not None:
                options[ours] = x
        if unknown := {name for name, x in given.items() if x is not None and x is not False} - UNUSED:
            raise ValueError(f"{where}{', '.join(sorted(unknown))}: not understood by context_parallel; leave it out")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.fn.variant.decode:
            options |= {"kv_lengths": [attention_mask.tokens] * len(q), "kv_tokens": k.shape[1] * self.fn.world}
            return self.fn(q, k, v, **options), None
        if how is None:
            raise ValueError(
                f"{where}context_parallel=None: give the model all that cp.shard(...) returns, and one that passes it on"
            )
        if how.cu_seqlens is None:
            return self.fn(q, k, v, padding=how.padding, **options), None
        q, k, v = q[0], k[0], v[0]
        return self.fn(q, k, v, padding=how.padding, cu_seqlens=how.cu_seqlens, **options)[None], None
