"""`python -m runner.catalog [attention|mask|model|config|kernel|transport|timing|dtype|hardware|experiment]`: the choices of these
groups, or of all: what each is, whether it works on this machine, and if not, why.

`python -m runner.catalog support`: what every variant does with every kernel under every mask: honoured, or refused and why.

`python -m runner.catalog cost config=llama3_70b world_size=64`: the FLOPs, bytes and memory of each variant, before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import resources
from itertools import accumulate
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.markup import escape
from rich.table import Table

from attention.errors import nearest
from attention.geometry import counts
from attention.variants.base import Variant
from attention.variants.registry import AUTO, SHORTLIST, SUMMARY
from runner import environment
from runner.config import overrides, resolve
from runner.config.experiment import Experiment
from runner.config.masks import NONE, named
from runner.config.rules.workload import attention_call
from runner.config.values import InvalidConfig, UnsupportedHere
from runner.costs import dry_run
from runner.output import terminal
from runner.peers import Package, everything, missing


def attention() -> Table:
    """The variants, with several lines each to fit a narrow terminal."""
    table = _table("Variants: attention=NAME", "name", "what it is, when to use it, source", "works here, can, options")
    table.leading = 1  # an empty line between variants
    device = "cuda" if environment.gpu_count() else "cpu"

    def add(name: str, summary: str, use: str, source: str, works: str, can: str, options: Mapping[str, Any]) -> None:
        about = f"{summary}\n[bold]use:[/bold] {use}\n[bold]source:[/bold] {source}"
        given = [f"{key}={value}" for key, value in options.items()]
        table.add_row(name, about, "\n".join([works, can, *given]))

    use = "where no particular variant is wanted"
    add(AUTO, SUMMARY, use, "our trials (attention/auto.py)", "yes", f"the calls of {', '.join(SHORTLIST)}", {})
    for v in everything().values():
        masks = ["decode"] if v.decode else ["causal", *([] if v.causal_only else ["not causal"])]
        masks += (["window"] if v.windows else []) + (["packed batches"] if v.packs and not v.decode else [])
        add(v.name, v.summary, v.use, v.source, _works(missing(v, device)), ", ".join(masks), v.parse().plain())
    return table


def config() -> Table:
    """The workloads by category and size, with their FLOPs and the memory of q, k and v."""
    columns = ("category", "name", "batch", "heads", "head dim", "tokens", "mask", "dtype", "forward", "q+k+v")
    table = _table("Workloads: config=NAME", *columns)
    sized = []
    with initialize_config_module("runner.conf", version_base="1.3"):
        for name in overrides.groups()["config"]:
            cfg = compose("config", overrides=[f"config={name}"])
            if cfg.seq_len is None:
                sizes = "sizes by hardware: see DEFAULT_SIZES in runner/config/schema.py"
                table.add_row("default", name, *[""] * 4, sizes, *[""] * 3)
            else:
                sized.append(cfg)
    for cfg in sorted(sized, key=lambda cfg: (CATEGORIES.index(cfg.category), cfg.seq_len, cfg.batch * cfg.heads)):
        work = attention_call(cfg, "cpu")
        flops = counts.forward_flops(work.shapes, work.pairs)
        taken = work.queries * work.shapes.q_token + work.seq_len * work.shapes.kv_token
        heads = f"{work.heads}:{work.kv_heads}" if work.heads != work.kv_heads else f"{work.heads}"
        table.add_row(
            cfg.category, cfg.config, f"{work.batch}", heads, f"{work.head_dim}", f"{work.seq_len:,}",
            ", ".join([work.mask.describe(), *work.features]), work.dtype, terminal.flop(flops), terminal.gib(taken),
        )  # fmt: skip
    return table


CATEGORIES = ["small", "medium", "large", "gqa", "zigzag", "model", "long", "decode"]


USUAL_WORLD = 8  # ranks whose costs are listed where no world_size is given


def cost(arguments: list[str]) -> Table:
    """What each variant costs before it runs, for a workload and a world of any size."""
    given = [a for a in arguments if a.startswith("attention=")]
    rest = [a for a in arguments if not a.startswith("attention=")]
    if not any(a.startswith("world_size=") for a in rest):
        rest.append(f"world_size={USUAL_WORLD}")
    table = _table(
        f"Costs: {' '.join([*given, *rest])}; the busiest rank's; a backward has 2.5 times the FLOP where Dv = D; over "
        "NCCL; the peaks without inputs and kernels' scratch",
        "name", "FLOP forward", "of even share", "received forward", "received backward", "peak forward",
        "peak with backward", "by what",
    )  # fmt: skip
    if given and AUTO in given[0].partition("=")[2].split(","):
        table.add_row(AUTO, *[""] * 6, "those of the variant that it takes when it runs")
    with initialize_config_module("runner.conf", version_base="1.3"):
        for name, v in everything().items():
            if given and name not in given[0].partition("=")[2].split(","):
                continue
            cfg = _configured(name, rest)
            try:
                spec = resolve.experiment(cfg, 1 << 20, 0)
            except (InvalidConfig, UnsupportedHere) as error:
                table.add_row(name, *[""] * 6, str(error))
                continue
            *cells, parts = _cost_cells(spec, v)
            if spec.workload.seqlens and cfg.seqlens is None:  # another workload than the rows around it
                parts = "; ".join(filter(None, [f"a packed batch of {len(spec.workload.seqlens)} sequences", parts]))
            table.add_row(name, *cells, parts)
    return table


def _configured(name: str, overrides: list[str]) -> DictConfig:
    """The configuration with a variant's own defaults. Composing takes most of a cost's time, so it is done once for all variants,
    which differ in their group's file alone."""
    if any("attention." in each for each in overrides):
        return compose("config", overrides=["hardware=cuda", *overrides, f"attention={name}"])
    cfg = _composed(tuple(overrides)).copy()
    path = resources.files("runner.conf") / "attention" / f"{name}.yaml"
    with open_dict(cfg):
        cfg.attention = OmegaConf.create(path.read_text())
    return cfg


