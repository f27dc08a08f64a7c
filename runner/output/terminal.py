"""The consoles, tables that fit a terminal, and numbers with their units."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from textwrap import fill

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

GAP = 2  # between the columns of `new_table`
LONGEST_WORD = 26  # a longer one, such as a list of 40 lengths, may be broken


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = 100  # a file has no width
    return console


out = _console(stderr=False)
err = _console(stderr=True)


def new_table(title: str | None = None) -> Table:
    """An empty table in the style of all printed tables."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def fit(table: Table, width: int, words: Collection[str] = (), drop: Sequence[str] = ()) -> tuple[Table, list[str]]:
    """The table in a terminal of `width` characters, and the titles of the columns that were left out.

    Columns of `drop` are left out until the rest fits: first those with the same cell in all rows, then in the order of
    `drop`. The cells of the columns in `words` wrap at spaces; other cells are never broken, even where the table stays
    too wide."""
    widths = {str(column.header): _widths(column, str(column.header) in words) for column in table.columns}
    cells = {str(column.header): {*column.cells} for column in table.columns}
    same = [title for title in drop if len(cells.get(title, ())) == 1 < table.row_count]
    dropped: list[str] = []
    for title in [*same, *(title for title in drop if title not in same)]:
        if title in widths and sum(least + GAP for least, _ in widths.values()) > width:
            del widths[title]
            dropped.append(title)
    spare = max(0, width - sum(least + GAP for least, _ in widths.values()))
    wanted = max(1, sum(most - least for least, most in widths.values()))
    fitted, kept = (
        new_table(str(table.title) if table.title else None),
        [column for column in table.columns if column.header in widths],
    )
    fitted.leading = table.leading
    for column in kept:
        least, most = widths[str(column.header)]
        share = min(most - least, spare * (most - least) // wanted)
        fitted.add_column(column.header, justify=column.justify, width=least + share, overflow="fold")
    for row in zip(*(column.cells for column in kept), strict=True):
        fitted.add_row(*row)
    return fitted, dropped


def _widths(column: Column, words: bool) -> tuple[int, int]:
    """The smallest and the largest useful width of a column; titles may wrap between words, cells where they are words."""
    lines = [line for cell in column.cells for line in Text.from_markup(str(cell)).plain.splitlines()]
    whole = max(map(cell_len, lines), default=0)
    longest = max((cell_len(word) for line in lines for word in line.split()), default=0)
    title = str(column.header)
    least = max(min(LONGEST_WORD, longest) if words else whole, *map(cell_len, ["", *title.split()]))
    return least, max(least, whole, cell_len(title))


def show(table: Table, words: Collection[str] = (), drop: Sequence[str] = ()) -> list[str]:
    """Print a table fitted to the terminal; returns the titles of the columns that were left out. No number is ever
    cut: a table that is still too wide continues in the terminal's next line."""
    table, dropped = fit(table, out.width, words, drop)
    needed = Measurement.get(out, out.options.update(max_width=10_000), table).maximum
    console = out if needed <= out.width else Console(width=needed, height=25, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    out.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    return dropped


def note(text: str) -> None:
    """Print a sentence in lines that fit."""
    out.print(fill(text, out.width), soft_wrap=True, markup=False)


def note_dropped(dropped: Sequence[str], where: str) -> None:
    """Name the columns that were left out; `where` ends the line with where to find them."""
    if dropped:
        note(f"too narrow here for {', '.join(dropped)}{where}")


def print_rows(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[str],
    words: Collection[str] = (),
    drop: Sequence[str] = (),
    leading: int = 0,
) -> None:
    """Print a table of those columns that have a text. left: titles of columns that are aligned left. words, drop: as in `fit`."""
    table = new_table(title)
    table.leading = leading
    filled = [(x, cells) for x, cells in zip(columns, zip(*rows, strict=True), strict=False) if any(cells)]
    for column, _ in filled:
        table.add_column(column, justify="left" if column in left else "right")
    for row in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*row)
    note_dropped(show(table, words, drop), ": a wider terminal, or COLUMNS=200, shows them")


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
