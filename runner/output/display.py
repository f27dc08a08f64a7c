"""What a user sees: progress while a run works, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.markup import escape
from rich.status import Status
from rich.table import Table

from attention.masks.band import Band
from runner.output import columns, fields, summary, terminal
from runner.output.columns import TABLE, Column, differ
from runner.output.record import Result
from runner.output.terminal import err as err
from runner.output.terminal import flop, gib, new_table, note_dropped, seconds, show
from runner.output.terminal import out as out

LIMITS = {"compute": "matrix products", "memory": "memory", "communication": "links"}
BEYOND = [
    column
    for column in TABLE
    if column.key in ("v_head_dim", "scale", "softcap", "sinks", "prefix", "kv_lengths", "seqlens")
]
SWEPT = 10  # so much later a narrow terminal leaves out what the runs differ in
LONG_S = 60.0  # a run expected to take longer is announced


class Progress:
    """A spinner that shows the phase of the ranks; without a terminal, one line when a run of a sweep starts.

    flops: of one iteration. place: the run's place in its sweep, such as "run 3 of 12, 40 s" (since the start). counts: of the
    sweep's runs so far, with the time left."""

    def __init__(self, title: str, flops: float, place: str = "", counts: Callable[[], str] = str):
        self.title, self.flops, self.counts = title, flops, counts
        self.number = place.partition(",")[0]
        self.status = Status(self.text("starting the world"), console=terminal.err)
        if place and not terminal.out.is_terminal:
            terminal.out.print(f"{place}: {title}", soft_wrap=True)
        self.warned = False

    def text(self, phase: str) -> str:
        """What the spinner shows beside it."""
        counts = f" ({found})" if (found := self.counts()) else ""
        return f"{self.number}{counts}: {self.title}: {phase}" if self.number else f"{self.title}: {phase}"

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
        self.status.update(self.text(f"{', '.join(phases).replace('_', ' ')}{note}"))
        estimate = first.get("estimate_s", 0)
        if estimate > LONG_S and not self.warned:
            self.warned = True
            terminal.err.print(
                f"{self.title}: {flop(self.flops)} an iteration, about {seconds(estimate)} in all at the rate measured "
                "here, the correctness check not counted; going on"
            )


def run_table(result: Result) -> None:
    """Print one run in full: what ran, how well, then errors, times and memory."""
    _print([what_ran(result), *verdict(result)])
    if result.chosen:
        _print(_choices(result.chosen))
    if result.correctness and result.correctness.tensors:
        _correctness(result.correctness)
    if not result.timing or not result.metrics or not result.memory:
        _print([result.reason] if result.status == "ok" and result.reason else [])
        return
    _print(_mask(result, result.metrics))
    _times(result.timing, result.metrics, result.baseline or fields.Baseline(), several=len(result.memory.by_rank) > 1)
    _print(_model(result.model, result.last_metrics) if result.model else [])
    clocks = clocks_text(result.environment.during)
    _print([f"clocks while timing: {clocks}"] if clocks else [])
    _print([energy_text(result.energy)] if result.energy else [])
    _print([result.environment.commit])
    phases(result)
    peaks = [
        gib(rank.peak_resident or 0)
        if rank.peak_allocated is None
        else f"{gib(rank.peak_allocated)} ({gib(rank.peak_reserved or 0)} reserved)"
        for rank in result.memory.by_rank
    ]
    _print([f"Peak memory by rank: {', '.join(peaks)}; inputs {gib(result.memory.by_rank[0].inputs)} a rank"])
    _print(
        f"profile, rank {rank}, an iteration: compute {found.compute_ms:.3f} ms, communication "
        f"{found.communication_ms:.3f} ms, exposed (with waiting for other ranks) {found.exposed_communication_ms:.3f} ms, "
        f"idle {found.idle_ms:.3f} ms"
        for rank, found in enumerate(result.profile)
    )


