"""`python -m runner.calibrate`: measures the kernels that kernel=auto chooses among, for each class of call, on this GPU, and
prints the table; `--write` renews the package's own, `--output FILE` another. Each kernel is first compared with a reference,
and one that fails, runs out of memory or refuses is not ranked. Classes not reached within `--limit-s` keep their rates."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from attention.geometry import counts
from attention.masks.band import Band
from runner import environment
from runner.costs import rates
from runner.costs.rates import CallClass, Rate
from runner.reading import read_text

if TYPE_CHECKING:  # --help needs no torch
    from torch import Tensor

    from attention.kernels import Call, Kernel

CHOICES = {
    "length": ("long", "short"),
    "layout": ("dense", "packed"),
    "mask": ("causal", "full", "window"),
    "heads": ("gqa", "mha"),
    "head_dim": (128, 64, 256),
}
TOLERANCES = (5e-3, 1e-2)  # relative L2 of out and lse, and of gradients, for bf16
SAMPLES = 15
SETTLE_MS = 500.0  # the longest additional warm-up, until times show no trend
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "flash-attn-3")


@dataclass(frozen=True)
class Sizes:
    batch: int
    lengths: tuple[int, ...]  # of the sequences of a packed batch; one for a dense call
    heads: int
    kv_heads: int
    mask: Band

    @property
    def pairs(self) -> int:
        return sum(self.mask.pairs(n, n) for n in self.lengths)


def classes(**chosen: Sequence[Any]) -> list[CallClass]:
    """All classes of the chosen values, the most important first."""
    values = {name: chosen.get(name) or every for name, every in CHOICES.items()}
    return [
        CallClass(**dict(zip(values, found, strict=True)))  # type: ignore[arg-type]
        for found in itertools.product(*values.values())
    ]


def sizes(call: CallClass, tiny: bool = False) -> Sizes:
    """The sizes that represent a class: 16K tokens in all, with 32 heads (16 for head dim 256), in sequences of 2K for
    a short class. A packed batch has sequences of different lengths. tiny: for a CPU."""
    heads = 4 if tiny else 16 if call.head_dim > 128 else 32
    kv_heads = heads if call.heads == "mha" else heads // 4
    tokens = {"long": 64, "short": 32}[call.length] if tiny else rates.TOKENS[call.length]
    batch = 1 if call.length == "long" or call.layout == "packed" else 2 if tiny else 8
    return Sizes(batch, rates.sequences(call, tokens), heads, kv_heads, rates.mask_of(call, tokens))


def checked(call: CallClass, tiny: bool = False) -> Sizes:
    """Small and odd sizes of the same class, for the check against the reference."""
    full = sizes(call, tiny)
    lengths = (33, 1, 50) if tiny else (1000,) if call.layout == "dense" else (301, 1, 650)
    if call.layout == "dense":
        lengths = lengths[:1]
    mask = Band(lengths[0] // 3, 0) if call.mask == "window" else full.mask
    return Sizes(1, lengths, full.heads, full.kv_heads, mask)


class KernelWork:
    """Forward and backward of one kernel on seeded inputs, for the timing methods."""

    passes: tuple[str, ...] = ("forward", "backward")

    def __init__(self, kernel: Kernel, call: CallClass, given: Sizes, device: str):
        self.kernel = kernel
        self.q, self.k, self.v, self.dout, self.call = inputs(call, given, device)
        self.result = kernel.forward(self.q, self.k, self.v, self.call)

    def run(self, which: str) -> None:
        if which == "forward":
            self.result = self.kernel.forward(self.q, self.k, self.v, self.call)
        else:
            self.kernel.backward(self.dout, self.q, self.k, self.v, *self.result, self.call)


def inputs(call: CallClass, given: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Call]:
    """(q, k, v, dout, the kernel call), bf16."""
    import torch

    from attention.kernels import Call

    scale, mask, tokens = call.head_dim**-0.5, given.mask, sum(given.lengths)
    generator = torch.Generator(device).manual_seed(tokens)
    leading = (tokens,) if call.layout == "packed" else (given.batch, tokens)
    q, k, v, dout = (
        torch.randn((*leading, h, call.head_dim), device=device, generator=generator).to(torch.bfloat16)
        for h in (given.heads, given.kv_heads, given.kv_heads, given.heads)
    )
    if call.layout == "packed":
        made = Call(scale).of_packed(mask, given.lengths, given.lengths, q.device)
    else:
        made = Call(scale, mask)
    return q, k, v, dout, made


def worst_error(kernel: Kernel, call: CallClass, given: Sizes, device: str) -> str | None:
    """The result that exceeds its tolerance against plain attention in fp32, with its error; None if all pass."""
    from attention.kernels import KERNELS
    from runner.check.reference import exact_matmul

    q, k, v, dout, made = inputs(call, given, device)
    out, lse = kernel.forward(q, k, v, made)
    found = (out, lse, *kernel.backward(dout, q, k, v, out, lse, made))
    q_, k_, v_, dout_ = (x.float() for x in (q, k, v, dout))
    with exact_matmul():
        of_forward = KERNELS["math"].forward(q_, k_, v_, made)
        reference = (*of_forward, *KERNELS["math"].backward(dout_, q_, k_, v_, *of_forward, made))
    for name, x, expected in zip(("out", "lse", "dq", "dk", "dv"), found, reference, strict=True):
        error = ((x.float() - expected).norm() / expected.norm()).item()
        if not error < TOLERANCES[name.startswith("d")]:  # NaN too
            return f"incorrect: {name} is off by {error:.2g}"
    return None


def measure(
    kernel: Kernel, call: CallClass, device: str, tiny: bool, samples: int = SAMPLES
) -> tuple[float, float] | str:
    """(forward, backward) TFLOP/s from the medians of `samples` calls with a flushed L2, or why there are none."""
    import torch

    from attention.kernels import Shape, refusal
    from runner.measure import stopwatch, timing

    given = sizes(call, tiny)
    shape = Shape(device, torch.bfloat16, given.heads, given.kv_heads, call.head_dim, call.layout == "packed")
    if reason := refusal(kernel, shape, given.mask):
        return reason
    try:
        if reason := worst_error(kernel, call, checked(call, tiny), device):
            return reason
        work = KernelWork(kernel, call, given, device)
        if device == "cuda":
            watch: stopwatch.Stopwatch = stopwatch.CudaStopwatch(torch.device("cuda"), together=False)
            words = torch.cuda.get_device_properties(0).L2_cache_size // 2  # twice the cache
            flush = torch.empty(words, dtype=torch.int32, device="cuda")
        else:
            watch, flush = stopwatch.CpuStopwatch(None), None
        with timing.undisturbed():
            each_ms = timing.warm(work, watch, 3, 0 if tiny else 50).back_to_back_ms
            timing.settle(work, watch, 0 if tiny else SETTLE_MS, each_ms or 1.0, flush=flush)
            taken = timing.sample(work, watch, samples, flush)
    except Exception as error:  # one kernel that fails must not end the rest
        if device == "cuda":
            torch.cuda.empty_cache()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    shapes = counts.Shapes(given.batch, given.heads, given.kv_heads, call.head_dim, 2)
    forward, backward = (median(taken[which]) for which in work.passes)
    return (
        counts.forward_flops(shapes, given.pairs) / forward / 1e9,
        counts.backward_flops(shapes, given.pairs) / backward / 1e9,
    )


def calibrate(
    wanted: Sequence[CallClass],
    kernels: Sequence[str],
    one: Callable[[str, CallClass], tuple[float, float] | str],
    gpu: str,
    versions: str,
    seconds_left: Callable[[], float],
) -> Iterator[tuple[CallClass, list[Rate], dict[str, str]]]:
    """Yields (class, rates, why other kernels have none) for each class, until the time is up. An incomplete class is
    left out, since it gives no order. one: measures a kernel."""
    for call in wanted:
        found, reasons = [], {}
        for name in kernels:
            if seconds_left() <= 0:
                return
            result = one(name, call)
            if isinstance(result, str):
                reasons[name] = result
            else:
                found.append(Rate(gpu, call, name, *result, versions))
        yield call, found, reasons


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m runner.calibrate", description=__doc__)
    made.add_argument("--write", action="store_true", help="renew the package's table, which predictions read")
    made.add_argument("--output", type=Path, help="renew the table in this file")
    made.add_argument("--hardware", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the program")
    made.add_argument("--limit-s", type=float, default=480, help="stop after so many seconds (default 480)")
    made.add_argument("--samples", type=int, default=SAMPLES)
    made.add_argument("--kernels", nargs="+", metavar="NAME", help="default: what auto chooses among")
    for name, every in CHOICES.items():
        kind = int if name == "head_dim" else str
        made.add_argument(f"--{name.replace('_', '-')}", nargs="+", type=kind, choices=every, help="default: all")
    return made


def main(arguments: list[str]) -> int:
    asked = parser().parse_args(arguments)
    if asked.write and asked.hardware == "cpu":
        print("--write: the package's table is of GPUs; with --hardware cpu give --output FILE", file=sys.stderr)
        return 2
    import torch

    from attention.kernels import FASTEST, KERNELS

    if asked.hardware == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here: --hardware cpu tries the program with tiny sizes", file=sys.stderr)
        return 2
    names = asked.kernels or [name for name in FASTEST[asked.hardware] if name != "math"]
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        print(f"--kernels {' '.join(unknown)}: no such kernel; there are {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    wanted = classes(**{name: getattr(asked, name) for name in CHOICES})
    stop = time.monotonic() + asked.limit_s
    made: list[Rate] = []
    done = 0

    def one(name: str, call: CallClass) -> tuple[float, float] | str:
        return measure(KERNELS[name], call, asked.hardware, asked.hardware == "cpu", asked.samples)

    about = torch.cuda.get_device_name() if asked.hardware == "cuda" else "cpu", versions()
    for call, found, reasons in calibrate(wanted, names, one, *about, lambda: stop - time.monotonic()):
        made += found
        done += 1
        ranked = sorted(found, key=lambda r: r.seconds_per_tflop(True))
        print(f"{call}: " + ", ".join(f"{r.kernel} {r.forward:.0f}/{r.backward:.0f}" for r in ranked), flush=True)
        for name, reason in reasons.items():
            print(f"    {name}: {reason}", flush=True)
    if done < len(wanted):
        print(f"{done} of {len(wanted)} classes within {asked.limit_s:g} s; --limit-s gives more", file=sys.stderr)
    for path in (rates.path() if asked.write else None, asked.output):
        if path is not None:
            old = rates.parse(read_text(path)) if path.exists() else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rates.render(rates.renewed(old, made)))
            print(f"written: {path}")
    if not asked.write and asked.output is None:
        print(rates.render(made), end="")
    return 0 if made else 1


def versions() -> str:
    """The versions that a rate depends on, in a line."""
    import torch

    found = {name: environment.host()["packages"].get(name) for name in PACKAGES}
    found |= {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    return " ".join(f"{name}={version}" for name, version in found.items() if version)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
