"""`python -m runner.predict config=NAME world_size=8,64,512 topology=NAME [attention=...] [seq_len=...]`: the time, exposed
communication and memory of each variant on machines that are not here, by the model of time. Topologies are files of
conf/topology. Other overrides are those of a run.

`python -m runner.predict --validate results/h200-*`: how far the model is from results, worlds of one size by those of smaller ones."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from hydra import compose, initialize_config_module

from attention.errors import nearest
from attention.variants.registry import VARIANTS
from runner.config import overrides, resolve
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.output import commands, terminal
from runner.predict import topologies, validation
from runner.predict.estimates import Row, rows, spec_of
from runner.predict.topologies import Cluster

FORMATS = ("table", "json", "md")
COLUMNS = (
    "W",
    "S",
    "variant",
    "ms",
    "forward",
    "backward",
    "exposed",
    "TFLOP/s",
    "peak",
    "bound by",
    "options or why not",
)
WORDS = ("options or why not",)
DROP = ("peak", "TFLOP/s", "bound by")
USUAL = {"world_size": "8,64,512,1024", "topology": "h200_nvl8_ib400"}
OWN = ("world_size", "topology", "attention", "seq_len")  # keys with several values here


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    made = commands.parser("runner.predict", __doc__)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    made.add_argument("--format", choices=FORMATS, default="table")
    made.add_argument("--every", action="store_true", help="every candidate of a variant, not only its best options")
    made.add_argument("--validate", nargs="+", type=Path, metavar="DIR", help="folders of results")
    made.add_argument("--write", action="store_true", help="with --validate: predictions state and use these errors")
    asked = made.parse_args(arguments)
    if asked.validate:
        return _validate(asked)
    found, cluster = predicted(asked.overrides, asked.every)
    note = error_text(cluster, {row.called for row in found})
    print(rendered(found, asked.format, note), end="") if asked.format != "table" else _show(
        found, note, asked.overrides
    )
    return 0 if any(row.ms is not None for row in found) else 1


def predicted(given: Sequence[str], every: bool = False) -> tuple[list[Row], Cluster]:
    """The rows of all world sizes and lengths, and the machines. Raises ValueError for overrides that are refused."""
    own, rest = _split(given)
    cluster = topologies.named(own["topology"][0])
    if len(own["topology"]) > 1:
        raise ValueError(f"topology={','.join(own['topology'])}: several; give one")
    variants = own.get("attention", [])
    for name in variants:
        if name not in VARIANTS:
            raise ValueError(f"attention={name}: not a variant that the model knows; {nearest(name, VARIANTS)}")
    resolve.register()
    if reason := overrides.problem(rest):
        raise ValueError(reason)
    with initialize_config_module("runner.conf", version_base="1.3"):
        cfg = compose("config", overrides=["hardware=cuda", "attention=auto", *rest])
    kept = validation.stored()
    by = dict(kept.factors) if kept else {}
    lengths: list[int | None] = [_whole("seq_len", text) for text in own.get("seq_len", [])] or [None]
    found: list[Row] = []
    for world in (_whole("world_size", text) for text in own["world_size"]):
        for length in lengths:
            try:
                found += rows(spec_of(cfg, world, length), cluster, variants, by, every)
            except (InvalidConfig, UnsupportedHere) as error:
                found.append(Row(world, length or 0, "all", why=str(error)))
    if found and all(row.variant == "all" for row in found):
        raise ValueError(found[0].why)
    return found, cluster


def _split(given: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the keys in `OWN`, and the other overrides."""
    own = {key: value.split(",") for key, value in USUAL.items()}
    rest = []
    for text in given:
        key, sign, value = text.partition("=")
        if key in OWN and sign:
            own[key] = [part for part in value.split(",") if part]
        elif key.startswith("attention."):
            raise ValueError(f"{text}: options are candidates here; leave it out, and give --every to see all of them")
        else:
            rest.append(text)
    return own, rest


def _whole(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{key}={text}: must be a whole number above 0")
    return int(text)


def error_text(cluster: Cluster, called: Collection[str]) -> str:
    """What is known of the error of predictions of these kinds of call."""
    kept = validation.stored()
    if kept is None or kept.device != (cluster.gpu or "cpu"):
        return "Error: no result validates this machine."
    text = f"Error where it was measured, {kept.text(called)}. Larger worlds were never measured"
    text += ", nor links between nodes" if cluster.gpus else ""
    return text + (f". The links of {cluster.name} are assumed." if cluster.inside else ".")


def _cells(row: Row) -> list[str]:
    if row.ms is None:
        return [str(row.world_size), f"{row.seq_len:,}", row.variant, *[""] * 7, row.why]
    times = (row.ms, row.forward_ms, row.backward_ms, row.exposed_ms)
    return [
        str(row.world_size), f"{row.seq_len:,}", row.variant, *("" if ms is None else f"{ms:.4g}" for ms in times),
        f"{row.tflops_per_device:.3g}", terminal.gib(row.peak_bytes or 0), row.bound,
        ", ".join(filter(None, [row.options, row.kernel, row.transport])),
    ]  # fmt: skip


def _show(found: Sequence[Row], note: str, given: Sequence[str]) -> None:
    table = terminal.new_table(f"Predicted: {' '.join(given)}; ms of the slowest rank")
    for title in COLUMNS:
        table.add_column(title, justify="left" if title in ("variant", "bound by", *WORDS) else "right")
    for row in found:
        table.add_row(*_cells(row))
    terminal.note_dropped(terminal.show(table, WORDS, DROP), ": a wider terminal, or COLUMNS=200, shows them")
    terminal.out.print(note, soft_wrap=True)


def rendered(found: Sequence[Row], kind: str, note: str) -> str:
    """The rows as json or md."""
    if kind == "json":
        return json.dumps({"error": note, "rows": [row.plain() for row in found]}, indent=1) + "\n"
    rows = ([cell.replace("|", r"\|") for cell in _cells(row)] for row in found)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def _validate(asked: Namespace) -> int:
    from runner.report import runs

    found = validation.validate(runs.read(asked.validate))
    if asked.format == "json":
        print(json.dumps(asdict(found), indent=1))
    else:
        print(validation_table(found), end="")
    if asked.write:
        validation.write(found)
        terminal.err.print(f"written: {validation.STORED}")
    return 0


def validation_table(found: validation.Validation) -> str:
    """Markdown."""
    worlds = " and ".join(map(str, found.calibrated_on))
    lines = [
        f"{found.device}: calibrated on {worlds} ranks, predicted {found.predicted}. Shares of the measured time.\n",
        "| call | bound by | passes | median | p90 | worst |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for each in found.errors:
        bound = "CPU launch overhead" if each.launch_bound else "GPU"
        lines.append(
            f"| {each.called} | {bound} | {each.passes} | {each.median:.1%} | {each.p90:.1%} | {each.worst:.0%} |"
        )
    return "\n".join(lines) + "\n"
