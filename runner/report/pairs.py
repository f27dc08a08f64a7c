"""The runs of two result sets in pairs, each with its verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.runs import Run
from runner.report.verdicts import Interval, Verdict, speed

# settings by which runs are not told apart, and which may change their times
BESIDE = ("timing.", "launch.env", "launch.share_gpu", "hardware.", "seed")


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
    with_replay = all("replay" in run.result.config for run in (*a, *b))  # older results lack it

    def key(run: Run) -> tuple[object, ...]:
        return (*asked(run), run.replay if with_replay else None)

    before, after = (
        {key(run): run for run in sorted(runs, key=lambda run: run.environment.started_at)} for runs in (a, b)
    )
    keys = dict.fromkeys(key(run) for run in (*b, *a))
    return [_pair(before.get(key), after.get(key), which, tolerance, memory_tolerance) for key in keys]


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


def _pair(a: Run | None, b: Run | None, which: str, tolerance: float, memory_tolerance: float) -> Pair:
    if b is None:
        return Pair(a, b, (Verdict.MISSING if a is None or a.ok else Verdict.GONE,))
    if a is None:
        return Pair(a, b, (Verdict.NEW,))
    if not a.ok or not b.ok:
        return Pair(a, b, (Verdict.MENDED if b.ok else Verdict.BROKEN if a.ok else Verdict.FAILED,))
    verdict, ratio = speed(a, b, which, tolerance)
    before, after = a.result.peak_bytes, b.result.peak_bytes
    if before and after and after > (1 + memory_tolerance) * before:
        return Pair(a, b, (Verdict.LARGER,) if verdict == Verdict.EVEN else (verdict, Verdict.LARGER), ratio)
    return Pair(a, b, (verdict,), ratio)


def settings_apart(pairs: Sequence[Pair]) -> list[str]:
    """The settings beside those of `asked` in which the runs of a pair differ, a text each: `seed 1 → 2 in 3 pairs`. A
    setting that only one of both has, as of another version, is left out."""
    found: dict[str, int] = {}
    for pair in pairs:
        if pair.a is None or pair.b is None:
            continue
        before, after = (dict(_leaves(run.result.config)) for run in (pair.a, pair.b))
        for key in before.keys() & after.keys():
            if before[key] != after[key] and key.startswith(BESIDE) and key != "timing.timing_runs":
                text = f"{key} {json.dumps(before[key])} → {json.dumps(after[key])}"
                found[text] = found.get(text, 0) + 1
    return [f"{text} in {n} pair{'s' if n > 1 else ''}" for text, n in sorted(found.items())]


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        found += _leaves(value, f"{prefix}{key}.") if below else [(f"{prefix}{key}", value)]
    return found
