"""`python -m runner.compare A B`: two result sets, run by run: what is slower, faster, larger or broken in B.

    python -m runner.compare outputs/multirun/2026-01-31_12-00-00 outputs/multirun/2026-01-31_13-00-00
    python -m runner.compare A B --where world_size=4 --pass forward --tolerance 0.01

Runs belong together when the same was asked of them: variant, options (defaults written out, so that a default that changed sets runs
apart), workload, ranks, kernel, transport, graphs and timing; of one that was repeated in a set the latest counts.

The verdict on a pass is by the 95% interval of the ratio of medians, B over A: slower or faster when all of it is beyond the
tolerance, even when all of it is within, inconclusive when it is neither, or when there are fewer than 6 samples. The interval
is of the samples in these two runs; what changes from one start of a program to the next is not in it.

Exit status: 0 when nothing is worse, 1 when a run is slower, larger, not ok any more, not timed or missing in B, 2 for sets that
can't be compared; what is inconclusive, or new in B, is not worse. No torch."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import pack
from runner.measure.statistics import quantile, ratio_interval
from runner.output.terminal import gib
from runner.report.comparison import begun
from runner.report.labels import varying_options
from runner.report.runs import FACTS, PASSES, WAYS, WORKLOAD, Run, read, where
from runner.report.table import Table, differing, digits, fact
from runner.report.tables import LEFT, environment_table

PROGRAM = "python -m runner.compare"
EVEN, FASTER, SLOWER, INCONCLUSIVE = "even", "faster", "slower", "inconclusive"
LARGER, BROKEN, MENDED, MISSING, NEW, FAILED = (
    "larger",
    "broken",
    "mended",
    "missing in B",
    "new in B",
    "not ok in both",
)
UNTIMED, GONE = "not timed in B", "only in A, not ok there"
WORSE = (SLOWER, LARGER, BROKEN, MISSING, UNTIMED)
ASKED = (
    "batch", "heads", "kv_heads", "head_dim", "seq_len", "q_len", "causal", "window", "seqlens", "mode", "deterministic",
)  # fmt: skip
GROUPS = {"kernel": "name", "transport": "name", "dtype": "name", "timing": "method"}


Interval = tuple[float, float]


@dataclass(frozen=True)
class Pair:
    """The runs of both sets of which the same was asked, None where a set has none, and what came of it."""

    a: Run | None
    b: Run | None
    verdicts: tuple[str, ...]
    ratio: Interval | None = None  # of the medians, B over A

    @property
    def either(self) -> Run:
        found = self.b or self.a
        assert found is not None
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        for name in ("tolerance", "memory_tolerance"):
            if not getattr(options, name) >= 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 0; 0.02 is 2%")
        a, b = (where(read([folder]), options.where) for folder in (options.a, options.b))
        pairs = compare(a, b, options.which, options.tolerance, options.memory_tolerance)
        if not any(pair.a and pair.b for pair in pairs):
            raise ValueError(f"{options.a} and {options.b}: nothing was asked for in both{_apart(a, b)}")
        if any(run.ok for run in (*a, *b)) and all(run.ms(options.which) is None for run in (*a, *b)):
            raise ValueError(f"--pass {options.which}: no run has it; forward has every run")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: could not be read ({error.strerror})", file=sys.stderr)
        return 2
    print(table(pairs).markdown())
    for line in environment(a, b):
        print(line)
    print(summary(pairs, options.which))
    return 1 if any(verdict in WORSE for pair in pairs for verdict in pair.verdicts) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run or of many: what was before")
    parser.add_argument("b", type=Path, metavar="B", help="folder of a run or of many: what is now")
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs of these values (a,b: a or b)"
    )
    parser.add_argument("--pass", dest="which", choices=PASSES, default="total", help="what decides (default: total)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of times (default 0.02: 2%%)")
    parser.add_argument("--memory-tolerance", type=float, default=0.05, help="of peak memory (default 0.05)")
    return parser


def compare(a: Sequence[Run], b: Sequence[Run], which: str, tolerance: float, memory_tolerance: float) -> list[Pair]:
    """All runs of both sets, those of which the same was asked together, in the order of B's tables; then what B lacks."""
    before, now = _latest(a), _latest(b)
    pairs = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        pairs.append(_pair(old, new, which, tolerance, memory_tolerance))
    return pairs