@lru_cache(maxsize=1)
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    return compose("config", overrides=["hardware=cuda", *overrides])


def _cost_cells(spec: Experiment, v: Variant[Any]) -> list[str]:
    work, shapes = spec.workload, spec.workload.shapes
    options = spec.call_options
    problem = v.problem(work.cu_seqlens, spec.world_size, work.mask, options, work.q_len)
    places = counts.sampled_places(problem)
    most = max(counts.place_flops(problem, shapes, place) for place in places)
    share = most * problem.ranks / counts.forward_flops(replace(shapes, batch=1, heads=1), spec.head_pairs)
    computed = [terminal.flop(most), f"{share:.2f}"]
    if isinstance(v, Package):
        return [*computed, "", "", "", "", "unknown: the package's own exchange"]
    packed = work.seqlens is not None
    ranks = [
        dry_run(v, problem, shapes, options, rank=place * problem.ulysses, packed=packed, backward=not v.decode)
        for place in places
    ]
    passes = list(zip(*ranks, strict=True))
    received = [max((x.received for x in by_rank), key=lambda by: sum(by.values())) for by_rank in passes]
    peaks = accumulate((max(x.peak for x in by_rank) for by_rank in passes), max)
    parts = "; back ".join(filter(None, map(_parts, received)))
    totals = [terminal.gib(sum(by.values())) for by in received]
    none = ["none"] * v.decode
    return [*computed, *totals, *none, *map(terminal.gib, peaks), *none, parts]


def _parts(found: dict[str, int]) -> str:
    return ", ".join(f"{what} {terminal.gib(n)}" for what, n in found.items() if n)


PICTURED = 64  # tokens of a mask's picture
SMALL_MASKS: dict[str, dict[str, Any]] = {  # parameters for so few tokens
    "sliding_window": {"left": 16},
    "prefix_lm_documents": {"prefixes": [4, 8, 16, 4]},
    "global_window": {"window": 6, "global_tokens": 6},
    "dca": {"window": 12, "global_tokens": 6, "random": 8, "block": 4},
    "block_sparse": {"pattern": "dilated_sparse", "block": 2},
}


