"""The runs of two result sets in pairs, each with its verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from runner.report.entries import flat
from runner.report.runs import Run, latest
from runner.report.verdicts import Interval, Verdict, speed

# settings and groups of settings by which runs are paired, beside their ranks, replay and timing
WORK = (
    "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "seq_len", "q_len", "kv_lengths", "prefix", "causal", "window",
    "seqlens", "scale", "softcap", "sinks", "mode", "deterministic", "attention", "mask", "model", "kernel.name",
    "transport.name", "dtype.name",
)  # fmt: skip
# settings by which runs are not told apart, and which may change their times
BESIDE = ("timing.", "launch.env", "launch.share_gpu", "hardware.", "seed")
RESIDENT_NOISE = 16 << 20  # bytes by which the memory of a CPU process differs from one run to the next


@dataclass(frozen=True)
class Pair:
    """The runs of both sets of which the same was asked; None where a set has none. `ratio` is that of the medians, B
    over A."""

    a: Run | None
    b: Run | None
    verdicts: tuple[Verdict, ...]
    ratio: Interval | None = None

    @property
    def runs(self) -> list[Run]:
        """B's first."""
        return [run for run in (self.b, self.a) if run is not None]

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
    before, after = (latest(runs, key.__getitem__) for runs in (a, b))
    limits = which, tolerance, memory_tolerance
    return [pair_of(before.get(work), after.get(work), *limits) for work in dict.fromkeys(key.values())]


def keys(runs: Sequence[Run]) -> dict[Run, Hashable]:
    """What was asked of each run: `asked`, and the replay where all runs of which the same was asked have one."""
    works = {run: asked(run) for run in runs}
    older = {work for run, work in works.items() if "replay" not in run.result.config}
    return {run: (work, None if work in older else run.replay) for run, work in works.items()}


def asked(run: Run) -> Hashable:
    """The settings by which runs are compared, from the configuration: a refused run has no experiment. What older results
    lack is as if it were off."""
    config = run.result.config
    if not run.attention:
        return run.result.key, str(config)
    random = config.get("seqlens") in ("random", "real")
    drawn = ("seed", "seqlens_mean", "seqlens_std", "seqlens_multiple") if random else ()
    names = {*WORK, *drawn, *(["seed"] if config.get("kv_lengths") == "random" else [])}
    settings = {
        (key, text)
        for key, text in flat(config).items()
        if names & {key, key.partition(".")[0]} and text not in ("none", "false")
    }
    return run.world_size, run.graphs, run.timing, frozenset(settings)


def pair_of(a: Run | None, b: Run | None, which: str, tolerance: float, memory_tolerance: float) -> Pair:
    """The verdicts on run B after run A."""
    if b is None:
        return Pair(a, b, (Verdict.MISSING if a is None or a.ok else Verdict.GONE,))
    if a is None:
        return Pair(a, b, (Verdict.NEW,))
    if not a.ok or not b.ok:
        return Pair(a, b, (Verdict.MENDED if b.ok else Verdict.BROKEN if a.ok else Verdict.FAILED,))
    verdict, ratio = speed(a, b, which, tolerance)
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
