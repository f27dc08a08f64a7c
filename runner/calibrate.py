"""`python -m runner.calibrate DIR ...`: the rates of kernels that predictions read, from results of `+experiment=kernels`, which checks
and times every kernel on one GPU. Prints their rows; `--write` renews those of the package's table. docs/predict.md has the commands that
measure all classes of calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from runner.config.values import Refusal
from runner.costs import rates
from runner.costs.model import Task
from runner.costs.rates import CallClass, Rate
from runner.output import commands, terminal
from runner.report import modelled, runs
from runner.report.runs import Run

PACKAGES = ("triton", "flash-attn", "flash-attn-4", "flash-attn-3")


def call_class(call: Task) -> CallClass | None:
    """The class that a call represents; None for one of other lengths than those that represent a class."""
    lengths = tuple(b - a for a, b in pairwise(call.cu_seqlens))
    for length, tokens in rates.TOKENS.items():
        represented = CallClass(
            call.shapes.head_dim,
            "mha" if call.shapes.heads == call.shapes.kv_heads else "gqa",
            "window" if call.mask.windowed else "causal" if call.mask.causal else "full",
            "packed" if call.packed else "dense",
            length,
        )
        if (lengths, call.mask) == (rates.sequences(represented, tokens), rates.mask_of(represented, tokens)):
            return represented
    return None


def measured(results: Iterable[Run]) -> list[Rate]:
    """The rates of dense attention on one GPU; of a repeated run the latest."""
    by_kernel = {}
    for run in results:
        asked, metrics = run.result.asked, run.result.metrics
        plain = not (asked.model or asked.named_mask or run.features) and run.dtype in ("bf16", "fp16")
        if not (run.ok and metrics and run.attention == "dense" and run.gpu and plain and "backward" in metrics.passes):
            continue
        if call := call_class(modelled.task(run)):
            forward, backward = (metrics.passes[which].tflops_per_device for which in modelled.PASSES)
            rate = Rate(run.gpu, call, run.kernel or "", forward, backward, versions(run))
            by_kernel[rate.gpu, call, rate.kernel] = rate
    return list(by_kernel.values())


def versions(run: Run) -> str:
    """The versions that a rate depends on, in a line."""
    environment = run.environment
    known = {"torch": environment.torch, **environment.packages, "cudnn": environment.cudnn}
    return " ".join(f"{name}={known[name]}" for name in ("torch", *PACKAGES, "cudnn") if known.get(name))


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = commands.parser("runner.calibrate", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of results")
    parser.add_argument("--write", action="store_true", help="renew the package's table")
    options = parser.parse_args(arguments)
    rows = measured(runs.read(options.folders))
    if not rows:
        tokens = " or ".join(map(str, rates.TOKENS.values()))
        raise Refusal(f"no run of attention=dense with {tokens} tokens on a GPU; measure with +experiment=kernels")
    if options.write:
        rates.PATH.write_text(rates.render(rates.renewed(rates.table(), rows)))
        terminal.err.print(f"written: {rates.PATH}")
    print(rates.render(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
