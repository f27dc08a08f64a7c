"""How a batch of tokens lies on sequence-parallel ranks: its documents, its padding, what a rank gets of it; and the sum of the
parameters' gradients over the ranks. Imports nothing of transformers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import compress, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from attention import compiled, masks
from attention.api import ContextParallel
from attention.call import Lengths, check_cu_seqlens
from attention.gpu.private import constant_in_graphs
from attention.huggingface.masks import Blocks, LayerMask
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.profiling import phase

IGNORED = -100  # the label of a token that does not count


def shifted(ids: Tensor) -> Tensor:
    """The label of each token of `[B, S]`: the next of its row, `IGNORED` for the last."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Split:
    """A global batch of `shape` (B, S) on the ranks of the function `fn`. cu_seqlens: of its documents, over all rows, which are
    then one packed batch; None: each row is a sequence. padding: the tokens that make it divide. blocks: of tokens that see each
    other, such as an image's, from start to stop in the packed batch; None: not known."""

    fn: ContextParallel
    shape: tuple[int, int]
    cu_seqlens: tuple[int, ...] | None = None
    padding: int = 0
    blocks: tuple[tuple[int, int], ...] | None = None
    # cu_seqlens for the compiler, to which other integers are another program
    lengths: Tensor | None = field(default=None, compare=False)
    positions: Tensor | None = field(default=None, compare=False)  # of this rank's tokens in their documents `[B, s]`
    kept: Tensor | None = field(default=None, compare=False)  # the tokens of all rows that are in the packed batch
    encoder: Split | None = field(default=None, compare=False)  # whose tokens these, a decoder's, attend to
    # attention of this rank's tokens of all rows, one after the other, to all of the encoder's
    cross: Callable[..., Tensor] | None = field(default=None, compare=False)

    def part(self, x: Tensor, fill: int = 0) -> Tensor:
        """This rank's part of x `[B, S, ...]`: `[B, s, ...]`, or `[1, s, ...]` of a packed batch. fill: of the padding."""
        x = x - fill if fill else x
        if self.cu_seqlens:
            x = x.flatten(0, 1) if self.kept is None else x.flatten(0, 1)[self.kept]
            x = x[None]
        whole = x if x.dim() == 2 else x.reshape(*x.shape[:2], 1, -1)
        part = self.fn.shard(whole[0] if self.cu_seqlens else whole, self.cu_seqlens, pad=True)[0]
        part = (part[None] if self.cu_seqlens else part).reshape(len(x), -1, *x.shape[2:])
        return part + fill if fill else part

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `part` for x `[B, s, ...]`: `[B, S, ...]` on every rank, 0 where the batch has padding."""
        flat = x.reshape(*x.shape[:2], 1, -1)
        whole = self.fn.unshard(flat[0] if self.cu_seqlens else flat, self.cu_seqlens, self.padding)
        if self.kept is not None:
            rows, tokens = self.shape
            whole = whole.new_zeros((rows * tokens, *whole.shape[1:])).index_copy(0, self.kept, whole)
        return whole.reshape(*self.shape, *x.shape[2:])

    def sees(self, layer: LayerMask) -> dict[str, Any]:
        """The arguments of a call for what a layer sees. Raises ValueError for blocks that are not known."""
        if not layer.by_blocks or self.blocks == ():
            mask: Mask | str | None = None
            if layer.chunk is not None:
                in_graph = torch.compiler.is_compiling()
                mask = _chunks_in_graph(layer.chunk) if in_graph else chunks(layer.chunk, self.cu_seqlens)
            return {"mask": mask, **of_band(layer.band)}
        if self.blocks is None:
            raise ValueError("tokens of an image see each other: give cp.shard the token_type_ids")
        return {"mask": blocks(layer, self.blocks)}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, layer: LayerMask, **options: Any) -> Tensor:
        """Attention of a layer's q `[B, s, H, D]`, k and v, this rank's part. options: of a call of `fn`."""
        if self.encoder and layer == LayerMask():  # what a decoder sees of itself is causal
            return self._attend_to(self.encoder, q, k, v, options)
        lengths = self.lengths if torch.compiler.is_compiling() else self.cu_seqlens
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope and self.positions is not None:
            local = torch.arange(q.shape[1], device=q.device)
            q = (q * _temperature(module, self.positions) / _temperature(module, local)).to(q.dtype)
        if self.blocks and torch.compiler.is_compiling():
            raise ValueError("each batch's images are another program for torch.compile: run the model eagerly")
        options |= {"padding": self.padding, "cu_seqlens": lengths, **self.sees(layer)}
        if lengths is None:
            return self.fn(q, k, v, **options)
        return self.fn(q[0], k[0], v[0], **options)[None]

    def _attend_to(self, encoder: Split, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention of q `[B, s, H, D]` to the encoder's keys, of which k and v are this rank's part."""
        if torch.compiler.is_compiling():
            raise ValueError("cross attention is not known to torch.compile: run the model eagerly")
        assert self.cross is not None
        keys = encoder.whole(torch.cat([k, v], -1)).flatten(0, 1)
        keys = keys if encoder.kept is None else keys[encoder.kept]
        if keys.requires_grad and not self.fn.layout.replicated:
            keys.register_hook(partial(_sum, group=self.fn.group))
        x = q.flatten(0, 1), *keys.split((k.shape[-1], v.shape[-1]), -1)
        tokens = max(map(len, x))
        out = self.cross(*(F.pad(y, (0, 0, 0, 0, 0, tokens - len(y)))[None] for y in x), **options)
        return out[0, : len(x[0])].unflatten(0, q.shape[:2])


