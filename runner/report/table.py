"""A table of texts, as Markdown and HTML, and the texts of a run's facts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.output.record import STATUSES
from runner.output.summary import escaped, markdown_row
from runner.report.labels import Varying, options_text, varying_options
from runner.report.runs import FACTS, NONE_COUNTS, PHRASES, Run, sortable

BEST = "**{}**"
MOST_SWEPT = 5  # facts of a title, and values of a fact
NOISY = "`!`: noisy, the interquartile range is above 5% of the median."


@dataclass
class Table:
    """Cells are plain text or **bold**. `left` has the titles of the columns that are aligned left; `notes` stand
    below."""

    titles: list[str]
    rows: list[list[str]]
    left: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        rule = ["---" if title in self.left else "---:" for title in self.titles]
        lines = [markdown_row(self.titles), "|" + "|".join(rule) + "|", *(markdown_row(row) for row in self.rows)]
        notes = ("\n".join(escaped(line) for line in note.split("\n")) for note in self.notes)
        return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"

    def html(self) -> str:
        def row(tag: str, texts: list[str]) -> str:
            return "".join(cell(tag, title, text) for title, text in zip(self.titles, texts, strict=True))

        def cell(tag: str, title: str, text: str) -> str:
            bold = text.startswith("**") and text.endswith("**")
            shown = html.escape(text.strip("*") if bold else text)
            kinds = ["words"] * (title in self.left) + ["failed"] * (text in STATUSES[1:])
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            return f"<{tag}{kind}>{f'<b>{shown}</b>' if bold else shown}</{tag}>"

        head, body = row("th", self.titles), "\n".join(f"<tr>{row('td', texts)}</tr>" for texts in self.rows)
        notes = "".join(f"<p>{html.escape(note).replace('`', '')}</p>" for note in self.notes)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{notes}'


def of_columns(columns: Mapping[str, Sequence[str]], left: set[str], notes: Sequence[str] = ()) -> Table:
    """The table of those columns that have a text."""
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    return Table([*filled], [list(row) for row in zip(*filled.values(), strict=True)], left, [*notes])


def digits(value: float | None) -> str:
    """A time or rate with four digits, or three below 1: none is measured more exactly."""
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 99.995 else f"{value:.2f}" if value >= 9.9995 else f"{value:.3f}"


def counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def fact(run: Run, key: str, varying: Varying | None = None) -> str:
    """The text of a fact; of the options, those in `varying`."""
    if key == "options":
        return options_text(run, varying or set())
    value = getattr(run, key)
    if value is None:
        return ""
    if key == "attention" and run.took:
        return f"{value}: {run.took}"
    if key == "graphs":
        return str(value).lower() if value else ""
    if key == "mode":
        return str(value).replace("_", " and ")
    return f"{value:,}" if key in ("seq_len", "q_len") and isinstance(value, int) else str(value)


def differing(runs: Sequence[Run]) -> list[str]:
    """The facts in which the runs differ. An empty text counts as a value only where it means none, not unknown."""
    varying = varying_options(runs)
    texts = {key: {fact(run, key, varying) for run in runs} for key in FACTS}
    found = [key for key in FACTS if len(texts[key] - (set() if key in NONE_COUNTS else {""})) > 1]
    return found or ["attention"]


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
