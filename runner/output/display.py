"""What a user sees: progress while a run works, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.markup import escape
from rich.status import Status

from runner.output import columns, summary, terminal
from runner.output.columns import TABLE, Column, differ
from runner.output.terminal import err as err
from runner.output.terminal import flop, gib, print_rows, seconds
from runner.output.terminal import out as out
from runner.record import fields
from runner.record.fields import digits
from runner.record.result import Result

LIMITS = {"compute": "matrix products", "memory": "memory", "communication": "links"}
SWEPT = 10  # so much later a narrow terminal leaves out what the runs differ in
LONG_S = 60.0  # a run expected to take longer is announced
MEAN = "mean of all calls, timed together"  # what timing=simple gives


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
        counts = f" ({text})" if (text := self.counts()) else ""
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
        phases = ", ".join(dict.fromkeys(state["phase"] for state in states))
        note = f" ({first['note']})" if first.get("note") else ""
        self.status.update(self.text(f"{phases.replace('_', ' ')}{note}"))
        estimate = first.get("estimate_s", 0)
        if estimate > LONG_S and not self.warned:
            self.warned = True
            terminal.err.print(
                f"{self.title}: {flop(self.flops)} an iteration, about {seconds(estimate)} in all at the rate measured "
                "here, the correctness check not counted; going on"
            )


def run_table(result: Result) -> None:
    """Print one run in full: what ran, how well, then errors, times and memory."""
    _print([what_ran(result), *verdict(result), *(_choices(result.chosen) if result.chosen else ())])
    if result.correctness and result.correctness.tensors:
        _correctness(result.correctness)
    if not result.timing or not result.metrics or not result.memory:
        _print([result.reason] if result.status == "ok" and result.reason else [])
        return
    _print(_mask(result, result.metrics))
    _times(result, result.timing, result.metrics)
    _print(_after_times(result))
    phases(result)
    peaks = [
        gib(rank.peak_resident or 0)
        if rank.peak_allocated is None
        else f"{gib(rank.peak_allocated)} ({gib(rank.peak_reserved or 0)} reserved)"
        for rank in result.memory.by_rank
    ]
    _print([f"Peak memory by rank: {', '.join(peaks)}; inputs {gib(result.memory.by_rank[0].inputs)} a rank"])
    _print(
        f"profile, rank {rank}, an iteration: compute {times.compute_ms:.3f} ms, communication "
        f"{times.communication_ms:.3f} ms, exposed (with waiting for other ranks) {times.exposed_communication_ms:.3f} ms, "
        f"idle {times.idle_ms:.3f} ms"
        for rank, times in enumerate(result.profile)
    )


def what_ran(result: Result) -> str:
    """Variant, kernel, transport, device, workload, ranks and timing, in a line."""
    row, asked, timing = columns.row(result), result.asked, result.timing
    heads = f"{asked.heads}" if asked.heads == asked.kv_heads else f"{asked.heads}:{asked.kv_heads}"
    tokens = f"{asked.seq_len:,} tokens" if asked.q_len is None else f"{asked.q_len} queries on {asked.seq_len:,} keys"
    mask = f"{'mask ' if row['mask'] else ''}{columns.mask_text(asked, asked.named_mask)}"
    work = [f"batch {asked.batch}", tokens, f"{heads} heads of {asked.head_dim}", mask, asked.dtype]
    work += columns.features(row)
    how = [f"{asked.world_size} rank{'' if asked.world_size == 1 else 's'}", asked.mode]
    if timing:
        samples = f"{timing.warmup_iterations} to warm up, {timing.passes['forward'].n} samples"
        how.append(f"{timing.method}: {MEAN if timing.method == 'simple' else samples}")
    variant = " ".join(filter(None, [asked.attention, row["options"]]))
    who = [asked.model, variant, row["kernel"], row["transport"], f"on {result.environment.gpu or 'the CPU'}"]
    return "; ".join(", ".join(filter(None, texts)) for texts in (who, work, how))


def verdict(result: Result) -> Iterator[str]:
    """How long the last pass takes, against one rank and against the limit of this machine, in a sentence."""
    metrics = result.last_metrics
    if not metrics:
        return
    which, times = list(result.passes.items())[-1]
    spread = f" ± {times.iqr_over_median / 2:.1%}" if times.n > 1 else ""
    parts = [f"{which} {digits(times.median, times.noisy)} ms{spread}"]
    if result.gain and result.baseline:
        against = "dense attention" if result.baseline.kind == "dense" else "one rank"
        parts.append(f"{_marked(result.gain[0], result, which)}× {against}")
    if metrics.sol:
        limit = LIMITS.get(metrics.limited_by or "", metrics.limited_by)
        parts.append(f"{metrics.sol:.0%} of this machine's limit ({limit})")
    yield ", ".join(parts) + ("; noisy" if times.noisy else "") + ("; drifting" if times.trend else "")


def _marked(gain: float, result: Result, which: str) -> str:
    """A speedup of a pass, with `!` where its time or the baseline's is noisy."""
    noisy = result.passes[which].noisy or (result.baseline is not None and result.baseline.noisy(which))
    return f"{gain:.1f}!" if noisy else f"{gain:.2f}"


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        terminal.out.print(escape(line), soft_wrap=True)


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
    flops = f"forward {flop(metrics.flops['forward'])} of {flop(metrics.dense_flops['forward'])}"
    yield (
        f"mask {columns.mask_text(result.asked, named)}: {metrics.connections:,} connections, density {metrics.density:.2%}, {metrics.sparsity_ratio:.1%} "
        f"fewer than dense; {flops}"
    )


