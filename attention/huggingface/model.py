"""Context parallelism for any model of transformers that uses its attention interface.

    cp = context_parallel(model, "zigzag")                                # once, on every rank
    model(**cp.shard(input_ids=ids, labels=labels)).loss.backward()       # this rank's part of the global mean
    cp.reduce_gradients()

    cp = context_parallel(model, "tree")                                  # generation, with the keys sharded
    model.generate(ids, past_key_values=cp.cache(tokens=4096))

What a model asks of its attention is done, or refused by its name: masks, keyword arguments, padding, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from inspect import getsource, signature, unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention.api import ContextParallel, make
from attention.call import Lengths
from attention.huggingface.batch import (
    IGNORED,
    Split,
    check_batch,
    check_same,
    counted,
    crossed,
    reduce_gradients,
    shifted,
    split_of,
)
from attention.huggingface.masks import Function, LayerMask, in_graph, layer_mask
from attention.huggingface.trainer import prepared

try:
    from transformers import AttentionInterface, AttentionMaskInterface

    from attention.huggingface.cache import ShardedCache
except ImportError as error:
    raise ImportError(f"{error}: pip install 'attention-runner[huggingface]'", name=error.name) from error

NAME = "context_parallel"  # of our attention among transformers', and of the layout among a batch's arguments
# Arguments that attention need not know: the tensors have them already, or the loss needs them
UNUSED = {
    "position_ids", "cache_position", "use_cache", "shift_labels", "num_items_in_batch", "past_key_values", "output_hidden_states",
}  # fmt: skip
FOLLOW = {"cu_seq_lens_k", "max_length_q", "max_length_k"}  # from cu_seq_lens_q
LAYERS = ("full_attention", "sliding_attention", "chunked_attention")  # whose tokens attention alone mixes
POOLED = (
    "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "BertForPreTraining", "AlbertForPreTraining",
    "BigBirdForPreTraining",
)  # fmt: skip
OURS = {"scaling": "scale", "softcap": "softcap", "s_aux": "sinks"}  # names of transformers and of a call


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"ForCausalLMLoss": shifted, "ForMaskedLMLoss": lambda labels: labels}


def context_parallel(
    model: Any, variant: str | ContextParallel = "zigzag", group: dist.ProcessGroup | None = None, **options: Any
) -> HuggingFace:
    """Shards the attention of a transformers model over the ranks of `group`, by one of `attention.names()` or by a function
    of `attention.make`. Call it on every rank, before FSDP or DDP wraps the model; PEFT's wrapper is taken as well. Several calls
    for one model work beside each other: a batch and a cache are attended by the variant that made them.

    options: those of `attention.make`, with the variant's own. Raises ValueError for a model whose layers mix tokens
    outside of transformers' attention interface."""
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    if not hasattr(model, "set_attn_implementation"):
        raise _refused(model, "not a model of transformers; call context_parallel before the model is wrapped")
    check_layers(model)
    if isinstance(variant, ContextParallel) and (group is not None or options):
        raise ValueError("a function of attention.make has its group and options: give it alone")
    fn = variant if isinstance(variant, ContextParallel) else make(variant, group, **options)
    language_model(model).set_attn_implementation(NAME)
    sources = {import_module(type(module).__module__) for module in model.modules()}
    uses = any(hasattr(source, "ALL_ATTENTION_FUNCTIONS") for source in sources)
    if not uses or model.config.get_text_config()._attn_implementation != NAME:
        raise _refused(model, "the model does not use the attention interface of transformers; use one that does")
    if getattr(model.loss_function, "func", None) is not shifted_loss:  # of an earlier call
        model.loss_function = partial(shifted_loss, model.loss_function)
        model.register_forward_pre_hook(with_layout, with_kwargs=True)
        if two_parts(model):
            model.get_encoder().register_forward_pre_hook(with_layout_of_encoder, with_kwargs=True)
    return HuggingFace(model, fn)


