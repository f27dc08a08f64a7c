"""The consoles, tables that fit a terminal, and numbers with their units."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from textwrap import fill

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns
LONGEST_WORD = 26  # a longer one, such as a list of 40 lengths, may be broken


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = 100  # a file has no width
    return console


out = _console(stderr=False)
err = _console(stderr=True)


def fit(
    columns: Mapping[str, Sequence[str]], width: int, words: Collection[str], drop: Sequence[str]
) -> tuple[dict[str, int], list[str]]:
    """The widths of the columns, which are cells by title, in a terminal of `width` characters, and the titles of the
    columns that were left out.

    Columns of `drop` are left out until the rest fits: first those with the same cell in all rows, then in the order of
    `drop`. The cells of the columns in `words` wrap at spaces; other cells are never broken, even where the table stays
    too wide."""
    widths = {title: _widths(title, cells, title in words) for title, cells in columns.items()}
    same = [title for title in drop if len({*(cells := columns.get(title, ()))}) == 1 < len(cells)]
    dropped: list[str] = []
    for title in [*same, *(title for title in drop if title not in same)]:
        if title in widths and sum(least + GAP for least, _ in widths.values()) > width:
            del widths[title]
            dropped.append(title)
    spare = max(0, width - sum(least + GAP for least, _ in widths.values()))
    wanted = max(1, sum(most - least for least, most in widths.values()))
    shares = {title: min(most - least, spare * (most - least) // wanted) for title, (least, most) in widths.items()}
    return {title: least + shares[title] for title, (least, _) in widths.items()}, dropped


def _widths(title: str, cells: Sequence[str], words: bool) -> tuple[int, int]:
    """The smallest and the largest useful width of a column; titles may wrap between words, cells where they are words."""
    lines = [line for cell in cells for line in cell.splitlines()]
    whole = max(map(cell_len, lines), default=0)
    longest = max((cell_len(word) for line in lines for word in line.split()), default=0)
    least = max(min(LONGEST_WORD, longest) if words else whole, *map(cell_len, ["", *title.split()]))
    return least, max(least, whole, cell_len(title))


def print_rows(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[str],
    words: Collection[str] = (),
    drop: Sequence[str] = (),
    leading: int = 0,
    notes: Mapping[str, Collection[str]] = {},
    elsewhere: str = "a wider terminal, or COLUMNS=200, shows them",
) -> None:
    """Print a table of those columns that have a text, fitted to the terminal, then the notes and the columns that were left
    out. notes: each with the titles of its columns; none of them: a note on the whole. left: titles of columns that are aligned left. words, drop: as in `fit`. No number is ever cut: a table that is
    still too wide continues in the terminal's next line."""
    filled = {x: cells for x, cells in zip(columns, zip(*rows, strict=True), strict=False) if any(cells)}
    widths, dropped = fit(filled, out.width, words, drop)
    style = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(title=title, leading=leading, **style)  # type: ignore[arg-type]
    for column, width in widths.items():
        table.add_column(column, justify="left" if column in left else "right", width=width, overflow="fold")
    for row in zip(*(map(escape, filled[column]) for column in widths), strict=True):
        table.add_row(*row)
    console = Console(width=max(out.width, sum(widths.values()) + GAP * len(widths)), height=25, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    out.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    shown = [note for note, about in notes.items() if not about or {*about} & {*widths}]
    for note in [*shown, *([f"too narrow here for {', '.join(dropped)}: {elsewhere}"] if dropped else [])]:
        out.print(fill(note, out.width), soft_wrap=True, markup=False)


def seconds(s: float) -> str:
    """A duration in s, minutes or hours."""
    if s < 120:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def flop(n: float) -> str:
    """A number of FLOPs with three digits."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n / 1e6:.3g} MFLOP"


def gib(n: float) -> str:
    """A number of bytes in KiB, MiB or GiB."""
    if n < 2**20:
        return f"{n / 2**10:.0f} KiB"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
