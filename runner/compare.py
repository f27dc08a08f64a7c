"""`python -m runner.compare A B`: two result sets, run by run: what is slower, faster, larger or broken in B.

    python -m runner.compare outputs/multirun/2026-01-31_12-00-00 outputs/multirun/2026-01-31_13-00-00
    python -m runner.compare A B --where world_size=4 --pass forward --tolerance 0.01

Runs are compared whose configurations agree: variant, options (a changed default separates runs), workload, ranks,
kernel, transport, replay and timing. Of a repeated run the latest counts.

A pass is slower or faster when the whole 95% interval of the ratio of medians, B over A, lies beyond the tolerance,
even when the whole interval lies within it, and else inconclusive, as with fewer than 6 samples. The interval covers
the samples of these two runs, not the variation between starts of a program.

Exit status: 0 when nothing is worse; 1 when a run in B is slower, larger, not ok any more, not timed or missing; 2 for
sets that cannot be compared. Inconclusive runs, and runs only in B, are not worse."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.output import commands
from runner.output.terminal import gib
from runner.report.labels import varying_options
from runner.report.runs import FACTS, PASSES, WAYS, WORKLOAD, Run, read, where
from runner.report.table import Table, differing, digits, fact
from runner.report.tables import LEFT, environment_table
from runner.report.verdicts import Interval, Verdict, speed


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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options), os_error=2)


def _main(options: argparse.Namespace) -> int:
    for name in ("tolerance", "memory_tolerance"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 0; 0.02 is 2%")
    a, b = (where(read([folder]), options.where) for folder in (options.a, options.b))
    pairs = compare(a, b, options.which, options.tolerance, options.memory_tolerance)
    if not any(pair.a and pair.b for pair in pairs):
        raise ValueError(f"{options.a} and {options.b}: nothing was asked for in both{_apart(a, b)}")
    if any(run.ok for run in (*a, *b)) and all(run.ms(options.which) is None for run in (*a, *b)):
        raise ValueError(f"--pass {options.which}: no run has it; forward has every run")
    print("\n".join([table(pairs).markdown(), *environment(a, b), summary(pairs, options.which)]))
    return 1 if any(pair.worse for pair in pairs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.compare", __doc__)
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="folder of a run or of many: before")
    add("b", type=Path, metavar="B", help="folder of a run or of many: after")
    add("--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs of these values (a,b: a or b)")
    add("--pass", dest="which", choices=PASSES, default="total", help="the times that decide (default: total)")
    add("--tolerance", type=float, default=0.02, help="of times (default 0.02: 2%%)")
    add("--memory-tolerance", type=float, default=0.05, help="of peak memory (default 0.05)")
    return parser


def compare(a: Sequence[Run], b: Sequence[Run], which: str, tolerance: float, memory_tolerance: float) -> list[Pair]:
    """All runs of both sets in pairs, in the order of B's tables, then the runs that B lacks."""
    with_replay = all("replay" in run.result.config for run in (*a, *b))  # older results lack it

    def key(run: Run) -> tuple[object, ...]:
        return (*_asked(run), run.replay if with_replay else None)

    before, after = (
        {key(run): run for run in sorted(runs, key=lambda run: run.environment.started_at)} for runs in (a, b)
    )
    keys = dict.fromkeys(key(run) for run in (*b, *a))
    return [_pair(before.get(key), after.get(key), which, tolerance, memory_tolerance) for key in keys]


def _asked(run: Run) -> tuple[object, ...]:
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
    mask = sorted(group("mask").items()) if group("mask").get("name") != "none" else []  # older results lack it
    names = [*(group(key).get("name") for key in ("kernel", "transport", "dtype")), group("timing").get("method")]
    options = sorted((k, v) for k, v in group("attention").items() if v is not None)
    return (run.world_size, run.graphs, *(str(x) for x in (*map(config.get, keys), *names, options, mask)))


def _apart(a: Sequence[Run], b: Sequence[Run]) -> str:
    """The facts in which the sets have no value in common."""
    found = []
    for key in ("attention", *(key for key in WORKLOAD if key != "gpu"), *WAYS):
        one, other = ({str(getattr(run, key)) for run in runs} for runs in (a, b))
        if not one & other:
            found.append(f"{key} is {' '.join(sorted(one))} in the one and {' '.join(sorted(other))} in the other")
    return f": {'; '.join(found)}" if found else ""


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


def table(pairs: Sequence[Pair]) -> Table:
    """A row for each pair: what sets it apart, its passes and its peak memory from A to B, and the verdict."""
    runs = [run for pair in pairs for run in (pair.a, pair.b) if run is not None]
    shown = [key for key in differing([pair.either for pair in pairs]) if key not in ("gpu", "kernel", "transport")]
    shown += [key for key in ("kernel", "transport") if len({getattr(run, f"asked_{key}") for run in runs}) > 1]
    varying = varying_options(runs)
    passes = [which for which in PASSES if any(_time(run, which) is not None for run in runs)]
    rows = [
        [
            *(fact(pair.either, key, varying) for key in shown),
            *(_change(_time(pair.a, which), _time(pair.b, which), digits) for which in passes),
            _change(_peak(pair.a), _peak(pair.b), gib),
            _text(pair),
        ]
        for pair in pairs
    ]
    titles = [*(FACTS[key] for key in shown), *(f"{which} ms" for which in passes), "peak memory a rank", ""]
    return Table(titles, rows, LEFT | {""})


def _time(run: Run | None, which: str) -> float | None:
    return run.ms(which) if run is not None and which in run.passes else None


def _peak(run: Run | None) -> float | None:
    return run.result.peak_bytes if run is not None and run.ok else None


def _change(a: float | None, b: float | None, text: Callable[[float], str]) -> str:
    if a is None and b is None:
        return ""
    change = " → ".join("none" if value is None else text(value) for value in (a, b))
    return f"{change} ({b / a - 1:+.1%})" if a and b else change


def _text(pair: Pair) -> str:
    text = ", ".join(pair.verdicts)
    if pair.ratio is not None and set(pair.verdicts) & {Verdict.SLOWER, Verdict.FASTER, Verdict.INCONCLUSIVE}:
        text += f" (B/A {pair.ratio[0]:.3f} to {pair.ratio[1]:.3f})"
    failed = next((run for run in (pair.b, pair.a) if run is not None and not run.ok), None)
    if failed is not None:
        reason = " ".join((failed.result.reason or "").split())[:100]
        text += f": {failed.status}, {reason}" if reason else f": {failed.status}"
    return f"**{text}**" if pair.worse else text


def environment(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The differences between the machines, packages and commits of the two sets, a line each."""
    before, after = (dict(environment_table(runs).rows) for runs in (a, b))
    return [
        f"{title}: {before.get(title, 'unknown')} → {after.get(title, 'unknown')}"
        for title in dict.fromkeys([*before, *after])
        if title != "command" and before.get(title) != after.get(title)
    ]


def summary(pairs: Sequence[Pair], which: str) -> str:
    """The number of pairs by verdict, and the geometric mean of B's time over A's."""
    counts = Counter(verdict for pair in pairs for verdict in pair.verdicts)
    text = f"{len(pairs)} runs: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}"
    ratios = [b / a for pair in pairs if pair.a and pair.b and (a := pair.a.ms(which)) and (b := pair.b.ms(which))]
    if not ratios:
        return text
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return f"{text}; {which} in B over A: {mean:.3f} (geometric mean of {len(ratios)})"


if __name__ == "__main__":
    sys.exit(main())
