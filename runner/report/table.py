"""The texts of a run's facts, and of what a group of runs has in common."""

from __future__ import annotations

from collections.abc import Sequence

from runner.record.fields import digits
from runner.report.labels import Varying, options_text, varying_options
from runner.report.runs import FACTS, NONE_COUNTS, PHRASES, Run, sortable

BEST = "**{}**"
MOST_SWEPT = 5  # facts of a title, and values of a fact
NOISY = "`!`: noisy, the interquartile range is above 5% of the median."


def time(run: Run, which: str) -> str:
    """The median of a pass, or the time back to back, with as many digits as its noise leaves; empty where there is none."""
    times, ms = run.times(which), run.ms(which)
    return "" if ms is None else times.text if times else digits(ms)


def counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def fact(run: Run, key: str, varying: Varying | None = None) -> str:
    """The text of a fact; of the options, those in `varying`."""
    if key == "options":
        return options_text(run, varying or set())
    value = getattr(run, key)
    if value is None or value is False:
        return ""
    if key == "attention" and run.took:
        return f"{value}: {run.took}"
    if key in ("seq_len", "q_len"):
        return f"{value:,}"
    return str(value).replace("_", " and ") if key == "mode" else str(value)


def differing(runs: Sequence[Run]) -> list[str]:
    """The facts in which the runs differ. An empty text counts as a value only where it means none, not unknown."""
    varying = varying_options(runs)
    texts = {key: {fact(run, key, varying) for run in runs} for key in FACTS}
    return [key for key in FACTS if len(texts[key] - (set() if key in NONE_COUNTS else {""})) > 1] or ["attention"]


def swept(runs: Sequence[Run]) -> str:
    """What the runs differ in, in a line: the variants, then the first few other facts."""
    variants = dict.fromkeys(run.attention for run in runs if run.attention)
    parts = [", ".join(variants) if len(variants) <= MOST_SWEPT else f"{len(variants)} variants"]
    for key in [key for key in differing(runs) if key not in ("attention", "options", "gpu")][: MOST_SWEPT - 1]:
        values = sorted({value for run in runs if (value := getattr(run, key)) is not None}, key=sortable)
        texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        numbers = all(isinstance(value, int) for value in values)
        many = f"{texts[0]} to {texts[-1]}" if numbers else f"{len(texts)} values of {FACTS[key]}"
        parts.append(PHRASES.get(key, "{}").format(", ".join(texts) if len(texts) <= MOST_SWEPT else many))
    return "; ".join(parts)


def in_common(runs: Sequence[Run]) -> str:
    """The facts that all runs share, in a line."""
    shown = set(differing(runs))
    parts = [] if "attention" in shown else [f"attention {runs[0].attention}"]
    for key, phrase in PHRASES.items():
        value = next((text for run in runs if (text := fact(run, key))), "")
        if key not in shown and value:
            parts.append(phrase.format(value))
    samples = {run.passes["forward"].n for run in runs if run.ok}
    return ", ".join(parts) + (f", {samples.pop()} samples" if len(samples) == 1 and "timing" not in shown else "")
