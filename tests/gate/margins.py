"""How much of the gate's tolerances the right results of each kernel use, which are made so that it stays below a half.

On a CPU, head dims 8 to 256, GQA, windows, packed batches and large scores: of the row tolerance math uses 0.33 in fp32 and 0.25 in
bf16 up to 4,096 tokens, sdpa_flash 0.33 in fp32 up to there, and in bf16 and fp16 below a half up to 512 tokens, 0.32 for its
bf16 dk at 4,096; of the gain at most 0.05, of the LSE 0.06. On one H200 of the row tolerance flash4 uses 0.22 in
bf16, sdpa_cudnn and sdpa_flash 0.31, triton 0.22 (0.07 in fp32), all of them at most 0.19 in fp16; of gain and LSE at most 0.01."""

from __future__ import annotations

from typing import NamedTuple

import torch
import yaml

from attention.kernels import KERNELS, Call, Shape, UnsupportedCall, refusal
from attention.masks.band import Band
from runner.check.comparison import cap_error
from runner.check.errors import Error
from runner.check.pieces import without_keys
from runner.check.reference import Seen, attend
from runner.measure.workload import DTYPES
from tests.conftest import ROOT


class Case(NamedTuple):
    lengths: tuple[int, ...]
    causal: bool = True
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    window: tuple[int, int] = (-1, -1)
    large: float = 1.0  # times the usual scale of the scores
    softcap: float | None = None


SMALL = [
    Case((64,)),
    Case((64,), large=32.0, softcap=50.0),
    Case((96,), False, head_dim=32),
    Case((33, 1, 60)),
    Case((64,), window=(20, 0)),
]
CASES = [
    *SMALL,
    *(Case((n,), causal) for n in (512, 2048) for causal in (True, False)),
    Case((4096,)),
    *(Case((512,), head_dim=n, heads=8) for n in (8, 64, 128, 256)),
    *(Case((512,), large=x) for x in (0.1, 16.0)),
    *(Case((512,), head_dim=64, large=x, softcap=x) for x in (1.0, 15.0)),
    Case((1024,), False, window=(70, 30)),
    Case((100, 1, 300, 29, 594)),
]


def margin(name: str, dtype: str, cases: list[Case], device: str = "cpu") -> dict[str, float]:
    """The largest part of the tolerances of a row, the gain and the LSE that a kernel uses in those of the cases that it does; empty
    where it does none."""
    limits = yaml.safe_load((ROOT / f"conf/dtype/{dtype}.yaml").read_text())
    used: dict[str, float] = {}
    for number, case in enumerate(cases):
        for tensor, error in errors_of(name, dtype, case, device, number).items():
            row = {"out": "row", "lse": "lse"}.get(tensor, "grad_row")
            limit = float(limits[row]) + (cap_error(case.softcap, dtype) if tensor != "lse" else 0)
            parts = {f"{tensor} of {case}": error.row / limit}
            if tensor != "lse":
                parts[f"gain of {tensor}"] = error.sure_gain / float(limits["gain"])
            used |= {place: max(part, used.get(place, 0.0)) for place, part in parts.items()}
    return used


def errors_of(name: str, dtype: str, case: Case, device: str, seed: int) -> dict[str, Error]:
    """Of out, dq, dk, dv and the LSE of one call; empty where the kernel refuses it."""
    total, packed = sum(case.lengths), len(case.lengths) > 1
    draw = torch.Generator().manual_seed(seed)
    sizes = [(total, h, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    given = [torch.randn(n, generator=draw).clamp_(-1, 1).to(device, DTYPES[dtype]) for n in sizes]
    q, k, v, dout = given if packed else [x.unsqueeze(0) for x in given]
    mask, scale = Band.of(case.causal, case.window), case.large * case.head_dim**-0.5
    kernel, call = KERNELS[name], Call(scale, mask, softcap=case.softcap)
    if refusal(kernel, Shape.of(q, k, k, backward=True, softcap=case.softcap is not None), mask):
        return {}
    if packed:
        call = call.of_packed(mask, case.lengths, case.lengths, q.device)
    try:
        out, lse = kernel.forward(q, k, v, call)
        gradients = kernel.backward(dout, q, k, v, out, lse, call)
    except UnsupportedCall:
        return {}
    seen = Seen.band(case.lengths, case.lengths, case.causal, case.window)
    expected = attend(*given, seen, scale, softcap=case.softcap)
    results = dict(zip(("out", "dq", "dk", "dv", "lse"), (out, *gradients, lse.mT.unsqueeze(-1)), strict=True))
    errors = {tensor: Error() for tensor in results}
    for tensor, x in results.items():
        both = without_keys(x if packed else x[0], expected.values[tensor])
        errors[tensor].add(*both, expected.scales(tensor), 0.0)
    return errors