def _latest(runs: Sequence[Run]) -> dict[tuple[object, ...], Run]:
    found: dict[tuple[object, ...], Run] = {}
    for run in runs:
        key = _asked(run)
        if key not in found or begun(run) >= begun(found[key]):
            found[key] = run
    return found


def _asked(run: Run) -> tuple[object, ...]:
    """From the configuration, which a run that was refused has, too."""
    config = run.result.config
    if not run.attention:
        return ("not understood", run.result.key, str(config))
    drawn = ("seqlens_mean", "seqlens_std", "seed") if config.get("seqlens") == "random" else ()
    plain = [str(config.get(key)) for key in (*ASKED, *drawn)]
    groups = [str(run.result.group(key).get(name)) for key, name in GROUPS.items()]
    options = {k: v for k, v in run.result.group("attention").items() if v is not None}
    return (run.world_size, run.graphs, *plain, *groups, str(sorted(options.items())))


def _apart(a: Sequence[Run], b: Sequence[Run]) -> str:
    """The facts in which the sets have no value in common."""
    found = []
    for key in ("attention", *(key for key in WORKLOAD if key != "gpu"), *WAYS):
        values = [{str(getattr(run, key)) for run in runs} for runs in (a, b)]
        if not values[0] & values[1]:
            found.append(
                f"{key} is {' '.join(sorted(values[0]))} in the one and {' '.join(sorted(values[1]))} in the other"
            )
    return f": {'; '.join(found)}" if found else ""


def _pair(a: Run | None, b: Run | None, which: str, tolerance: float, memory_tolerance: float) -> Pair:
    if b is None:
        return Pair(a, b, (MISSING if a is None or a.ok else GONE,))
    if a is None:
        return Pair(a, b, (NEW,))
    if not a.ok or not b.ok:
        return Pair(a, b, (MENDED if b.ok else BROKEN if a.ok else FAILED,))
    said, ratio = speed(a, b, which, tolerance)
    before, now = a.result.peak_bytes, b.result.peak_bytes
    if before and now and now > (1 + memory_tolerance) * before:
        return Pair(a, b, (*((said,) if said != EVEN else ()), LARGER), ratio)
    return Pair(a, b, (said,), ratio)


def speed(a: Run, b: Run, which: str, tolerance: float) -> tuple[str, Interval | None]:
    """The verdict on a pass, and the interval of the ratio of its medians; a run that has a forward only, by that."""
    if a.ms(which) is None:
        return EVEN, None  # neither has it, or it is new
    if b.ms(which) is None:
        return UNTIMED, None
    ratio = _of_intervals(a, b, which)
    said = verdict(ratio, tolerance)
    if ratio is not None and said == INCONCLUSIVE:  # the samples themselves say more than the two intervals
        ratio = _of_samples(a, b, which) or ratio
        said = verdict(ratio, tolerance)
    return said, ratio


def verdict(ratio: Interval | None, tolerance: float) -> str:
    if ratio is None:
        return INCONCLUSIVE
    if ratio[0] > 1 + tolerance:
        return SLOWER
    if ratio[1] < 1 / (1 + tolerance):
        return FASTER
    return EVEN if 1 / (1 + tolerance) <= ratio[0] and ratio[1] <= 1 + tolerance else INCONCLUSIVE


def _of_intervals(a: Run, b: Run, which: str) -> Interval | None:
    """From the 95% intervals of the two medians, by order statistics: wider than that of their ratio needs to be."""
    ends = [(run.passes.get(which) or run.passes["forward"]).ci95 for run in (a, b)]
    if ends[0] is None or ends[1] is None or not ends[0][0] > 0:
        return None
    return ends[1][0] / ends[0][1], ends[1][1] / ends[0][0]


