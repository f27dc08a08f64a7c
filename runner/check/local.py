"""A local call: the same kernel in the same dtype on one device, on the inputs of one KV head. Its errors are what one device has
anyway. Its kernel calls are merged and summed in fp32 by the definitions, not by the library's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attention.call import positive, signed
from attention.kernels import Call, Kernel, Shape, select
from attention.masks.band import FULL, Band
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from runner.check.dilated import Selected
from runner.config.experiment import Experiment

Places = slice | Tensor
ALL = slice(None)


class Part(NamedTuple):
    """One kernel call, and which queries, keys and query heads it takes."""

    call: Call
    queries: Places = ALL
    keys: Places = ALL
    heads: slice = ALL

    def of_queries(self, x: Tensor) -> Tensor:
        """Its rows of `[..., S, H, D]`."""
        return x[..., self.queries, self.heads, :]

    def of_lse(self, lse: Tensor) -> Tensor:
        """Its rows of `[..., H, S]`."""
        return lse[..., self.heads, self.queries]


def weight(lse: Tensor, total: Tensor) -> Tensor:
    """The weight of an out in a whole, `[..., S, H, 1]`, by the LSE of both, `[..., H, S]`."""
    return (lse - total.masked_fill(total == -torch.inf, 0)).exp().mT.unsqueeze(-1)


def parts(experiment: Experiment, device: torch.device, first_head: int, heads: int) -> Iterator[Part]:
    """The kernel calls of these query heads: one or, of a decode, one on the prefix and one on the element's own keys; of dilated
    attention one for each head and pair, with its segments as a packed batch."""
    spec, dilation = experiment.workload, experiment.dilation
    call = Call(positive(spec.scale, spec.head_dim), softcap=spec.softcap)
    if dilation is not None:
        for head in range(heads):
            for pair in dilation.pairs_of(first_head + head, spec.heads):
                selected = Selected.of(spec.cu_seqlens, *pair)
                at, lengths = selected.places.to(device), selected.lengths
                packed = call.of_packed(Band.of(spec.causal, (-1, -1)), lengths, lengths, device)
                yield Part(packed, at, at, slice(head, head + 1))
    elif isinstance(spec.mask, Mask):
        yield Part(call.under(Pattern(spec.seq_len, spec.seq_len, spec.mask.rectangles(spec.seq_len))))
    elif spec.seqlens is not None:
        yield Part(call.of_packed(spec.mask, spec.seqlens, spec.seqlens, device))
    else:
        prefix = spec.prefix or 0
        if prefix:
            yield Part(call.under(FULL), keys=slice(0, prefix))
        yield Part(call.under(spec.mask), keys=slice(prefix, None))


def results(
    experiment: Experiment, inputs: dict[str, Tensor], first_head: int, kernel: Kernel | str
) -> dict[str, Tensor]:
    """out, dq, dk and dv `[S, ., .]`, and dsinks `[H]` of inputs as `pieces.piece_inputs`. kernel: by its name, it is selected for each
    kernel call. Raises UnsupportedCall where it cannot do one."""
    spec, sinks = experiment.workload, inputs.get("sinks")
    batched = spec.seqlens is None and experiment.dilation is None
    q, k, v, *douts = (inputs[x][None] if batched else inputs[x] for x in ("q", "k", "v", "dout") if x in inputs)
    q = signed(q, spec.scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=dtype)
    calls = []
    for part in parts(experiment, q.device, first_head, q.shape[-2]):
        given = part.of_queries(q), k[..., part.keys, :, :], v[..., part.keys, :, :]
        chosen = kernel
        if isinstance(chosen, str):
            chosen = select(chosen, Shape.of(*given, softcap=spec.softcap is not None), (part.call.mask,))
        result = chosen.forward(*given, part.call)
        lse[..., part.heads, part.queries] = part.of_lse(lse).logaddexp(result[1])
        calls.append((part, chosen, given, *result))
    whole = v.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    for part, _, _, out, own in calls:
        whole[..., part.queries, part.heads, :] += out * weight(own, part.of_lse(lse))
    whole = whole.to(q.dtype)
    if sinks is not None:
        with_sinks = lse.logaddexp(sinks.to(dtype).unsqueeze(-1))
        whole, lse = (whole * weight(lse, with_sinks)).to(q.dtype), with_sinks
    divisor = 1 if experiment.dilation is None else experiment.dilation.divisor
    found = {"out": whole / divisor}
    for dout in douts:
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for part, chosen, given, out, own in calls:
            rows = part.of_queries(dout)
            if experiment.dilation is not None and experiment.dilation.weights == "detached":
                rows = (rows * weight(own, part.of_lse(lse))).to(q.dtype)
            else:
                out, own = part.of_queries(whole), part.of_lse(lse).contiguous()
            grads = chosen.backward(rows, *given, out, own, part.call)
            dq[..., part.queries, part.heads, :] += grads[0]
            dk[..., part.keys, :, :] += grads[1]
            dv[..., part.keys, :, :] += grads[2]
        grads = (signed(dq, spec.scale), dk, dv)
        found |= {name: (x / divisor).to(q.dtype) for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
        if sinks is not None:
            share = (sinks.to(dtype).unsqueeze(-1) - lse).exp().masked_fill(lse == -torch.inf, 0)
            dsinks = -(share * (dout.to(dtype) * whole).sum(-1).mT).sum(-1).view(-1)
            found["dsinks"] = dsinks.to(sinks.dtype) / divisor
    return {name: x[0] if batched and name != "dsinks" else x for name, x in found.items()}