def _times(result: Result, timing: fields.Timing, metrics: fields.Metrics) -> None:
    base = result.baseline
    titles = (
        "pass",
        "ms",
        "IQR",
        "tokens/s",
        "TFLOP/s",
        "of limit",
        base.kind if base else "single",
        "speedup",
        "eff.",
    )
    rows = []
    for which, times in timing.passes.items():
        rates, gain = metrics.passes[which], ["", "", ""]
        if base and which in base.passes:
            single = digits(base.passes[which], base.noisy(which))
            gain[0] = f"{single}{'!' * base.noisy(which)}{'*' * base.extrapolated}"
            if result.gain:  # of one rank it means nothing
                gain[1:] = _marked(base.speedup[which], result, which), f"{base.efficiency[which]:.0%}"
        rows.append(
            [
                which,
                digits(times.median, times.noisy),
                times.spread,
                f"{rates.tokens_per_s:,.0f}" if rates.tokens_per_s is not None else "",
                f"{rates.tflops_per_device:.3g}",
                f"{rates.sol:.0%} {(rates.limited_by or '')[:4]}" if rates.sol else "",
                *gain,
            ]
        )
    print_rows("Time, the slowest rank of each iteration", titles, rows, ("pass",))
    _print(_time_notes(timing, metrics, base))


def _time_notes(timing: fields.Timing, metrics: fields.Metrics, baseline: fields.Baseline | None) -> Iterator[str]:
    passes, n = timing.passes.values(), timing.passes["forward"].n
    noisy = any(times.noisy for times in passes) or (baseline and any(map(baseline.noisy, baseline.passes)))
    marks = "; ! means noisy, an IQR above 5% of the median" if noisy else ""
    if any(times.trend for times in passes):
        marks += "; ~ means that samples rose or fell while they were taken"
    samples = f"median of {n} sample{'s' * (n != 1)}"
    of_what = MEAN if timing.method == "simple" else samples
    yield f"ms is the {of_what}; TFLOP/s are of one device{marks}"
    if timing.overhead_high:
        yield f"timing itself takes {timing.overhead_ms * 1e3:.1f} us, {timing.overhead_share:.1%} of the shortest pass"
    yield from (f"no limit of {which}: {rates.no_sol}" for which, rates in metrics.passes.items() if rates.no_sol)
    if timing.no_ci95:
        yield f"no interval: {timing.no_ci95}"
    if baseline is None:
        return
    dense = baseline.kind == "dense"
    if baseline.extrapolated:
        yield f"* extrapolated by FLOPs from {baseline.measured_seq_len:,} tokens, which fit one device"
    if dense and baseline.passes:
        yield "dense: dense attention in the mask's direction; eff. is the speedup over the ratio of their FLOPs"
    if baseline.unsupported:
        yield f"no {'dense' if dense else 'single-device'} baseline: {baseline.unsupported}"