@dataclass
class HuggingFace:
    """A model with sharded attention; `context_parallel` makes it. fn: the variant's function. last: of the last batch."""

    model: Any
    fn: ContextParallel
    last: Split | None = None

    @cached_property
    def dense(self) -> ContextParallel:
        """The function of cross attention, where each rank has a mask of its own."""
        return make("dense", self.fn.group, deterministic=self.fn.settings.deterministic, agreement=False)

    def shard(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seq_lens_q: Lengths = None,
        num_items_in_batch: Tensor | int | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """This rank's part `[B, s]` of a batch, as arguments of the model.

        input_ids, labels: `[B, S]`, the same on every rank. Labels are shifted, then sharded. This rank's loss is the sum
        over its tokens divided by num_items_in_batch, by default the number of shifted labels in the whole batch.
        inputs_embeds: `[B, S, C]`, in place of input_ids; gradients flow to the whole of them, this rank's part.
        position_ids: `[B, S]` from 0. A document begins where they restart at 0; its tokens see no others.
        cu_seq_lens_q says the same, over all rows. A batch with documents is sharded as one row. Positions of several values a
        token are `[n, B, S]`: with n = 4 the first is that of the text, as in transformers.
        attention_mask: `[B, S]` with 0 for padding before and after a row's tokens, which are a document.
        token_type_ids, mm_token_type_ids: `[B, S]`, by which models tell images, whose tokens see each other.
        decoder_input_ids: `[B, S']` of an encoder-decoder, by default its labels `[B, S']`, moved by one as the model does. Tokens of
        padding are left out.
        Lengths that do not divide are padded, which `unshard` cuts off.
        Raises ValueError for arguments that differ between ranks or that the model does not take, and for other arguments."""
        if self.fn.variant.decode:
            raise ValueError(f"{self.fn.variant.name} is for model.generate, with past_key_values=cp.cache(tokens=...)")
        named = ("token_type_ids", token_type_ids), ("mm_token_type_ids", mm_token_type_ids)
        types: dict[str, Any] = {name: x for name, x in named if x is not None}
        taken = signature(self.model.forward).parameters
        asks = {*types, *(() if decoder_input_ids is None else ["decoder_input_ids"])}
        unknown = sorted({name for name, x in others.items() if x is not None} - FOLLOW | asks - taken.keys())
        check_same(
            self.fn, self.model.device, input_ids=input_ids, labels=labels, position_ids=position_ids,
            attention_mask=attention_mask, cu_seq_lens_q=cu_seq_lens_q, num_items_in_batch=num_items_in_batch,
            inputs_embeds=getattr(inputs_embeds, "shape", None), token_type_ids=token_type_ids,
            mm_token_type_ids=mm_token_type_ids, decoder_input_ids=decoder_input_ids, other_arguments=unknown,
        )  # fmt: skip
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not known how to shard; leave it out, and give input_ids, or inputs_embeds with images"
            )
        two = two_parts(self.model)
        by_token = types | {"labels": None if two else labels, "attention_mask": attention_mask}
        x = check_batch(input_ids, inputs_embeds, position_ids, **by_token)
        check_tokens(self.model)
        pad = getattr(self.model.config, "pad_token_id", None)
        if two and attention_mask is None and input_ids is not None and pad in input_ids.unique().tolist():
            raise ValueError(f"attention_mask=None: the encoder takes ids of {pad} for padding; give cp.shard the mask")
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask != 0
        mrope = position_ids if position_ids is not None and position_ids.dim() == 3 else None
        text = position_ids if mrope is None else mrope[0] if len(mrope) == 4 else None
        check_images(self.model, types, mrope)
        self.last, positions = split_of(self.fn, real, text, cu_seq_lens_q, block_ids(self.model, types))
        part = self.last.part
        batch: dict[str, Any] = {"input_ids" if inputs_embeds is None else "inputs_embeds": part(x)}
        batch |= {name: part(x) for name, x in types.items()} | {"position_ids": part(positions)}
        if mrope is not None:
            batch["position_ids"] = part(mrope.expand(-1, *real.shape).movedim(0, -1)).movedim(-1, 0)
        if "use_cache" in taken:  # no encoder
            batch["use_cache"] = False
        if two:
            decoder, real = self._decoder(decoder_input_ids, labels, pad)
            batch |= decoder | {"attention_mask": torch.ones_like(batch["position_ids"])}
        if labels is not None:
            batch |= self._labels(labels, real, num_items_in_batch)
        return batch | {NAME: self.last}

    def _decoder(self, ids: Tensor | None, labels: Tensor | None, pad: int | None) -> tuple[dict[str, Any], Tensor]:
        """This rank's part of the decoder's tokens, as arguments of the model, and where in the batch there is no padding. The split of
        the encoder's tokens, the last, becomes that of both."""
        name = "labels" if ids is None else "decoder_input_ids"
        ids = check_batch(labels if ids is None else ids, ids=name, labels=labels)
        ids = self.model.prepare_decoder_input_ids_from_labels(ids) if name == "labels" else ids
        split, positions = split_of(self.fn, real := torch.ne(ids, -1 if pad is None else pad))
        assert self.last is not None
        self.last = crossed(split, self.last, self.dense)
        part = split.part(positions)
        ones = torch.ones_like(part)  # else the model looks for padding
        return {
            "decoder_input_ids": split.part(ids),
            "decoder_position_ids": part,
            "decoder_attention_mask": ones,
        }, real

    def _labels(self, labels: Tensor, real: Tensor, number: Tensor | int | None) -> dict[str, Any]:
        """This rank's shifted labels and the whole batch's number of them, as arguments of the model. real: where there is no padding.
        Raises ValueError for labels of padding, and for a loss that is no sum over tokens."""
        of_model = loss_of(self.model)
        if of_model not in LOSSES:
            raise ValueError(
                f"labels: the model's loss is {of_model}, sharded is {' or '.join(LOSSES)}; use the logits"
            )
        if (labels[~real] != IGNORED).any():
            raise ValueError(f"labels are not {IGNORED} at padding: set them, labels[attention_mask == 0] = {IGNORED}")
        assert self.last is not None
        labels = LOSSES[of_model](labels).masked_fill(~real, IGNORED)
        part = self.last.part(labels, IGNORED)
        asks = torch.full_like(part, IGNORED)  # for the loss; none is shifted again
        return {"shift_labels": part, "num_items_in_batch": counted(self.fn, labels, number), "labels": asks}

    def unshard(self, x: Tensor, batch: dict[str, Any] | None = None) -> Tensor:
        """The whole `[B, S, ...]` of x `[B, s, ...]`, such as logits, on every rank. batch: that of x, if not the last."""
        split = batch[NAME] if batch else self.last
        if split is None:
            raise ValueError("batch=None: nothing was sharded yet; give what cp.shard returned")
        return split.whole(x)

    def cache(self, tokens: int) -> ShardedCache:
        """A cache for `model.generate` with a decode (`tree`): each rank holds its share of the keys and values of
        `tokens` tokens, prompt included. A cache is for one call."""
        if not self.fn.variant.decode:
            raise ValueError(f"{self.fn.variant.name} is no decode: context_parallel(model, 'tree') is")
        return ShardedCache(self.fn, self.model.config.get_text_config().num_hidden_layers, tokens)

    def prepare(self, trainer: Any) -> Any:
        """The Trainer of transformers itself: it trains, evaluates and predicts with this model as on one rank, with DDP or FSDP. All
        ranks of the group get the same rows. Of an Accelerator only the data loaders that it prepares change. Raises ValueError for
        arguments of the Trainer that would break this."""
        return prepared(self, trainer)

    def reduce_gradients(self) -> None:
        """Sums the gradients over the ranks, once per optimizer step. FSDP and DDP over these ranks do so by themselves, but to
        the mean: leave this out, and multiply the loss by `cp.fn.world`. Raises ValueError for gradients that hold a sum
        already."""
        reduce_gradients(self.model, self.fn.group, unused=False)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """The attention function for transformers: query `[B, H, s, D]`, key `[B, Hk, s, D]`, value `[B, Hk, s, Dv]` to out
    `[B, s, H, Dv]`. Under autocast they are cast to its dtype, as for torch's own attention. Raises ValueError for what it does
    not understand."""
    if not isinstance(attention_mask, LayerMask):
        raise _refused(module, f"attention_mask is {type(attention_mask)}, not of the mask registry; leave it out")
    band = attention_mask.band
    # where a window has two sides, models call it by the tokens on one of them, with or without the query
    windows = [] if band is None or band.left < 0 else [band.left + 1, band.left][: 1 + (band.right > 0)]
    for name, same in (("is_causal", [band is not None and band.right == 0]), ("sliding_window", windows)):
        if (x := others.pop(name, None)) not in (None, *same):
            raise _refused(
                module, f"{name}={x}: the model's mask says {[*same, None][0]}; make them agree in its config"
            )
    if dropout := others.pop("dropout", 0.0):
        raise _refused(module, f"dropout={dropout}: not supported; build the model with attention_dropout=0")
    layout: Split | ShardedCache | None = others.pop(NAME, None)
    options = {ours: x for name, ours in OURS.items() if (x := others.pop(name, None)) is not None}
    if unknown := {name for name, x in others.items() if x is not None and x is not False} - UNUSED:
        raise _refused(module, f"{', '.join(sorted(unknown))}: not understood by context_parallel; leave it out")
    if layout is None:
        raise _refused(module, f"{NAME}=None: the model must get all of cp.shard(...), and pass it on")
    q, k, v = (_autocast(x.transpose(1, 2)) for x in (query, key, value))
    return layout.attend(module, q, k, v, attention_mask, **options), None


