"""`python -m runner.predict config=NAME world_size=8,64,512 topology=NAME [attention=...] [seq_len=...]`: the time, exposed
communication and memory of each variant on machines that are not here, by the model of time. Topologies are files of
conf/topology. Other overrides are those of a run.

`python -m runner.predict --validate results/h200-*`: how far the model is from results, worlds of one size by those of smaller ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from attention.errors import nearest
from attention.variants.registry import VARIANTS
from runner.config import overrides
from runner.config.values import InvalidConfig, Refusal, UnsupportedHere, whole
from runner.output import commands, terminal
from runner.predict import topologies, validation
from runner.predict.estimates import Row, experiment, rows
from runner.predict.topologies import Cluster

USUAL = {"world_size": "8,64,512,1024", "topology": "h200_nvl8_ib400"}
OWN = ("world_size", "topology", "attention", "seq_len")  # keys with several values here


Cell = Callable[[Row], str]


def _time(name: str) -> Cell:
    return lambda row: "" if (ms := getattr(row, name)) is None else f"{ms:.4g}"


# by title; a row without times has cells in those of `ALWAYS` alone
COLUMNS: dict[str, Cell] = {
    "W": lambda row: str(row.world_size),
    "S": lambda row: f"{row.seq_len:,}",
    "variant": lambda row: row.variant,
    "ms": _time("ms"),
    "forward": _time("forward_ms"),
    "backward": _time("backward_ms"),
    "exposed": _time("exposed_ms"),
    "TFLOP/s": lambda row: f"{row.tflops_per_device or 0:.3g}",
    "peak": lambda row: terminal.gib(row.peak_bytes or 0),
    "bound by": lambda row: row.bound,
    "options or why not": lambda row: row.why or ", ".join(filter(None, [row.options, row.kernel, row.transport])),
}
WORDS = ("options or why not",)
ALWAYS = ("W", "S", "variant", *WORDS)
DROP = ("peak", "TFLOP/s", "bound by")


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = commands.parser("runner.predict", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--every", action="store_true", help="every candidate of a variant, not only its best options")
    parser.add_argument("--validate", nargs="+", type=Path, metavar="DIR", help="folders of results")
    parser.add_argument("--write", action="store_true", help="with --validate: predictions state and use these errors")
    asked = parser.parse_args(arguments)
    status = 0
    if asked.validate:
        from runner.report import runs

        outcome = validation.validate(runs.read(asked.validate))
        value: Any = asdict(outcome)
        if asked.format == "table":
            print(outcome.markdown)
        if asked.write:
            validation.STORED.write_text(json.dumps(value, indent=1) + "\n")
            terminal.err.print(f"written: {validation.STORED}")
    else:
        predictions, cluster = predicted(asked.overrides, asked.every)
        note = error_text(cluster, {row.called for row in predictions})
        value = {"error": note, "rows": [asdict(row) for row in predictions]}
        if asked.format == "table":
            _show(predictions, f"Predicted: {' '.join(asked.overrides)}; ms of the slowest rank")
            terminal.out.print(note, soft_wrap=True)
        status = int(all(row.ms is None for row in predictions))
    if asked.format == "json":
        print(json.dumps(value, indent=1))
    return status


def predicted(given: Sequence[str], every: bool = False) -> tuple[list[Row], Cluster]:
    """The rows of all world sizes and lengths, and the machines. Raises Refusal for overrides that are refused."""
    if not given:
        raise Refusal("nothing to predict: give a workload, as in config=llama3_8b seq_len=131072 world_size=8,64")
    own, rest = dict(USUAL), []
    for text in given:
        key, sign, value = text.partition("=")
        if key.startswith("attention."):
            raise Refusal(f"{text}: options are candidates here; leave it out, and give --every to see all of them")
        if key in OWN and sign:
            own[key] = value
        else:
            rest.append(text)
    cluster = topologies.named(own["topology"])
    variants = own["attention"].split(",") if "attention" in own else []
    for name in variants:
        if name not in VARIANTS:
            raise Refusal(f"attention={name}: not a variant that the model knows; {nearest(name, VARIANTS)}")
    (job,) = overrides.jobs(["hardware=cuda", "attention=auto", *rest], multirun=False)
    cfg = overrides.composed(job)
    by = dict(validation.stored().factors)
    predictions: list[Row] = []
    for world, length in product(_numbers("world_size", own), _numbers("seq_len", own) or [None]):
        assert world is not None
        try:
            predictions += rows(experiment(cfg, world, length), cluster, variants, by, every)
        except (InvalidConfig, UnsupportedHere) as error:
            predictions.append(Row(world, length or 0, "all", why=str(error)))
    if all(row.variant == "all" for row in predictions):
        raise Refusal(predictions[0].why)
    return predictions, cluster


def _numbers(key: str, own: dict[str, str]) -> list[int | None]:
    texts = own[key].split(",") if key in own else []
    return [whole(key, int(text) if text.isdecimal() else text) for text in texts]


def error_text(cluster: Cluster, called: Collection[str]) -> str:
    """What is known of the error of predictions of these kinds of call."""
    kept = validation.stored()
    if kept.device != (cluster.gpu or "cpu"):
        return "Error: no result validates this machine."
    text = f"Error where it was measured, {kept.text(called)}. Larger worlds were never measured"
    text += ", nor links between nodes" if cluster.gpus else ""
    return text + (f". The links of {cluster.name} are assumed." if cluster.inside else ".")


def _show(predictions: Sequence[Row], title: str) -> None:
    cells = [[cell(x) if x.ms is not None or y in ALWAYS else "" for y, cell in COLUMNS.items()] for x in predictions]
    terminal.print_rows(title, [*COLUMNS], cells, ("variant", "bound by", *WORDS), WORDS, DROP)