def _after_times(result: Result) -> Iterator[str]:
    """The model's size, its use of the hardware and the loss of its training; clocks, energy and the commit."""
    if model := result.model:
        mfu = result.last_metrics and result.last_metrics.mfu
        used = f"; MFU {mfu:.1%} of a matrix product's rate here" if mfu else ""
        yield f"{model.name}: {model.parameters:,} parameters, {gib(model.parameter_bytes)}{used}"
        if curve := model.loss_curve:
            losses = [curve[i * (len(curve) - 1) // 8] for i in range(9)] if len(curve) > 9 else curve
            yield f"loss over {len(curve)} training steps: {' '.join(f'{loss:.2f}' for loss in losses)}"
    gpus = [gpu for gpu in result.environment.during.by_device if gpu.sm_mhz]
    if ranges := [gpu.sm_mhz for gpu in gpus if gpu.sm_mhz]:
        reasons = ", ".join(sorted({reason for gpu in gpus for reason in gpu.throttle_reasons} - {"gpu_idle"}))
        clocks = f"{min(r.min for r in ranges):,.0f} to {max(r.max for r in ranges):,.0f} MHz"
        yield f"clocks while timing: {clocks}{', held down by ' * bool(reasons)}{reasons}"
    if energy := result.energy:
        watts = ", ".join(f"{watts:.0f}" for watts in energy.watts_by_rank)
        yield (
            f"no energy: {energy.unavailable}"
            if energy.joules is None
            else (
                f"energy: {energy.joules:.3g} J an iteration, {energy.joules_per_token or 0:.3g} J a token, "
                f"{energy.tflops_per_watt or 0:.3g} TFLOP/s per W; {watts} W by rank"
            )
        )
    yield result.environment.commit


def _correctness(check: fields.Correctness) -> None:
    verdict = "[green]passed[/]" if check.passed else "[red]failed[/]"
    titles = ("tensor", "rel L2", "max abs", "worst row", "local call's rel L2", "ratio")
    rows = []
    for name, t in check.tensors.items():
        errors = (t.rel_l2, t.max_abs, t.worst_row, t.local_rel_l2)
        ratio = f"{t.ratio_to_local:.2f}" if t.ratio_to_local is not None else ""
        rows.append([name, *("" if error is None else f"{error:.2e}" for error in errors), ratio])
    print_rows(f"Correctness {verdict} (against {check.reference})", titles, rows, ("tensor",))
    if check.checked_share < 1:
        _print([f"checked on {check.checked_share:.1%} of the heads: all of them would take too long"])
    if check.lse.checked is False:
        _print([f"the LSE was not checked: {check.lse.why}"])
    if check.timed.passed is None and check.timed.why:
        _print([f"the timed outputs were not checked: {check.timed.why}"])


def phases(result: Result) -> None:
    """Print the phases of each pass: a line, and with phases=table or timing.phase_runs a table."""
    whole = result.config.get("phases") == "table" or bool(result.group("timing").get("phase_runs"))
    for which, parts in result.phases.items():
        count = f"{parts.iterations} eager iteration{'s' * (parts.iterations != 1)} " if parts.iterations else ""
        _print([
            f"Phases of {which}, {count}of their own, on rank {parts.rank}: {parts.total_ms:.3f} ms, computation "
            f"{parts.compute_ms:.3f} ms ({parts.compute_share:.0%}), exposed communication "
            f"{parts.exposed_communication_ms:.3f} ms ({parts.communication_share:.0%}), skew between ranks {parts.skew:.0%}"
        ])  # fmt: skip
        if not whole:
            continue
        rows = []
        for name, phase in parts.phases.items():
            overlaps = not name.startswith(("comp_", "wait_")) or phase.share is None
            spread = f"{phase.mean_ms:.3f} ± {phase.deviation_ms:.3f}" if phase.mean_ms is not None else ""
            total = f"{phase.total_ms:.3f}" if phase.total_ms is not None else ""
            by_rank = " ".join(f"{ms:.3f}" for ms in phase.by_rank_ms)
            share = "overlaps" if overlaps else f"{phase.share:.0%}"
            rows.append([name, f"{phase.ms or 0:.3f}", share, spread, total, by_rank])
        rows.append(["other", f"{parts.other_ms:.3f}", f"{parts.other_share:.0%}", "", "", ""])
        titles = ("phase", "ms", "share", "mean ± deviation", "total ms", "medians by rank, ms")
        print_rows(None, titles, rows, ("phase",), titles[-1:])


def run_line(result: Result) -> str:
    """One run of a sweep, in a line."""
    if result.timing is None or not result.timed:
        return escape(f"{result.name}: {result.status}: {result.reason}")
    times = ", ".join(f"{which} {times.text}" for which, times in result.passes.items())
    rounds = result.timing.rounds.text
    return f"{result.name}: {f'round {rounds}' if rounds else 'ok'}, {times} ms"


def sweep_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of a sweep's summary: the columns in which they differ, and what was measured."""
    columns = [column for column in summary.shown(rows) if _is_shown(column, rows)]
    # never left out: the only time of a run without a backward, and the status of one that failed
    needed = {"status", *(["forward_ms"] if any(not entry["total_ms"] for entry in rows) else [])}
    fewest = sorted(
        (column for column in columns if column.drop and column.key not in needed),
        key=lambda column: column.drop + SWEPT * (not column.measured and differ(rows, column)),
    )
    print_rows(
        None,
        [column.title for column in columns],
        [[column.text(entry) for column in columns] for entry in rows],
        [column.title for column in TABLE if column.left],
        [column.title for column in TABLE if column.wrapped],
        [column.title for column in fewest],
        notes=summary.remarks(rows),
        elsewhere="summary.md has them",
    )


def _is_shown(column: Column, rows: list[dict[str, Any]]) -> bool:
    texts = {column.text(entry) for entry in rows}
    failed = column.key == "status" and texts != {"ok"}
    return column.swept or column.key == "attention" or failed or len(rows) == 1 or len(texts) > 1
