"""A table of texts, and how Markdown writes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


def escaped(text: str) -> str:
    """The text as one line of Markdown, with any HTML in it shown as it is."""
    return re.sub(r"[\r\n]+", " ", text).replace("&", "&amp;").replace("<", "&lt;")


@dataclass
class Table:
    """Cells are plain text or **bold**. `left` has the titles of the columns that are aligned left; `notes` stand
    below."""

    titles: list[str]
    rows: list[list[str]]
    left: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(columns: Mapping[str, Sequence[str]], left: Collection[str], notes: Iterable[str] = ()) -> Table:
        """The table of those columns that have a text."""
        filled = {title: cells for title, cells in columns.items() if any(cells)}
        return Table([*filled], [list(row) for row in zip(*filled.values(), strict=True)], left, [*notes])

    def markdown(self) -> str:
        rows = (" | ".join(escaped(text).replace("|", "\\|") for text in row) for row in (self.titles, *self.rows))
        head, *lines = (f"| {row} |" for row in rows)
        rule = "|".join("---" if title in self.left else "---:" for title in self.titles)
        notes = ("\n" + "\n".join(map(escaped, note.split("\n"))) for note in self.notes)
        return "\n".join([head, f"|{rule}|", *lines, *notes]) + "\n"
