"""What a user sees: progress while a run works, a table when it is done."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

from runner import environment
from runner.output import results
from runner.output.record import Baseline, Correctness, During, Memory, Metrics, PassPhases, Result, Timing


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = 200  # a file has no edge
    return console


out = _console(stderr=False)
err = _console(stderr=True)
LONG_S = 60.0


def new_table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def fit(table: Table, width: int, words: Collection[str] = (), drop: Sequence[str] = ()) -> tuple[Table, list[str]]:
    """The table in `width` columns of a terminal, and the titles of its columns that had no room. Cells of the columns `words`
    go on in the next line, at a space; those of all others stay whole. Columns that say the same of all rows go first, then those
    of `drop` in its order; what is wider still stays so."""
    columns = [(str(c.header), c.justify, [str(cell) for cell in c.cells]) for c in table.columns]
    same = [title for title, _, cells in columns if title in drop and len(cells) > 1 and len(set(cells)) == 1]
    dropped: list[str] = []
    for title in [*same, *(title for title in drop if title not in same)]:
        if sum(least + GAP for least, _ in _widths(columns, words)) <= width:
            break
        if any(title == column[0] for column in columns):
            dropped.append(title)
            columns = [column for column in columns if column[0] != title]
    widths = _widths(columns, words)
    spare = width - sum(least + GAP for least, _ in widths)
    fitted = new_table(str(table.title) if table.title else None)
    fitted.leading = table.leading
    wanted = [most - least for least, most in widths]
    for (title, justify, _), (least, _), more in zip(columns, widths, wanted, strict=True):
        share = min(more, max(0, spare) * more // max(1, sum(wanted)))
        fitted.add_column(title, justify=justify, width=least + share, overflow="fold")
    for row in zip(*(cells for *_, cells in columns), strict=True):
        fitted.add_row(*row)
    return fitted, dropped


GAP = 2  # between the columns of `new_table`
LONGEST_WORD = 26  # longer ones, as a list of 40 lengths, may be broken


def _widths(columns: Sequence[tuple[str, Any, list[str]]], words: Collection[str]) -> list[tuple[int, int]]:
    """The least and the most that each column can use; a title may always be broken between its words."""
    found = []
    for title, _, cells in columns:
        lines = [line for cell in cells for line in Text.from_markup(cell).plain.splitlines()]
        whole = max((cell_len(line) for line in lines), default=0)
        least = whole
        if title in words:
            least = min(LONGEST_WORD, max((cell_len(word) for line in lines for word in line.split()), default=0))
        least = max(least, max((cell_len(word) for word in title.split()), default=0))
        found.append((least, max(least, whole, cell_len(title))))
    return found


def show(table: Table, words: Collection[str] = (), drop: Sequence[str] = ()) -> list[str]:
    """Print a table that fits the terminal; returns the titles of the columns that had no room. No figure is ever cut: what is
    wider than the terminal goes on in its next line."""
    fitted, dropped = fit(table, out.width, words, drop)
    wide = Console(width=10_000, height=25)  # without a height, dumb terminals are 80 wide
    needed = Measurement.get(wide, wide.options, fitted).maximum
    (out if needed <= out.width else Console(width=needed, height=25, highlight=False)).print(fitted)
    return dropped


def note_dropped(dropped: Sequence[str], where: str) -> None:
    if dropped:
        out.print(f"too narrow here for {', '.join(dropped)}{where}")


def seconds(s: float) -> str:
    if s < 120:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def flop(n: float) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n / 1e6:.3g} MFLOP"


def gib(n: float) -> str:
    if n < 2**20:
        return f"{n / 2**10:.0f} KiB"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


class Progress:
    """A spinner with the phase that the ranks are in; on no terminal only the lines that matter, in a sweep one when a run
    starts. `place`: of the run in its sweep."""

    def __init__(self, title: str, flops: float, place: str = ""):
        self.title, self.flops = title, flops
        number = place.partition(",")[0]
        self.shown = f"{number}: {title}" if place else title
        self.status = Status(f"{self.shown}: starting the world", console=err)
        if place and not out.is_terminal:
            out.print(f"{place}: {title}", soft_wrap=True)
        self.warned = False

    def __enter__(self) -> Progress:
        self.status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.status.stop()

    def __call__(self, states: list[dict[str, Any]]) -> None:
        if not states:
            return
        first = states[0]
        phases = dict.fromkeys(state["phase"] for state in states)
        note = f" ({first['note']})" if first.get("note") else ""
        self.status.update(f"{self.shown}: {', '.join(phases).replace('_', ' ')}{note}")
        estimate = first.get("estimate_s", 0)
        if estimate > LONG_S and not self.warned:
            self.warned = True
            err.print(
                f"{self.title}: {flop(self.flops)} an iteration, about {seconds(estimate)} in all at the rate measured "
                "here, the correctness check not counted; going on"
            )


def run_table(result: Result) -> None:
    """One run, in full."""
    timing, chosen = result.timing, result.chosen
    if chosen and chosen.why:
        out.print(f"auto: {escape(chosen.why)} ({chosen.basis})", soft_wrap=True)
    if chosen:
        for name, reason in chosen.passed_over.items():
            out.print(f"kernel {chosen.kernel}, not {name}: {escape(reason)}", soft_wrap=True)
    if chosen and chosen.settings_ms:
        tried = "; ".join(f"{label} {ms:.3f} ms" for label, ms in chosen.settings_ms.items())
        out.print(f"at its best: {escape(next(iter(chosen.settings_ms)))} (tried: {escape(tried)})", soft_wrap=True)
    if chosen and chosen.note:
        out.print(f"note: {escape(chosen.note)}", soft_wrap=True)
    if result.correctness and result.correctness.tensors:
        _correctness(result.correctness)
    if not timing or not result.metrics or not result.memory:
        if result.status == "ok" and result.reason:
            out.print(result.reason)
        return
    _time_table(timing, result.metrics, result.baseline, scales=len(result.memory.by_rank) > 1)
    if text := clocks(result.environment.during):
        out.print(f"clocks while timing: {text}", soft_wrap=True)
    out.print(environment.commit_text(result.environment.git_plain))
    for which, entry in result.phases.items():
        _phase_table(which, entry)
    _memory(result.memory)
    for rank, found in enumerate(result.profile):
        out.print(
            f"profile, rank {rank}, an iteration: compute {found.compute_ms:.3f} ms, communication "
            f"{found.communication_ms:.3f} ms, exposed (waits for peers included) "
            f"{found.exposed_communication_ms:.3f} ms, idle {found.idle_ms:.3f} ms"
        )


def _time_table(timing: Timing, metrics: Metrics, baseline: Baseline | None, scales: bool) -> None:
    """`scales`: whether there is more than one rank, so that speedup and efficiency say something."""
    table = new_table("Time, the slowest rank of each iteration")
    baseline = baseline or Baseline()
    for column in ("pass", "ms", "IQR", "tokens/s", "TFLOP/s", "of limit", "single", "speedup", "eff."):
        table.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True)
    for which, s in timing.passes.items():
        m = metrics.passes[which]
        single = baseline.passes.get(which)
        table.add_row(
            which,
            f"{s.median:.3f}",
            f"{s.iqr_over_median:.1%}{'!' if s.noisy else ''}{'~' if s.trend else ''}",
            f"{m.tokens_per_s:,.0f}" if m.tokens_per_s is not None else "",
            f"{m.tflops_per_device:.3g}",
            f"{m.sol:.0%} {(m.limited_by or '')[:4]}" if m.sol else "",
            f"{single:.3f}{'*' if baseline.extrapolated else ''}" if single else "",
            f"{baseline.speedup[which]:.2f}" if scales and which in baseline.speedup else "",
            f"{baseline.efficiency[which]:.0%}" if scales and which in baseline.efficiency else "",
        )
    show(table)
    passes = timing.passes.values()
    noisy = "; ! means noisy" if any(s.noisy for s in passes) else ""
    noisy += "; ~ means that samples rose or fell while they were taken" if any(s.trend for s in passes) else ""
    out.print(
        f"ms is the median of {timing.passes['forward'].n}, TFLOP/s are those of one device{noisy}", soft_wrap=True
    )
    if timing.overhead_high:
        out.print(
            f"timing itself takes {timing.overhead_ms * 1e3:.1f} us, {timing.overhead_share:.1%} of the shortest pass",
            soft_wrap=True,
        )
    for which, m in metrics.passes.items():
        if m.no_sol:
            out.print(f"no limit of {which}: {m.no_sol}", soft_wrap=True)
    if timing.no_ci95:
        out.print(f"no interval: {timing.no_ci95}")
    if baseline.extrapolated:
        out.print(f"* extrapolated by FLOPs from {baseline.measured_seq_len:,} tokens, which fit one device")
    if baseline.unsupported:
        out.print(f"no single-device baseline: {baseline.unsupported}")


def clocks(during: During) -> str | None:
    """The GPUs' clocks while timing, and what held them down."""
    ranges = [gpu.sm_mhz for gpu in during.by_device if gpu.sm_mhz]
    if not ranges:
        return None
    why = sorted({reason for gpu in during.by_device for reason in gpu.throttle_reasons} - {"gpu_idle"})
    text = f"{min(r.min for r in ranges):,.0f} to {max(r.max for r in ranges):,.0f} MHz"
    return f"{text}, held down by {', '.join(why)}" if why else text