def what_ran(result: Result) -> str:
    """Variant, kernel, transport, device, workload, ranks and timing, in a line."""
    row, asked, timing = columns.row(result), result.asked, result.timing
    heads = f"{asked.heads}" if asked.heads == asked.kv_heads else f"{asked.heads}:{asked.kv_heads}"
    tokens = f"{asked.seq_len:,} tokens" if asked.q_len is None else f"{asked.q_len} queries on {asked.seq_len:,} keys"
    mask = (
        Band.of(bool(asked.causal), asked.window or (-1, -1)).describe()
        if row["mask"] is None
        else f"mask {row['mask']}"
    )
    work = [f"batch {asked.batch}", tokens, f"{heads} heads of {asked.head_dim}", mask, asked.dtype]
    work += [f"{column.title} {text}" for column in BEYOND if (text := column.text(row))]
    how = [f"{asked.world_size} rank{'' if asked.world_size == 1 else 's'}", asked.mode]
    how += (
        [f"{asked.timing.method}: {timing.warmup_iterations} to warm up, {timing.passes['forward'].n} samples"]
        if timing
        else []
    )
    where = f"on {result.environment.gpu or 'the CPU'}"
    who = [
        asked.model,
        " ".join(filter(None, [asked.attention, row["options"]])),
        row["kernel"],
        row["transport"],
        where,
    ]
    return "; ".join(", ".join(str(text) for text in texts if text) for texts in (who, work, how))


def verdict(result: Result) -> Iterator[str]:
    """How long the last pass takes, against one rank and against the limit of this machine, in a sentence."""
    if not result.passes or not result.metrics:
        return
    which, times = list(result.passes.items())[-1]
    found = result.metrics.passes[which]
    parts = [f"{which} {times.text} ms ± {times.iqr_over_median / 2:.1%}"]
    if result.gain and result.baseline:
        against = "dense attention" if result.baseline.kind == "dense" else "one rank"
        parts.append(f"{result.gain[0]:.2f}× {against}")
    if found.sol:
        parts.append(
            f"{found.sol:.0%} of this machine's limit ({LIMITS.get(found.limited_by or '', found.limited_by)})"
        )
    yield ", ".join(parts) + ("; noisy" if times.noisy else "") + ("; drifting" if times.trend else "")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        terminal.out.print(escape(line), soft_wrap=True)