def _sum(grad: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The gradient of gathered keys, of which each rank has the part of its own queries."""
    grad = grad.clone(memory_format=torch.contiguous_format)
    if dist.is_initialized():
        dist.all_reduce(grad, group=group)
    return grad


def crossed(decoder: Split, encoder: Split, dense: ContextParallel) -> Split:
    """The decoder's split with its attention to the encoder's tokens. Raises ValueError unless both have the same rows."""
    rows, tokens = encoder.shape
    spans = [*pairwise(encoder.cu_seqlens or range(0, rows * tokens + 1, tokens))]
    if len(spans) != decoder.shape[0]:
        raise ValueError(
            f"the decoder has {decoder.shape[0]} rows, the encoder {len(spans)} documents: must be as many; pad rows in "
            "place of packing them"
        )
    assert decoder.positions is not None
    row = torch.arange(len(spans), device=decoder.positions.device)[:, None]
    ids = decoder.part(row.expand(decoder.shape), -1).flatten().cpu()
    runs = _ranges(ids, torch.arange(len(ids)) == 0)
    parts = [(run, spans[int(ids[run[0]])], (-1, -1)) for run in runs]
    return replace(decoder, encoder=encoder, cross=partial(dense, mask=masks.rectangles(parts)))


def _temperature(module: Any, positions: Tensor) -> Tensor:
    """By what Llama 4 multiplies queries `[., s, H, D]`: its module takes the numbers of a rank's tokens for positions."""
    steps = torch.floor((positions + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0)[..., None, None]


def of_band(band: Band | None) -> dict[str, Any]:
    """The arguments of a call for a band."""
    assert band is not None
    causal = band.right == 0
    return {"causal": causal, "window": (band.left, -1 if causal else band.right)}


@constant_in_graphs
def _chunks_in_graph(chunk: int) -> str:
    """The handle by which a compiled call makes the mask, from its documents."""
    compiled.masks[handle := f"chunks({chunk})"] = partial(chunks, chunk)
    return handle


@lru_cache(maxsize=64)
def chunks(chunk: int, cu_seqlens: tuple[int, ...] | None) -> Mask:
    """Every document in chunks, whose tokens see no other chunk: a chunk begins anew with each document, as positions do."""
    if cu_seqlens is None:
        return masks.chunked(chunk)
    lengths = [min(chunk, stop - at) for start, stop in pairwise(cu_seqlens) for at in range(start, stop, chunk)]
    return masks.documents(lengths)


@lru_cache(maxsize=64)
def blocks(layer: LayerMask, ranges: tuple[tuple[int, int], ...]) -> Mask:
    """The mask of a layer by blocks, the same object for all layers of a batch."""
    return Blocks(layer, ranges)


def split_of(
    fn: ContextParallel,
    real: Tensor,
    positions: Tensor | None = None,
    cu_seqlens: Lengths = None,
    block_ids: Tensor | None = None,
) -> tuple[Split, Tensor]:
    """(split, positions `[B, S]`) of a global batch, whose documents begin where positions are 0 or where the cumulative lengths
    over all rows say. real: `[B, S]`, False for padding, which is left out. block_ids: `[B, S]`, one number of at least 0 for all
    tokens of a block, -1 for none. Raises ValueError where positions and lengths disagree, unless positions rise by one or restart at
    0, as they do in every row, and for padding between tokens."""
    counts = real.sum(1)
    first = real & ~F.pad(real, (1, 0))[:, :-1]
    if int(counts.min()) == 0 or int(first.sum(1).max()) > 1:
        raise ValueError(
            "attention_mask: in each row there may be zeros, then one or more ones, then zeros; no other order"
        )
    by_row = (0, *counts.cumsum(0).tolist())
    lengths = None if cu_seqlens is None else tuple(dict.fromkeys(check_cu_seqlens(cu_seqlens, by_row[-1])))
    if positions is None:
        flat = torch.cat([torch.arange(stop - start) for start, stop in pairwise(lengths or by_row)]).to(real.device)
        positions = torch.zeros_like(real, dtype=flat.dtype).masked_scatter(real, flat)
    positions = positions.expand_as(real)
    wrong = real & (positions != 0) & (first | (positions != F.pad(positions + 1, (1, 0))[:, :-1]))
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids has {int(positions[row, token])} in row {row} at token {token}: must count from 0 in each row, and "
            "again from 0 where a document begins"
        )
    begins = *(positions[real] == 0).nonzero().flatten().tolist(), by_row[-1]
    if lengths not in (None, begins):
        raise ValueError(f"cu_seq_lens_q={lengths}: position_ids begin documents at {begins}; give one of them")
    ranges = None if block_ids is None else _ranges(block_ids[real], first[real])
    rows, tokens = real.shape
    alike = begins == by_row and by_row[-1] == rows * tokens and (rows == 1 or not ranges)
    packed = None if alike else begins
    padding = fn.variant.padding(fn.options, packed or (0, tokens), fn.world)
    kept = None if by_row[-1] == rows * tokens else real.flatten().nonzero().flatten()
    split = Split(fn, (rows, tokens), packed, padding, ranges, None if alike else torch.tensor(packed), kept=kept)
    return replace(split, positions=split.part(positions)), positions


def _ranges(ids: Tensor, first: Tensor) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each run of one number of at least 0 in ids `[T]`. first: where a row begins, and with it another run."""
    begins = first | (ids != F.pad(ids, (1, 0))[:-1])
    bounds = [*begins.nonzero().flatten().tolist(), len(ids)]
    return tuple(run for run, id in zip(pairwise(bounds), ids[bounds[:-1]].tolist(), strict=True) if id >= 0)


def counted(attend: ContextParallel, labels: Tensor, number: Tensor | int | None = None) -> Tensor | int:
    """By what each rank divides the sum of its losses: the number of labels in the whole batch, or another number. Where all ranks
    have all tokens, each counts all of them."""
    number = (labels != IGNORED).sum() if number is None else number
    return number * attend.world if attend.layout.replicated else number


def check_batch(
    input_ids: Any, inputs_embeds: Any = None, position_ids: Any = None, ids: str = "input_ids", **others: Any
) -> Tensor:
    """input_ids, by the name `ids`, or inputs_embeds. Raises ValueError unless they are `[B, S]` or `[B, S, C]`, the others
    `[B, S]`, and position_ids, too, or `[1, S]`, or `[n, B, S]` with n values a token."""
    if input_ids is not None and inputs_embeds is not None:
        raise ValueError("input_ids and inputs_embeds: the model takes one of them; give one")
    name, x, shape = (
        (ids, input_ids, "[B, S]") if inputs_embeds is None else ("inputs_embeds", inputs_embeds, "[B, S, C]")
    )
    if not isinstance(x, Tensor) or x.dim() != shape.count(",") + 1:
        way_out = f"{name}[None]" if isinstance(x, Tensor) else "torch.tensor([ids]) for one row"
        raise ValueError(f"{name} is {_described(x)}: must be a tensor {shape}; give {way_out}")
    rows, tokens = x.shape[:2]
    for other, y in {"position_ids": position_ids, **others}.items():
        positions = other == "position_ids"
        if y is not None and not (
            isinstance(y, Tensor)
            and y.shape[-2:] in ((rows, tokens), (1 if positions else rows, tokens))
            and y.dim() in ((2, 3) if positions else (2,))
        ):
            raise ValueError(
                f"{other} is {_described(y)}: must be a tensor {[rows, tokens]}, the shape of {name}; positions may have several "
                f"values a token, [n, {rows}, {tokens}]"
            )
    return x


def check_same(fn: ContextParallel, device: torch.device, **batch: Any) -> None:
    """Raises ValueError on every rank unless all have the same values of all arguments. Call it before anything that depends on
    them may raise: another rank would wait. device: of the group's tensors. Collective."""
    if fn.world == 1 or not fn.settings.agreement_s:
        return
    if get_worker_info():  # a fork of it would wait for ever
        raise ValueError(
            "cp.shard compares the ranks, which a DataLoader's workers can't; give it the batches that the loader gives"
        )
    hashes = torch.tensor([_hash(x) for x in batch.values()], device=device)
    most = torch.stack([hashes, -hashes])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=fn.group)
    if differing := [name for name, most, least in zip(batch, *most.tolist(), strict=True) if most != -least]:
        raise ValueError(
            f"{', '.join(differing)} differ between the ranks: all ranks of the group share a batch; give the same, and for "
            "sampling the same seed"
        )


