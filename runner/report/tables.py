"""The tables of a report, as cells of text: the runs, each way to do a workload beside the others, the environment."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attention.autotune.model import AUTO
from runner import environment
from runner.measure.statistics import OVERHEAD
from runner.output import display
from runner.output.record import STATUSES, Environment
from runner.output.results import escaped, markdown_row
from runner.report.fair import MIXED, mixed, mixed_note, noise, ratio
from runner.report.runs import (
    BACK_TO_BACK,
    FACTS,
    WORKLOAD,
    Run,
    each_over_several_kernels,
    labels,
    options_text,
    rate,
    scaling,
    sortable,
    varying_options,
)

PASSES = ("forward", "backward", "total")
COMPARED = (*PASSES, BACK_TO_BACK)
LATE = 0.05  # a step's share from which it says something that samples, which the ranks begin together, are not the rate back to back
BEST = "**{}**"
RATIO = "fastest external / {}"
NOISY = "`!`: noisy, the interquartile range is above 5% of the median."


@dataclass
class Table:
    """Cells are plain text, but for **bold**. `left` are the titles of the columns that hold words; `notes` stand below."""

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
        def cell(tag: str, title: str, text: str) -> str:
            bold = text.startswith("**") and text.endswith("**")
            said = html.escape(text.strip("*") if bold else text)
            kinds = ["words"] * (title in self.left) + ["failed"] * (text in STATUSES[1:])
            of = f' class="{" ".join(kinds)}"' if kinds else ""
            return f"<{tag}{of}>{f'<b>{said}</b>' if bold else said}</{tag}>"

        head = "".join(cell("th", title, title) for title in self.titles)
        rows = ["".join(cell("td", *pair) for pair in zip(self.titles, row, strict=True)) for row in self.rows]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(f"<p>{html.escape(note).replace('`', '')}</p>" for note in self.notes)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{notes}'


def digits(value: float | None) -> str:
    """Four of them, or three below 1: no timing here is better than that."""
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 99.995 else f"{value:.2f}" if value >= 9.9995 else f"{value:.3f}"


def fact(run: Run, key: str, varying: set[tuple[str, str]]) -> str:
    if key == "options":
        return options_text(run, varying)
    value = run.facts[key]
    if value is None:
        return ""
    if key == "attention" and run.facts["took"]:
        return f"{value}: {run.facts['took']}"
    if key == "graphs":
        return str(value).lower() if value else ""
    if key == "mode":
        return str(value).replace("_", " and ")
    return f"{value:,}" if key in ("seq_len", "q_len") and isinstance(value, int) else str(value)


def differing(runs: Sequence[Run]) -> list[str]:
    """The facts that are not the same of all runs, those that do not say left aside."""
    varying = varying_options(runs)
    empty_too = ("options", "pack", "graphs")  # where nothing is something, too
    seen = {key: {fact(run, key, varying) for run in runs} for key in FACTS}
    found = [key for key in FACTS if len(seen[key] - (set() if key in empty_too else {""})) > 1]
    return found or ["attention"]


def same(runs: Sequence[Run]) -> str:
    """What all runs have in common, beside the machine, in a line."""
    shown, (first, *_) = set(differing(runs)), runs
    phrases: dict[str, str] = {
        "world_size": "world size {}", "batch": "batch {}", "seq_len": "S = {}", "q_len": "q_len = {}",
        "heads": "{} heads (query:KV)", "head_dim": "D = {}", "mask": "{}", "pack": "a pack of {}", "dtype": "{}",
        "mode": "{}", "kernel": "kernel {}", "transport": "transport {}", "graphs": "graphs={}", "timing": "timing {}",
    }  # fmt: skip
    said = []
    for key, phrase in phrases.items():
        value = next((text for run in runs if (text := fact(run, key, set()))), "")
        if key not in shown and value:
            said.append(phrase.format(value))
    if "attention" not in shown:
        said.insert(0, f"attention {first.facts['attention']}")
    counts = {run.passes["forward"].n for run in runs if run.ok}
    return ", ".join(said) + (f" of {counts.pop()} samples" if len(counts) == 1 and "timing" not in shown else "")


def runs_table(runs: Sequence[Run]) -> Table:
    """A row a run: what differs between them, and what was measured."""
    varying, against = varying_options(runs), scaling(runs)
    columns: list[tuple[str, Callable[[Run], str]]] = []
    for key in differing(runs):
        columns.append((FACTS[key], lambda run, key=key: fact(run, key, varying)))  # type: ignore[misc]
    columns.append(("status", lambda run: "" if run.ok else run.row["status"]))
    columns.append(("rounds", lambda run: run.row["rounds"] or ""))
    for which in PASSES:
        columns.append((f"{which} ms (IQR)", lambda run, which=which: _spread(run, which)))  # type: ignore[misc]
    if any(_late(run) for run in runs):
        columns.append(("back to back ms", lambda run: digits(run.back_to_back)))
    columns += [
        (rate(runs), _rate),
        ("speedup", lambda run: f"{against[run].speedup:.2f}{against[run].mark}" if run in against else ""),
        ("efficiency", lambda run: f"{against[run].efficiency:.0%}{against[run].mark}" if run in against else ""),
        ("exposed comm. forward ms", lambda run: _exposed(run, "forward")),
        ("exposed comm. backward ms", lambda run: _exposed(run, "backward")),
        ("peak memory a rank", lambda run: display.gib(run.row["peak_bytes"]) if run.ok else ""),
        ("forward ms against do_bench's", lambda run: _do_bench(run, "forward")),
        ("backward ms against do_bench's", lambda run: _do_bench(run, "backward")),
    ]
    filled = [(title, [value(run) for run in runs]) for title, value in columns]
    filled = [(title, cells) for title, cells in filled if any(cells)]  # no column without a word in it
    titles = [title for title, _ in filled]
    left = {
        FACTS[key]
        for key in ("attention", "options", "mask", "pack", "mode", "kernel", "transport", "graphs", "timing")
    } | {"status"}
    rows = [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]
    return Table(titles, rows, left, _notes(runs, {found.mark for found in against.values()}))


def _spread(run: Run, which: str) -> str:
    found = run.passes.get(which)
    if not run.ok or not found:
        return ""
    if found.n == 1:  # a mean of many calls, without a spread
        return digits(found.median)
    return (
        f"{digits(found.median)} ({found.iqr_over_median:.1%}{'!' if found.noisy else ''}{'~' if found.trend else ''})"
    )


def _late(run: Run) -> bool:
    step, rate = run.ms("total"), run.back_to_back
    return step is not None and rate is not None and abs(rate - step) > LATE * step


def _rate(run: Run) -> str:
    found = run.row["tflops_per_device"]
    return f"{found:.3g}" if found is not None and found < 0.1 else digits(found)


def _exposed(run: Run, which: str) -> str:
    return digits(run.row[f"exposed_{which}_ms"]) if run.ok and run.facts["world_size"] > 1 else ""


def _do_bench(run: Run, which: str) -> str:
    found = run.result.timing.do_bench.get(which) if run.result.timing else None
    return f"{digits(found.ours_ms)} against {digits(found.do_bench_ms)}" if found else ""


def _notes(runs: Sequence[Run], marks: set[str]) -> list[str]:
    notes = []
    if any(found.noisy for run in runs for found in run.passes.values()):
        notes.append(NOISY)
    if any(found.trend for run in runs for found in run.passes.values()):
        notes.append("`~`: the samples rose or fell while they were taken, by more than 2% between their halves.")
    shares = [timing.overhead_share for run in runs if (timing := run.result.timing)]
    if high := [share for share in shares if share > OVERHEAD]:
        notes.append(
            f"Timing itself takes above 1% of the shortest pass in {_count(len(high), 'run')}, {max(high):.1%} at most."
        )
    if lacking := sum(bool(run.row["rounds"]) for run in runs):
        notes.append(
            f"{_count(lacking, 'run')} without all rounds (`rounds`), so of fewer samples: the sweep was interrupted."
        )
    if "*" in marks:
        notes.append("`*`: the single device's time is extrapolated by FLOPs from a shorter sequence that fits.")
    if "†" in marks:
        notes.append(
            "`†`: against the fastest of these runs on one device, of the same workload or of as many tokens a rank."
        )
    return notes + failures(runs)


def failures(runs: Sequence[Run]) -> list[str]:
    """A line for every reason why runs are not ok."""
    named = labels(runs)
    by_reason: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if not run.ok:
            by_reason.setdefault((run.row["status"], run.row["reason"] or "without a reason"), []).append(run)
    lines = []
    for (status, reason), failed in by_reason.items():
        who = dict.fromkeys(named[run] if run.facts["attention"] else run.row["name"] for run in failed)
        lines.append(f"- {status}, {', '.join(who)} ({_count(len(failed), 'run')}): {' '.join(str(reason).split())}")
    return ["\n".join(lines)] if lines else []


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def comparable(runs: Sequence[Run]) -> list[Run]:
    """Those that say which workload they are."""
    return [run for run in runs if run.facts["attention"] and run.facts["seq_len"]]


def comparison_table(runs: Sequence[Run], which: str = "total") -> Table:
    """A row a workload, a column a way to do it, in ms of what is `COMPARED`; the best of a row in bold. Variants that are each over
    several local kernels have a row a kernel. Where there are external packages, the ratio of the fastest of theirs to `auto`, or
    without it to the fastest of ours; none in a row of several commits or machines."""
    runs = comparable(runs)
    by_kernel = each_over_several_kernels(runs)
    named = labels(runs, without={"asked_kernel"} if by_kernel else ())
    key = (*WORKLOAD, "asked_kernel") if by_kernel else WORKLOAD

    def of(run: Run) -> tuple[Any, ...]:
        return tuple(run.facts[name] for name in key)

    columns = sorted(
        dict.fromkeys(named.values()), key=lambda label: any(run.peer for run in runs if named[run] == label)
    )
    works = sorted({of(run) for run in runs}, key=lambda work: [sortable(value) for value in work])
    shown = [i for i in range(len(key)) if len({work[i] for work in works}) > 1]
    shown = shown or [WORKLOAD.index("seq_len")]
    both = any(run.peer for run in runs) and not all(run.peer for run in runs)
    ours = _ours(runs)
    titles = [FACTS[key[i].removeprefix("asked_")] for i in shown] + columns + ([RATIO.format(ours)] if both else [])
    rows, used, doubles = [], [], 0
    for work in works:
        cells: dict[str, list[Run]] = {}
        for run in runs:
            if of(run) == work:
                cells.setdefault(named[run], []).append(run)
        doubles += sum(len(found) - 1 for found in cells.values())
        latest = {label: max(found, key=begun) for label, found in cells.items()}
        times = {label: t for label, run in latest.items() if (t := run.ms(which)) is not None}
        best = digits(min(times.values(), default=None))
        used.append([latest[label] for label in times])
        row = [fact(next(r for r in runs if of(r) == work), key[i], set()) for i in shown]
        row[-1] += MIXED if mixed(used[-1]) else ""
        for label in columns:
            text = digits(times.get(label))
            fastest = text and text == best
            if label in latest:
                text = text + noise(latest[label], which) if latest[label].ok else latest[label].row["status"]
            row.append(BEST.format(text) if fastest else text)
        if both:
            row.append("" if mixed(used[-1]) else _ratio({x: latest[x] for x in times}, ours, which))
        rows.append(row)
    left = {FACTS[name] for name in ("mask", "gpu", "mode", "dtype", "pack", "heads", "kernel")}
    notes = [f"Where a run was repeated, its latest: {_count(doubles, 'earlier run')} left out."] if doubles else []
    if any(noise(run, which) for found in used for run in found):
        notes.append(NOISY)
    return Table(titles, rows, left, notes + mixed_note(used))


def _ours(runs: Sequence[Run]) -> str:
    """What external packages are held against: `auto` where it ran, since the best of many columns is a choice made
    afterwards."""
    return AUTO if any(run.facts["attention"] == AUTO for run in runs) else "fastest of ours"


def _ratio(row: Mapping[str, Run], ours: str, which: str) -> str:
    """Of a row's runs by label: the fastest external over ours. Replayed runs are left out, for external packages are launched."""

    def fastest(labels: list[str]) -> str | None:
        return min(labels, key=lambda label: row[label].ms(which) or 0.0, default=None)

    launched = [label for label, run in row.items() if run.facts["graphs"] is False]
    theirs = fastest([label for label in launched if row[label].peer])
    mine = fastest([x for x in launched if not row[x].peer and ours in (row[x].facts["attention"], "fastest of ours")])
    return ratio(row[theirs], row[mine], which, (theirs, mine)) if theirs and mine else ""