def with_layout(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before the model's forward: a cache becomes the layout of the call, as a sharded batch has its own. Raises ValueError
    for a batch of which attention could not know how it lies, and for what would be computed from one rank's tokens alone."""
    sharded = kwargs.get(NAME)
    layout = sharded or next((x for x in kwargs.values() if isinstance(x, ShardedCache)), None)
    if (implementation := model.config.get_text_config()._attn_implementation) != NAME:
        if layout is None:
            return args, kwargs
        raise _refused(model, f"attn_implementation={implementation}: the batch is sharded; set it to {NAME!r}")
    if layout is None:
        raise _refused(
            model,
            "the batch is not sharded; give model(**cp.shard(...)), or model.generate with past_key_values=cp.cache(...) of "
            "cp = context_parallel(model, 'tree')",
        )
    if isinstance(layout, ShardedCache):
        check_same(layout.fn, model.device, input_ids=args[0] if args else kwargs.get("input_ids"))
    else:
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise _refused(model, "labels: their tokens are sharded, they are not; give them to cp.shard")
        for name in ("logits_to_keep", "past_key_values", "cache"):
            if isinstance(x := kwargs.get(name), Tensor) or x:
                raise _refused(model, f"{name}: of this rank's tokens alone; leave it out, and use cp.unshard(logits)")
    return args, kwargs | {NAME: layout}


def with_layout_of_encoder(
    encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before an encoder's forward, which gets the layout of its decoder's tokens: it becomes that of its own."""
    return args, kwargs | ({NAME: layout.encoder} if (layout := kwargs.get(NAME)) else {})


def shifted_loss(of_model: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The model's loss over shift_labels. Raises ValueError if the model does not pass them on: it would shift those of a sharded
    batch again, all of which are `IGNORED`."""
    missing = {"shift_labels", "num_items_in_batch"}.difference(kwargs)
    if missing and (labels == IGNORED).all():
        raise ValueError(f"the model passes no {', '.join(sorted(missing))} to its loss; compute it from the logits")
    return of_model(logits, kwargs.get("shift_labels", labels), *args, **kwargs)


def loss_of(model: Any) -> str:
    """The name of the model's loss. Many encoders do not take that of their kind."""
    name = getattr(model.loss_function.args[0], "__name__", "of its own")
    source = getsource(unwrap(type(model).forward))
    return "of its own" if name == "ForMaskedLMLoss" and "loss_function" not in source else name


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x


def _refused(what: object, why: str) -> ValueError:
    return ValueError(f"{type(what).__name__}: {why}")


def language_model(model: Any) -> Any:
    """The part whose attention is sharded: of a model with other modalities that of the text."""
    if two_parts(model):
        return model
    text = model.config.get_text_config()
    return next(module for module in model.modules() if getattr(module, "config", None) is text)


def two_parts(model: Any) -> bool:
    """Whether the model has an encoder and a decoder."""
    return getattr(model.config, "is_encoder_decoder", False)


def block_ids(model: Any, types: dict[str, Tensor]) -> Tensor | None:
    """The block of each token `[B, S]`, -1 for none, as the model itself computes it from types of tokens; None: it has no blocks.
    Models do so from transformers 5 on."""
    modules = (import_module(kind.__module__) for kind in type(model).__mro__)
    function = next((f for x in modules if (f := getattr(x, "get_block_sequence_ids_for_mask", None))), None)
    return next((function(x, device=x.device) for x in types.values()), None) if function else None


def check_images(model: Any, types: dict[str, Tensor], mrope: Tensor | None) -> None:
    """Raises ValueError for images whose positions of several values the model would compute from one rank's tokens."""
    if mrope is None and hasattr(model.base_model, "get_rope_index") and any(bool(x.any()) for x in types.values()):
        raise ValueError("position_ids: images need theirs, [3, B, S]; give model.base_model.get_rope_index(...)[0]")


def check_layers(model: Any) -> None:
    """Raises ValueError for layers that mix tokens outside of transformers' attention interface."""
    if two_parts(model):
        takes = {"position_ids", "decoder_position_ids"} - signature(model.forward).parameters.keys()
        kinds = {x.is_causal for x in model.get_decoder().modules() if hasattr(x, "is_causal")}
        if takes or kinds != {True, False}:
            raise _refused(
                model,
                "an encoder-decoder must take position_ids and decoder_position_ids, and have cross attention apart from its "
                "decoder's own, as T5Gemma does; use a decoder or an encoder",
            )
    pooler = getattr(model, "pooler", None)
    if type(model).__name__.endswith(POOLED) or pooler is not None:
        way_out = "use the model without its head" if pooler is None else "load the model with add_pooling_layer=False"
        raise _refused(model, f"a head that pools would see one rank's tokens; {way_out}")
    language = language_model(model)
    for key in ("trigram_input", "token_dropout"):
        if getattr(language.config, key, False):
            raise ValueError(f"{key}=True: mixes tokens outside of attention; load the model with {key}=False")
    for name, module in language.named_modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
            raise _refused(model, "its positions do not begin at 0; use another model")
        if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ValueError(f"{name} is a {type(module).__name__}: only attention may mix tokens; use another model")
        if type(module).__name__ == "Llama4TextMoe" and "router_scores.reshape" in getsource(type(module).forward):
            raise ValueError(f"{name} mixes tokens by a fault of transformers 4.56.0: install 4.56.1 or newer")
    if others := {*(getattr(language.config, "layer_types", None) or ())} - {*LAYERS}:
        raise ValueError(f"layer_types has {', '.join(sorted(others))}: layers must be {' or '.join(LAYERS)}")


def check_tokens(model: Any) -> None:
    """Raises ValueError for a model that computes from a rank's tokens what depends on all of them."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits=True: the router's loss is not a sum over tokens; set it to False")
    if "position_ids" not in signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no position_ids: a rank's tokens need theirs; use another model"
        )
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in rope:
            raise ValueError(f"rope_type={kind}: it depends on the last position of the whole batch; use another type")


def asked(mask_function: Function, attention_mask: Tensor | None = None, **others: Any) -> LayerMask:
    """A function for transformers' mask registry: what a layer sees, which attention gets in place of a mask. Positions,
    documents and blocks are not read from the mask, but from the sharded batch.

    Raises ValueError for padding, and for masks that are not known."""
    check_padding(attention_mask)
    if not torch.compiler.is_compiling():
        return layer_mask(mask_function)
    if others.get("use_vmap", True):
        raise ValueError("the model's mask is not known within torch.compile; compile its layers, not the whole")
    return in_graph(others["config"], "allow_is_bidirectional_skip" in others, others.get("local_size"))


def check_padding(attention_mask: Tensor | None) -> None:
    """Raises ValueError unless the mask is `[B, S]` of ones."""
    if attention_mask is not None and not (attention_mask.dim() == 2 and bool((attention_mask == 1).all())):
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)} is not all ones: give it to cp.shard, which packs the rows "
            "without their padding; generate from prompts of one length"
        )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, asked)
