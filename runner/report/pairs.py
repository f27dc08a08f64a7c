"""The runs of two result sets in pairs, each with its verdicts."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.entries import flat
from runner.report.runs import PASSES, Run
from runner.report.verdicts import TOLERANCE, Interval, MeasuredPass, Verdict, speed

# settings by which runs are not told apart, and which may change their times
BESIDE = ("timing.", "launch.env", "launch.share_gpu", "hardware.", "seed")
RESIDENT_NOISE = 16 << 20  # bytes by which the memory of a CPU process differs from one run to the next


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which runs are compared, and how."""
    add = parser.add_argument
    add("--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs of these values (a,b: a or b)")
    add("--pass", dest="which", choices=PASSES, default="total", help="the times that decide (default: total)")
    add("--tolerance", type=float, default=TOLERANCE, help="of times (default 0.02: 2%%)")
    add("--memory-tolerance", type=float, default=0.05, help="of peak memory (default 0.05)")


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError."""
    for name in ("tolerance", "memory_tolerance"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 0; 0.02 is 2%")


@dataclass(frozen=True)
class Pair:
    """The runs of both sets of which the same was asked; None where a set has none. `ratio` is that of the medians, B
    over A."""

    a: Run | None
    b: Run | None
    verdicts: tuple[Verdict, ...]
    ratio: Interval | None = None

    @property
    def either(self) -> Run:
        found = self.b or self.a
        assert found is not None
        return found

    @property
    def worse(self) -> bool:
        return any(verdict.worse for verdict in self.verdicts)

    @property
    def missing(self) -> bool:
        return Verdict.MISSING in self.verdicts


def compare(a: Sequence[Run], b: Sequence[Run], which: str, tolerance: float, memory_tolerance: float) -> list[Pair]:
    """All runs of both sets in pairs, in the order of B's tables, then the runs that B lacks. Of a repeated run the
    latest counts."""
    key = keys((*b, *a))
    before, after = (
        {key[run]: run for run in sorted(runs, key=lambda run: run.environment.started_at)} for runs in (a, b)
    )
    found = dict.fromkeys(key.values())
    return [pair_of(before.get(key), after.get(key), which, tolerance, memory_tolerance) for key in found]


def keys(runs: Sequence[Run]) -> dict[Run, tuple[object, ...]]:
    """What was asked of each run: `asked`, and the replay where all runs of which the same was asked have one."""
    found = {run: asked(run) for run in runs}
    older = {key for run, key in found.items() if "replay" not in run.result.config}
    return {run: (*key, None if key in older else run.replay) for run, key in found.items()}


def asked(run: Run) -> tuple[object, ...]:
    """The settings by which runs are compared, from the configuration: a refused run has no experiment."""
    config, group = run.result.config, run.result.group
    if not run.attention:
        return ("not understood", run.result.key, str(config))
    keys = [
        "batch", "heads", "kv_heads", "head_dim", "seq_len", "q_len", "causal", "window", "seqlens", "mode", "deterministic",
        "kv_lengths", "prefix",
    ]  # fmt: skip
    if config.get("seqlens") in ("random", "real"):
        keys += ["seqlens_mean", "seqlens_std", "seqlens_multiple", "seed"]
    keys += ["seed"] if config.get("kv_lengths") == "random" else []
    # what older results lack is as if it were off
    later = [config.get(key) or None for key in ("v_head_dim", "scale", "softcap", "sinks")]
    named = [_settings(group(key)) for key in ("mask", "model") if group(key).get("name") not in (None, "none")]
    names = [group(key).get("name") for key in ("kernel", "transport", "dtype")]
    options = _settings(group("attention"))
    return (
        run.world_size,
        run.graphs,
        run.timing,
        *(str(x) for x in (*map(config.get, keys), *later, *names, options, named)),
    )


def _settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in group.items() if value is not None)


def pair_of(a: Run | None, b: Run | None, which: str, tolerance: float, memory_tolerance: float) -> Pair:
    """The verdicts on run B after run A."""
    if b is None:
        return Pair(a, b, (Verdict.MISSING if a is None or a.ok else Verdict.GONE,))
    if a is None:
        return Pair(a, b, (Verdict.NEW,))
    if not a.ok or not b.ok:
        return Pair(a, b, (Verdict.MENDED if b.ok else Verdict.BROKEN if a.ok else Verdict.FAILED,))
    verdict, ratio = speed(MeasuredPass.of(a, which), MeasuredPass.of(b, which), tolerance)
    if _larger(a, b, memory_tolerance):
        return Pair(a, b, (Verdict.LARGER,) if verdict == Verdict.EVEN else (verdict, Verdict.LARGER), ratio)
    return Pair(a, b, (verdict,), ratio)


def _larger(a: Run, b: Run, tolerance: float) -> bool:
    """Whether the peak memory grew beyond the tolerance and, where it is that of a process, beyond its noise. A GPU's
    allocator counts exactly."""
    before, after = a.result.peak_bytes, b.result.peak_bytes
    if not before or not after:
        return False
    ranks = [rank for run in (a, b) if run.result.memory for rank in run.result.memory.by_rank]
    noise = RESIDENT_NOISE if any(rank.peak_allocated is None for rank in ranks) else 0
    return after - before > max(tolerance * before, noise)


def settings_apart(pairs: Sequence[Pair]) -> list[str]:
    """The settings beside those of `asked` in which the runs of a pair differ, a text each: `seed 1 → 2 in 3 pairs`. A
    setting that only one of both has, as of another version, is left out."""
    counts: Counter[str] = Counter()
    for pair in pairs:
        before, after = (flat(run.result.config) if run else {} for run in (pair.a, pair.b))
        counts.update(
            f"{key} {before[key]} → {after[key]}"
            for key in before.keys() & after.keys()
            if before[key] != after[key] and key.startswith(BESIDE) and key != "timing.timing_runs"
        )
    return [f"{text} in {n} pair{'s' if n > 1 else ''}" for text, n in sorted(counts.items())]