def _correctness(found: Correctness) -> None:
    verdict = "[green]passed[/]" if found.passed else "[red]failed[/]"
    table = new_table(f"Correctness {verdict} (against {found.reference})")
    for column in ("tensor", "rel L2", "max abs", "worst row", "local call's rel L2", "ratio"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for name, t in found.tensors.items():
        errors = (
            "" if error is None else f"{error:.2e}" for error in (t.rel_l2, t.max_abs, t.worst_row, t.local_rel_l2)
        )
        table.add_row(name, *errors, f"{t.ratio_to_local:.2f}" if t.ratio_to_local is not None else "")
    show(table)
    if found.checked_share < 1:
        out.print(f"checked on {found.checked_share:.1%} of the heads: all of them would take too long")
    if found.lse.checked is False:
        out.print(f"the LSE was not checked: {found.lse.why}")
    if found.timed.passed is None and found.timed.why:
        out.print(f"the timed outputs were not checked: {found.timed.why}")


def _phase_table(which: str, entry: PassPhases) -> None:
    out.print(
        f"Phases of {which} on rank {entry.rank}: {entry.total_ms:.3f} ms, compute {entry.compute_share:.0%}, "
        f"exposed communication {entry.exposed_communication_ms:.3f} ms ({entry.communication_share:.0%}), "
        f"skew {entry.skew:.0%}",
        soft_wrap=True,
    )
    table = new_table()
    for column in ("phase", "ms", "share", "medians by rank, ms"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, p in entry.phases.items():
        share = "beside" if name.startswith("comm_") or p.share is None else f"{p.share:.0%}"
        table.add_row(name, f"{p.ms or 0:.3f}", share, " ".join(f"{ms:.3f}" for ms in p.by_rank_ms))
    table.add_row("other", f"{entry.other_ms:.3f}", f"{entry.other_share:.0%}", "")
    show(table, words=("medians by rank, ms",))


def _memory(memory: Memory) -> None:
    parts = []
    for rank in memory.by_rank:
        if rank.peak_allocated is not None:
            parts.append(f"{gib(rank.peak_allocated)} ({gib(rank.peak_reserved or 0)} reserved)")
        else:
            parts.append(gib(rank.peak_resident or 0))
    out.print(f"Peak memory by rank: {', '.join(parts)}; inputs {gib(memory.by_rank[0].inputs)} a rank")


def run_line(result: Result) -> str:
    """One run of a sweep, in a line."""
    if result.status != "ok" or result.timing is None:
        return escape(f"{result.name}: {result.status}: {result.reason}")
    times = ", ".join(f"{which} {s.median:.3f}" for which, s in result.timing.passes.items())
    return f"{result.name}: {result.timing.rounds.unfinished or 'ok'}, {times} ms"


# left out of a sweep's table in this order where the terminal is too narrow, those first that are the same of all runs
LEFT_OUT = (
    "seed", "sequences", "rel L2", "L2 read", "memory read", "KV bytes, model", "exp. bwd", "exp. fwd", "dtype", "timing", "mode",
    "transport", "eff.", "config", "bwd ms", "fwd ms", "kernel", "status", "TFLOP/s",
)  # fmt: skip
WRAPPED = ("options", "settings", "sequences", "timing")


def sweep_table(rows: list[dict[str, Any]]) -> None:
    """What differs between the rows, beside what was measured."""
    filled = [results.cells(entry) for entry in rows]
    table, columns = new_table(), []
    for i, (key, title, _) in enumerate(results.SHOWN):
        found = {row[i] for row in filled}
        same = found == {""} or (len(rows) > 1 and len(found) == 1)
        hidden = not results.differ(rows, key) if key in results.WHERE_DIFFERENT else same
        if not hidden or key in ("attention", "status"):
            left = key in ("attention", "config", "kernel", "status", "settings")
            table.add_column(title, justify="left" if left else "right")
            columns.append(i)
    for row in filled:
        table.add_row(*(escape(row[i]) for i in columns))
    # the only time of a run without a backward, and the only word on one that failed
    needed = {"fwd ms"} if any(row["status"] == "ok" and row["total_ms"] is None for row in rows) else set()
    needed |= {"status"} if any(row["status"] != "ok" for row in rows) else set()
    dropped = show(table, WRAPPED, [title for title in LEFT_OUT if title not in needed])
    for remark in results.remarks(rows):
        out.print(remark)
    note_dropped(dropped, ": summary.md has them")
