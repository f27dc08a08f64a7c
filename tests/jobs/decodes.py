"""Jobs on decodes with all that a call may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attention
from attention.masks.band import Band
from runner.launch.rank import Rank
from tests.jobs.numerics import worst_lse
from tests.jobs.reference import DTYPES
from tests.support.naive import attention as plain
from tests.support.naive import kept


def compare(
    me: Rank, settings: list[tuple[str, dict[str, Any]]], cases: list[dict[str, Any]], dtype: str = "fp32"
) -> list[dict[str, Any]]:
    """For each variant with its options and each case, by rank the largest errors of out and lse against fp64, and the number of
    plans. Keys beyond an element's length are NaN."""
    fns = [attention.make(name, **options) for name, options in settings]
    found = []
    for case in cases:
        q, k, v, given = _inputs(case, DTYPES[dtype], me.device)
        prefix = given.pop("prefix", None)
        exact, exact_lse = _expected(q, k, v, case, given.get("sinks"), prefix)
        for fn, setting in zip(fns, settings, strict=True):
            local = [fn.shard(q, role="q"), *(fn.shard(x, role="kv") for x in (k, v))]
            if prefix:
                given |= {"prefix": tuple(fn.shard(x, role="kv") for x in prefix), "prefix_tokens": prefix[0].shape[1]}
            out, lse = fn(*local, **given, kv_tokens=case["keys"], return_lse=True)
            errors = me.gather([float((out - exact).abs().max()), worst_lse(lse, exact_lse), len(fn.plans)])
            found.append({"setting": setting, "case": case, "errors": errors})
    return found


def _inputs(
    case: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Global q, k, v, and what else the call is given."""
    generator = torch.Generator().manual_seed(0)
    batch, kv_heads, dim, value_dim = case["batch"], case["kv_heads"], 16, case.get("value_dim", 16)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q = normal(batch, case["queries"], case["heads"], dim)
    k, v = (normal(batch, case["keys"], kv_heads, n) for n in (dim, value_dim))
    given = {name: case[name] for name in ("causal", "window", "softcap") if name in case}
    if lengths := case.get("lengths"):
        given["kv_lengths"] = torch.tensor(lengths, device=device) if case.get("tensor") else lengths
        for x in (k, v):
            for b, n in enumerate(lengths):
                x[b, n:] = torch.nan
    if case.get("sinks"):
        given["sinks"] = normal(case["heads"])
    if shared := case.get("prefix"):
        given["prefix"] = tuple(normal(1, shared, kv_heads, n) for n in (dim, value_dim))
    return q, k, v, given


def _expected(
    q: Tensor, k: Tensor, v: Tensor, case: dict[str, Any], sinks: Tensor | None, prefix: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one element after another, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    outs, lses = [], []
    for b, n in enumerate(case.get("lengths") or [case["keys"]] * case["batch"]):
        keys, values = k[b : b + 1, :n], v[b : b + 1, :n]
        band = Band.of(case.get("causal", False), case.get("window", (-1, -1)))
        keep = kept(band, case["queries"], n, q.device)
        if prefix is not None:
            keys, values = (torch.cat([x.double(), y], 1) for x, y in zip(prefix, (keys, values), strict=True))
            keep = torch.cat([keep.new_ones(len(keep), prefix[0].shape[1]), keep], 1)
        out, lse = plain(q[b : b + 1], keys, values, q.shape[-1] ** -0.5, keep, case.get("softcap"))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.double()[:, None])
            out, lse = out * (lse - total).exp().transpose(1, 2).unsqueeze(-1), total
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