def begun(run: Run) -> float:
    return run.environment.started_at


def environment_table(runs: Sequence[Run]) -> Table:
    """Where the runs were made: each fact with all values that it had."""
    asked: dict[str, Callable[[Run], Any]] = {
        "GPU": lambda run: run.facts["gpu"],
        "GPUs of the machine": lambda run: len(run.environment.gpus_before) or None,
        "driver": lambda run: next((gpu.get("driver_version") for gpu in run.environment.gpus_before), None),
        "torch": lambda run: run.environment.torch,
        "CUDA": lambda run: run.environment.cuda,
        "NCCL": lambda run: run.environment.nccl,
        "cuDNN": lambda run: _cudnn(run.environment.cudnn),
        "packages": lambda run: _pairs(run.environment.packages, " "),
        "Python": lambda run: run.environment.python,
        "CPU": lambda run: f"{run.environment.cpu}, {run.environment.cores} cores" if run.environment.cpu else None,
        "machine": lambda run: _machine_id(run.environment),
        "GPU UUIDs": lambda run: ", ".join(run.environment.uuids) or None,
        "platform": lambda run: run.environment.platform,
        "variables": lambda run: _pairs(run.environment.variables, "="),
        "commit": lambda run: environment.commit_text(run.environment.git_plain).removeprefix("commit "),
        "command": lambda run: "python " + " ".join(run.environment.argv) if run.environment.argv else None,
    }  # fmt: skip
    rows = []
    for title, look in asked.items():
        values = dict.fromkeys(str(found) for run in runs if (found := look(run)) is not None)
        rows += [[title, "; ".join(values)]] if values else []
    return Table(["", "of these runs"], rows, {"", "of these runs"})


def _machine_id(environment: Environment) -> str | None:
    """The name of a machine, which several may have, and the hash that only one has."""
    found = [environment.host, environment.machine_id]
    return " ".join(filter(None, found)) or None


def machine(runs: Sequence[Run]) -> str:
    """The machine and its libraries, in a line."""
    found = dict(environment_table(runs).rows)
    gpus = found.get("GPUs of the machine")
    said = [f"{gpus} {found['GPU']}" if gpus and "GPU" in found else found.get("CPU", "")]
    said += [f"{name} {found[name]}" for name in ("torch", "NCCL", "cuDNN") if name in found]
    return ", ".join(filter(None, said))


def _pairs(found: dict[str, Any] | None, sign: str) -> str | None:
    return ", ".join(f"{key}{sign}{value}" for key, value in found.items() if value) if found else None


def _cudnn(number: int | None) -> str | None:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None
