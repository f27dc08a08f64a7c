"""How much of the gate's tolerances the right results of each kernel use: `python -m tests.gate.margins [cuda] [kernel ...]`.

One line a kernel and dtype: over all cases the worst row in units of its scale, the worst gain and the worst LSE, each over
the tolerance of that dtype. The tolerances are made so that they stay below a half.

On a CPU, head dims 8 to 256, GQA, windows, packed batches and large scores: of the row tolerance math uses 0.33 in fp32 and 0.25 in
bf16 up to 4,096 tokens, sdpa_flash 0.33 in fp32 up to there, and in bf16 and fp16 below a half up to 512 tokens, 0.32 for its
bf16 dk at 4,096; of the gain at most 0.05, of the LSE 0.06. On one H200 of the row tolerance flash4 uses 0.22 in
bf16, sdpa_cudnn and sdpa_flash 0.31, triton 0.22 (0.07 in fp32), all of them at most 0.19 in fp16; of gain and LSE at most 0.01."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import yaml

from attention.kernels import KERNELS, Call, Shape, UnsupportedCall, refusal
from attention.masks.band import Band
from runner.check.comparison import cap_error
from runner.check.errors import Error
from runner.check.pieces import without_keys
from runner.check.reference import Seen, attend
from runner.measure.workload import DTYPES
from tests.conftest import ROOT

TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    large: float = 1.0  # times the usual scale of the scores
    softcap: float | None = None


CASES = [
    *(Case((n,), causal=causal) for n in (64, 512, 2048) for causal in (True, False)),
    Case((4096,)),
    *(Case((512,), head_dim=n) for n in (8, 32, 64, 128, 256)),
    Case((512,), heads=4, kv_heads=4, head_dim=64),
    Case((512,), heads=8, kv_heads=1, head_dim=64),
    *(Case((512,), large=x) for x in (0.1, 4.0, 16.0)),
    *(Case((512,), head_dim=64, large=x, softcap=cap) for x, cap in ((1.0, 1.0), (8.0, 15.0), (32.0, 50.0))),
    Case((1024,), window=(100, 0)),
    Case((1024,), window=(70, 30), causal=False),
    Case((100, 1, 300, 29, 594)),
]
SMALL = [
    Case((64,)),
    Case((64,), large=32.0, softcap=50.0),
    Case((96,), causal=False, head_dim=32),
    Case((33, 1, 60)),
    Case((64,), window=(20, 0)),
]


@dataclass
class Margin:
    """The largest part of each tolerance that was used, and where."""

    row: float = 0.0
    gain: float = 0.0
    lse: float = 0.0
    at: str = ""

    def used(self, of: str, part: float, at: str) -> None:
        if part > getattr(self, of):
            setattr(self, of, part)
            if of == "row":
                self.at = at


def margin(name: str, dtype: str, cases: list[Case], device: str = "cpu") -> Margin | None:
    """Of a kernel over those of the cases that it does; None where it does none."""
    limits = yaml.safe_load((ROOT / f"conf/dtype/{dtype}.yaml").read_text())
    found, done = Margin(), False
    for number, case in enumerate(cases):
        errors = errors_of(name, dtype, case, device, number)
        for tensor, error in (errors or {}).items():
            done = True
            if tensor == "lse":
                found.used("lse", error.row / float(limits["lse"]), "")
                continue
            limit = float(limits["row" if tensor == "out" else "grad_row"]) + cap_error(case.softcap, dtype)
            found.used("row", error.row / limit, f"{tensor} {case}")
            found.used("gain", error.sure_gain / float(limits["gain"]), "")
    return found if done else None


def errors_of(name: str, dtype: str, case: Case, device: str, seed: int = 0) -> dict[str, Error] | None:
    """Of out, dq, dk, dv and the LSE of one call; None where the kernel refuses it."""
    total, packed = sum(case.lengths), len(case.lengths) > 1
    draw = torch.Generator().manual_seed(seed)
    sizes = [(total, h, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    given = [torch.randn(n, generator=draw).clamp_(-1, 1).to(device, DTYPES[dtype]) for n in sizes]
    q, k, v, dout = given if packed else [x.unsqueeze(0) for x in given]
    mask, scale = Band.of(case.causal, case.window), case.large * case.head_dim**-0.5
    kernel = KERNELS[name]
    if refusal(kernel, Shape.of(q, k, k, backward=True, softcap=case.softcap is not None), mask):
        return None
    call = Call(scale, mask, softcap=case.softcap)
    if packed:
        call = call.of_packed(mask, case.lengths, case.lengths, q.device)
    try:
        out, lse = kernel.forward(q, k, v, call)
        gradients = kernel.backward(dout, q, k, v, out, lse, call)
    except UnsupportedCall:
        return None
    q, k, v, dout = given
    seen = Seen.band(case.lengths, case.lengths, case.causal, case.window)
    expected = attend(q, k, v, dout, seen, scale, softcap=case.softcap)
    errors = {}
    for tensor, x in zip(TENSORS, (out, *gradients), strict=True):
        errors[tensor] = Error()
        x = x if packed else x[0]
        errors[tensor].add(x, expected.values[tensor], expected.scales(tensor), 0.0)
    rows = (lse if packed else lse[0]).T.unsqueeze(-1)
    both = without_keys(rows, expected.values["lse"])
    errors["lse"] = Error()
    errors["lse"].add(*both, expected.scales("lse"), 0.0)
    return errors


def main(device: str, names: list[str]) -> None:
    for name in names:
        interpreted = device == "cpu" and "triton" in name
        for dtype in ("fp32", "bf16", "fp16"):
            try:
                found = margin(name, dtype, SMALL if interpreted else CASES, device)
            except Exception as error:  # of one kernel; the others' margins are wanted all the same
                print(f"{name:14} {dtype}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
                continue
            if found is not None:
                parts = f"row {found.row:5.2f}, gain {found.gain:5.2f}, LSE {found.lse:5.2f}"
                print(f"{name:14} {dtype}: of the tolerances {parts}; worst row: {found.at}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    on = "cuda" if "cuda" in given else "cpu"
    main(on, [x for x in given if x != "cuda"] or [x for x in KERNELS if x != "flex"])
