"""Labels: the fewest words that tell how a run was made apart from the other runs of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from runner.report.runs import WAYS, Run

Varying = set[tuple[str | None, str]]  # (variant, option)


def varying_options(runs: Sequence[Run]) -> Varying:
    """The options in which runs of the same variant differ."""
    named = {(run.attention, option) for run in runs for option in run.options}
    return {
        (variant, option)
        for variant, option in named
        if len({str(run.options.get(option)) for run in runs if run.attention == variant}) > 1
    }


def options_text(run: Run, varying: Varying) -> str:
    return " ".join(f"{key}={value}" for key, value in run.options.items() if (run.attention, key) in varying)


def each_over_several_kernels(runs: Sequence[Run]) -> bool:
    """Whether several variants ran over several local kernels each."""
    pairs = {(run.attention, run.asked_kernel) for run in runs if run.status != "invalid"}
    return sum(n > 1 for n in Counter(variant for variant, _ in pairs).values()) > 1


def labels(runs: Sequence[Run], without: Collection[str] = ()) -> dict[Run, str]:
    """A label for each run: its variant, and those of its options, kernel, transport, replay and timing in which the
    runs differ. Runs of one label differ in their workload only. The variant dense under one sparse mask is named by the
    mask. `without`: members of WAYS that the table shows elsewhere."""
    varying = varying_options(runs)
    valid = [run for run in runs if run.status != "invalid"]
    ways = [key for key in WAYS if key not in without and len({getattr(run, key) for run in valid}) > 1]
    one_variant = len({run.attention for run in runs}) == 1
    one_mask = {run.mask for run in runs} if any(run.sparsity for run in runs) else set()
    found: dict[Run, str] = {}
    for run in runs:
        parts = [options_text(run, varying), *(_way(run, key) for key in ways)]
        if not one_variant or not any(parts):
            by_mask = one_variant and run.attention == "dense" and len(one_mask) == 1
            parts.insert(0, str(run.mask if by_mask else run.attention))
        found[run] = " ".join(filter(None, parts))
    asked_one = "asked_kernel" not in without and len({run.asked_kernel for run in valid}) == 1
    return _with_kernels(found) if asked_one and len({run.kernel for run in runs if run.ok}) > 1 else found


def _with_kernels(found: dict[Run, str]) -> dict[Run, str]:
    """The labels with the kernels that kernel=auto took, over all runs of a label."""
    kernels: dict[str, dict[str, None]] = {}
    for run, label in found.items():
        if run.ok:
            kernels.setdefault(label, {})[str(run.kernel)] = None
    return {run: " ".join(filter(None, [label, "/".join(kernels.get(label, {}))])) for run, label in found.items()}


def _way(run: Run, key: str) -> str:
    if key == "replay":
        return f"replay={run.replay}" if run.replay not in (None, "none") else ""
    return str(getattr(run, key))