def mask() -> Table:
    """The masks by name, each with a picture of a short sequence."""
    table = _table("Masks: mask=NAME", "name", "what it is", f"values, and a picture of {PICTURED} tokens")
    table.leading = 1
    for name, comment, values in _files("mask"):
        given = [f"mask.{key}={value}" for key, value in values.get("mask", {}).items() if key != "name"]
        picture = ""
        if name != NONE:
            parameters = {key: x for key, x in values["mask"].items() if key != "name"} | SMALL_MASKS.get(name, {})
            shown = named(name, parameters, PICTURED, None).make()
            picture = f"{shown.describe()}:\n{shown.picture(PICTURED, 16)}"
        table.add_row(name, escape(comment), escape("\n".join([*given, picture])))
    return table


def kernel() -> Table:
    from attention.kernels import FASTEST, KERNELS

    device = _device()
    auto = f"the fastest that supports the call, tried in this order: {', '.join(FASTEST[device])}"
    return _usable("kernel", auto, [(k.name, k.missing(device), k.summary) for k in KERNELS.values()])


def transport() -> Table:
    from attention.transports import SUMMARIES, missing

    device = _device()
    auto = "symm on GPUs that can read each other's memory, nccl on other GPUs, gloo on a CPU"
    return _usable("transport", auto, [(name, missing(name, device), summary) for name, summary in SUMMARIES.items()])


def _usable(group: str, auto: str, choices: Sequence[tuple[str, str | None, str]]) -> Table:
    """The choices of a group: name, why it cannot be used here (None: it can), and summary."""
    title = f"{group.capitalize()}s on this machine ({_device()}): {group}=NAME"
    table = _table(title, "name", "works here", "what it is")
    for name, reason, about in [("auto", None, auto), *choices]:
        table.add_row(name, _works(reason), about)
    return table


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _works(reason: str | None) -> str:
    return "yes" if reason is None else escape(f"no: {reason}")


def _group(name: str) -> Table:
    """The choices of a group by their YAML files: comments and values."""
    table = _table(f"{name}=NAME", "name", "what it is", "values")
    for choice, comment, values in _files(name):
        shown = {k: v for k, v in values.items() if k not in ("name", "method", "defaults", "hydra")}
        if "hydra" in values:
            shown |= values["hydra"]["sweeper"]["params"]
        table.add_row(choice, comment, ", ".join(f"{k}={v}" for k, v in shown.items()))
    return table


def _files(group: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The choices of a group: name, the comments of its file, and its values."""
    root = resources.files("runner.conf") / group
    for choice in overrides.groups()[group]:
        text = (root / f"{choice}.yaml").read_text()
        comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
        values: Any = OmegaConf.to_container(OmegaConf.create(text))
        yield choice, " ".join(comments), values or {}


NUMBERS = (
    "FLOP forward", "of even share", "received forward", "received backward", "peak forward", "peak with backward", "batch",
    "heads", "head dim", "tokens", "forward", "q+k+v",
)  # fmt: skip
WRAPPED = (
    "what it is, when to use it, source", "works here, can, options", "works here", "what it is", "values", "by what", "mask",
)  # fmt: skip
# the columns that a narrow terminal leaves out, in this order
LEFT_OUT = ("dtype", "category", "q+k+v", "of even share", "peak forward", "received backward", "peak with backward")


def _table(title: str, *columns: str) -> Table:
    table = terminal.new_table(title)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    return table


def show(table: Table) -> None:
    terminal.note_dropped(terminal.show(table, WRAPPED, LEFT_OUT), ": a wider terminal, or COLUMNS=200, shows them")


LISTS: dict[str, Callable[[], Table]] = {
    "attention": attention,
    "mask": mask,
    "model": partial(_group, "model"),
    "config": config,
    "kernel": kernel,
    "transport": transport,
    **{name: partial(_group, name) for name in ("timing", "dtype", "hardware", "experiment")},
}


def main(arguments: list[str]) -> int:
    resolve.register()
    if arguments[:1] == ["cost"]:
        reason = overrides.problem(arguments[1:])
        if reason is not None:
            print(reason, file=sys.stderr)
            return 2
        show(cost(arguments[1:]))
        return 0
    for name in arguments:
        if name in ("-h", "--help"):
            print(__doc__)
            return 0
        if name not in (*LISTS, "support"):
            print(f"{name}: not a list; {nearest(name, (*LISTS, 'support'))}", file=sys.stderr)
            return 2
    for name in arguments or LISTS:
        if name == "support":
            from runner.support import page

            print(page(), end="")
        else:
            show(LISTS[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