def _hash(x: Any) -> int:
    """56 bits, which no accident makes equal for other values, shapes or dtypes."""
    if isinstance(x, Tensor):
        x = x.shape, x.dtype, x.detach().cpu().double().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(pickle.dumps(x), digest_size=7).digest())


def _described(x: Any) -> str:
    return f"a tensor {list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"of {type(x)}"


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None, unused: bool = True) -> None:
    """Sums the parameters' gradients over the ranks of the attention's group, in place, once per optimizer step. A parameter
    without one counts as 0; without `unused`, one that no rank has used, such as an expert without tokens, stays without a
    gradient, which waits for the device. Raises ValueError for gradients that contain a sum already, and under FSDP, which
    reduces them itself."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    from torch.distributed.tensor import DTensor  # half a second of imports, and only where one trains

    if any(isinstance(p, DTensor) for p in parameters):
        raise ValueError(
            "parameters are DTensors: FSDP reduces them, to the mean; leave this out, and multiply the loss by the world size"
        )
    # The sums that a gradient holds: of which group, and at which version of the parameter, which a step of most optimizers
    # changes. They are kept at the gradient, so that a new one, after `zero_grad()`, holds none.
    if any((group, p._version) in getattr(p.grad, "sums", ()) for p in parameters):
        raise ValueError(
            "gradients hold a sum over the ranks, which would be summed again: reduce them once per optimizer step, after the "
            "backward of all its batches, and then set them to None (zero_grad())"
        )
    if not parameters or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    if not unused:
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        parameters = [*compress(parameters, used.tolist())]
    with phase("wait_gradients"):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad.sums = {*getattr(p.grad, "sums", ()), (group, p._version)}  # type: ignore[attr-defined]