def _table(title: str | None, *columns: str) -> Table:
    """An empty table; the first column holds words, the others numbers."""
    table = new_table(title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _choices(chosen: fields.Chosen) -> Iterator[str]:
    """What was used where the run left the choice open, and why."""
    if chosen.why:
        yield f"auto took {chosen.why}"
    for name, reason in chosen.passed_over.items():
        yield f"kernel {chosen.kernel}, not {name}: {reason}"
    if chosen.settings_ms:
        tried = "; ".join(f"{label} {ms:.3f} ms" for label, ms in chosen.settings_ms.items())
        yield f"at its best: {next(iter(chosen.settings_ms))} (tried: {tried})"
    if chosen.note:
        yield f"note: {chosen.note}"


def _mask(result: Result, metrics: fields.Metrics) -> Iterator[str]:
    """A mask by name, and what it leaves of dense attention."""
    named = result.asked.named_mask
    if named is None or metrics.connections is None or metrics.sparsity_ratio is None or metrics.density is None:
        return
    needed, dense = flop(metrics.flops["forward"]), flop(metrics.dense_flops["forward"])
    built = f"; built and cut in {metrics.mask_build_ms:.2f} ms" if metrics.mask_build_ms is not None else ""
    yield (
        f"mask {named.text}: {metrics.connections:,} connections, density {metrics.density:.2%}, {metrics.sparsity_ratio:.1%} "
        f"fewer than dense; forward {needed} of {dense}{built}"
    )


def _model(model: fields.Model, metrics: fields.PassMetrics | None) -> Iterator[str]:
    """The model's size, the use of the hardware, and the loss of its training."""
    used = f"; MFU {metrics.mfu:.1%} of a matrix product's rate here" if metrics and metrics.mfu else ""
    yield f"{model.name}: {model.parameters:,} parameters, {gib(model.parameter_bytes)}{used}"
    if curve := model.loss_curve:
        shown = [curve[i * (len(curve) - 1) // 8] for i in range(9)] if len(curve) > 9 else curve
        yield f"loss over {len(curve)} training steps: {' '.join(f'{loss:.2f}' for loss in shown)}"


def _times(timing: fields.Timing, metrics: fields.Metrics, baseline: fields.Baseline, several: bool) -> None:
    """several: whether there are several ranks; the speedup of one rank means nothing."""
    columns = ("pass", "ms", "IQR", "tokens/s", "TFLOP/s", "of limit", baseline.kind, "speedup", "eff.")
    table = _table("Time, the slowest rank of each iteration", *columns)
    for which, times in timing.passes.items():
        found, single = metrics.passes[which], baseline.passes.get(which)
        known = (several or baseline.kind == "dense") and which in baseline.speedup
        table.add_row(
            which,
            times.text,
            times.spread,
            f"{found.tokens_per_s:,.0f}" if found.tokens_per_s is not None else "",
            f"{found.tflops_per_device:.3g}",
            f"{found.sol:.0%} {(found.limited_by or '')[:4]}" if found.sol else "",
            f"{single:.3f}{'*' if baseline.extrapolated else ''}" if single else "",
            f"{baseline.speedup[which]:.2f}" if known else "",
            f"{baseline.efficiency[which]:.0%}" if known else "",
        )
    show(table)
    _print(_time_notes(timing, metrics, baseline))


def _time_notes(timing: fields.Timing, metrics: fields.Metrics, baseline: fields.Baseline) -> Iterator[str]:
    passes = timing.passes.values()
    noisy = "; ! means noisy, an IQR above 5% of the median" if any(times.noisy for times in passes) else ""
    trend = "; ~ means that samples rose or fell while they were taken" if any(times.trend for times in passes) else ""
    n = timing.passes["forward"].n
    of_what = (
        "mean of all calls, timed together" if timing.method == "simple" else f"median of {n} sample{'s' * (n != 1)}"
    )
    yield f"ms is the {of_what}; TFLOP/s are of one device{noisy}{trend}"
    if timing.overhead_high:
        us, share = timing.overhead_ms * 1e3, timing.overhead_share
        yield f"timing itself takes {us:.1f} us, {share:.1%} of the shortest pass"
    for which, found in metrics.passes.items():
        if found.no_sol:
            yield f"no limit of {which}: {found.no_sol}"
    if timing.no_ci95:
        yield f"no interval: {timing.no_ci95}"
    if baseline.extrapolated:
        yield f"* extrapolated by FLOPs from {baseline.measured_seq_len:,} tokens, which fit one device"
    if baseline.kind == "dense" and baseline.passes:
        yield "dense: dense attention in the mask's direction; eff. is the speedup over the ratio of their FLOPs"
    if baseline.unsupported:
        yield f"no {'dense' if baseline.kind == 'dense' else 'single-device'} baseline: {baseline.unsupported}"


def clocks_text(during: fields.During) -> str | None:
    """The GPUs' clocks while timing, and the reasons that lowered them."""
    ranges = [gpu.sm_mhz for gpu in during.by_device if gpu.sm_mhz]
    if not ranges:
        return None
    reasons = sorted({reason for gpu in during.by_device for reason in gpu.throttle_reasons} - {"gpu_idle"})
    text = f"{min(r.min for r in ranges):,.0f} to {max(r.max for r in ranges):,.0f} MHz"
    return f"{text}, held down by {', '.join(reasons)}" if reasons else text


def energy_text(energy: fields.Energy) -> str:
    """The energy of an iteration over all GPUs, in a line."""
    if energy.joules is None or energy.joules_per_token is None or energy.tflops_per_watt is None:
        return f"no energy: {energy.unavailable}"
    watts = ", ".join(f"{each:.0f}" for each in energy.watts_by_rank)
    return (
        f"energy: {energy.joules:.3g} J an iteration, {energy.joules_per_token:.3g} J a token, {energy.tflops_per_watt:.3g} "
        f"TFLOP/s per W; {watts} W by rank"
    )


def _correctness(found: fields.Correctness) -> None:
    verdict = "[green]passed[/]" if found.passed else "[red]failed[/]"
    columns = ("tensor", "rel L2", "max abs", "worst row", "local call's rel L2", "ratio")
    table = _table(f"Correctness {verdict} (against {found.reference})", *columns)
    for name, t in found.tensors.items():
        errors = (t.rel_l2, t.max_abs, t.worst_row, t.local_rel_l2)
        ratio = f"{t.ratio_to_local:.2f}" if t.ratio_to_local is not None else ""
        table.add_row(name, *("" if error is None else f"{error:.2e}" for error in errors), ratio)
    show(table)
    if found.checked_share < 1:
        _print([f"checked on {found.checked_share:.1%} of the heads: all of them would take too long"])
    if found.lse.checked is False:
        _print([f"the LSE was not checked: {found.lse.why}"])
    if found.timed.passed is None and found.timed.why:
        _print([f"the timed outputs were not checked: {found.timed.why}"])


def phases(result: Result) -> None:
    """Print the phases of each pass: a line, and with phases=table or timing.phase_runs a table."""
    whole = result.config.get("phases") == "table" or bool(result.group("timing").get("phase_runs"))
    for which, found in result.phases.items():
        _phases(which, found, whole)


def _phases(which: str, found: fields.PassPhases, whole: bool) -> None:
    count = f"{found.iterations} eager iteration{'' if found.iterations == 1 else 's'} " if found.iterations else ""
    _print([
        f"Phases of {which}, {count}of their own, on rank {found.rank}: {found.total_ms:.3f} ms, computation "
        f"{found.compute_ms:.3f} ms ({found.compute_share:.0%}), exposed communication "
        f"{found.exposed_communication_ms:.3f} ms ({found.communication_share:.0%}), skew between ranks {found.skew:.0%}"
    ])  # fmt: skip
    if not whole:
        return
    table = _table(None, "phase", "ms", "share", "mean ± deviation", "total ms", "medians by rank, ms")
    for name, phase in found.phases.items():
        share = "overlaps" if not name.startswith(("comp_", "wait_")) or phase.share is None else f"{phase.share:.0%}"
        spread = f"{phase.mean_ms:.3f} ± {phase.deviation_ms:.3f}" if phase.mean_ms is not None else ""
        total = f"{phase.total_ms:.3f}" if phase.total_ms is not None else ""
        by_rank = " ".join(f"{ms:.3f}" for ms in phase.by_rank_ms)
        table.add_row(name, f"{phase.ms or 0:.3f}", share, spread, total, by_rank)
    table.add_row("other", f"{found.other_ms:.3f}", f"{found.other_share:.0%}")
    show(table, words=("medians by rank, ms",))


def run_line(result: Result) -> str:
    """One run of a sweep, in a line."""
    if result.timing is None or not result.timed:
        return escape(f"{result.name}: {result.status}: {result.reason}")
    times = ", ".join(f"{which} {found.text}" for which, found in result.passes.items())
    return f"{result.name}: {result.timing.rounds.unfinished or 'ok'}, {times} ms"


def sweep_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of a sweep's summary: the columns in which they differ, and what was measured."""
    table, columns = new_table(), [column for column in summary.shown(rows) if _is_shown(column, rows)]
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right")
    for entry in rows:
        table.add_row(*(escape(column.text(entry)) for column in columns))
    # never left out: the only time of a run without a backward, and the status of one that failed
    needed = {"forward_ms"} if any(entry["status"] == "ok" and entry["total_ms"] is None for entry in rows) else set()
    needed |= {"status"} if any(entry["status"] != "ok" for entry in rows) else set()
    fewest = sorted(
        (column for column in columns if column.drop and column.key not in needed),
        key=lambda column: column.drop + SWEPT * (not column.measured and differ(rows, column)),
    )
    dropped = show(table, [column.title for column in TABLE if column.wrapped], [column.title for column in fewest])
    for remark in summary.remarks(rows):
        terminal.out.print(remark)
    note_dropped(dropped, ": summary.md has them")


def _is_shown(column: Column, rows: list[dict[str, Any]]) -> bool:
    texts = {column.text(entry) for entry in rows}
    return column.swept or column.key in ("attention", "status") or len(rows) == 1 or len(texts) > 1