def _of_samples(a: Run, b: Run, which: str) -> Interval | None:
    """By bootstrap of the samples; None where a run's are not there, or are not those of its result."""
    found = []
    for run in (a, b):
        taken = which if which in run.passes else "forward"
        ms = (pack.samples(run.result) or {}).get(taken)
        if not ms or quantile(sorted(ms), 0.5) != run.passes[taken].median:
            return None
        found.append(ms)
    return ratio_interval(found[0], found[1])


def table(pairs: Sequence[Pair]) -> Table:
    """A row a pair: what sets it apart, its passes and its peak memory from A to B, and what came of it."""
    runs = [run for pair in pairs for run in (pair.a, pair.b) if run is not None]
    shown = [key for key in differing([pair.either for pair in pairs]) if key not in ("gpu", "kernel", "transport")]
    for key, asked in (("kernel", "asked_kernel"), ("transport", "asked_transport")):
        shown += [key] if len({getattr(run, asked) for run in runs}) > 1 else []
    varying = varying_options(runs)
    titles = [FACTS[key] for key in shown]
    passes = [which for which in PASSES if any(run.ms(which) is not None and which in run.passes for run in runs)]
    rows = []
    for pair in pairs:
        row = [fact(pair.either, key, varying) for key in shown]
        row += [_change(_time(pair.a, which), _time(pair.b, which), digits) for which in passes]
        row += [_change(_peak(pair.a), _peak(pair.b), gib)]
        row.append(_said(pair))
        rows.append(row)
    return Table([*titles, *(f"{which} ms" for which in passes), "peak memory a rank", ""], rows, LEFT | {""})


def _time(run: Run | None, which: str) -> float | None:
    return run.ms(which) if run is not None and which in run.passes else None


def _peak(run: Run | None) -> float | None:
    return run.result.peak_bytes if run is not None and run.ok else None


def _change(a: float | None, b: float | None, said: Callable[[float], str]) -> str:
    if a is None and b is None:
        return ""
    text = " → ".join("none" if value is None else said(value) for value in (a, b))
    return f"{text} ({b / a - 1:+.1%})" if a and b else text


def _said(pair: Pair) -> str:
    text = ", ".join(pair.verdicts)
    if pair.ratio is not None and set(pair.verdicts) & {SLOWER, FASTER, INCONCLUSIVE}:
        text += f" (B/A {pair.ratio[0]:.3f} to {pair.ratio[1]:.3f})"
    failed = next((run for run in (pair.b, pair.a) if run is not None and not run.ok), None)
    if failed is not None:
        text += ": " + ", ".join(filter(None, (failed.status, " ".join((failed.result.reason or "").split())[:100])))
    return f"**{text}**" if any(verdict in WORSE for verdict in pair.verdicts) else text


def environment(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """What differs between the machines, packages and commits of the two sets, a line each."""
    before, now = (dict(environment_table(runs).rows) for runs in (a, b))
    titles = [title for title in dict.fromkeys([*before, *now]) if title != "command"]
    return [
        f"{title}: {before.get(title, 'not said')} → {now.get(title, 'not said')}"
        for title in titles
        if before.get(title) != now.get(title)
    ]


def summary(pairs: Sequence[Pair], which: str) -> str:
    """How many of what, and the geometric mean of B's time over A's."""
    counts = Counter(verdict for pair in pairs for verdict in pair.verdicts)
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    ratios = [b / a for pair in pairs if pair.a and pair.b and (a := pair.a.ms(which)) and (b := pair.b.ms(which))]
    if not ratios:
        return f"{len(pairs)} runs: {said}"
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return f"{len(pairs)} runs: {said}; {which} in B over A: {mean:.3f} (geometric mean of {len(ratios)})"


if __name__ == "__main__":
    sys.exit(main())
