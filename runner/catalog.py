"""`python -m runner.catalog [attention|mask|config|kernel|transport|...]`: the choices of these groups of `--help`, or of all: what each is, whether it works on this machine, and if not, why. `python -m runner.catalog key`: every other key.

`python -m runner.catalog support`: what every variant and every kernel does under every mask: honoured, or refused and why.

`python -m runner.catalog cost config=llama3_70b world_size=64`: the FLOPs, bytes and memory of each variant, before it runs."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import accumulate
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from attention.errors import nearest
from attention.geometry import counts
from attention.variants.base import Variant
from attention.variants.registry import AUTO, SHORTLIST, SUMMARY
from runner import environment
from runner.config import overrides, resolve, schema
from runner.config.experiment import NONE, Experiment, named
from runner.config.rules.attention import attention_call
from runner.config.values import InvalidConfig, Refusal, UnsupportedHere
from runner.costs import dry_run
from runner.output import commands, terminal
from runner.peers import Package, everything, missing

Cells = tuple[str, ...]


def attention() -> Iterator[Cells]:
    """The variants, with several lines each to fit a narrow terminal."""
    device = "cuda" if environment.gpu_count() else "cpu"
    about = "{}\nuse: {}\nsource: {}"
    use = "where no particular variant is wanted"
    yield (
        AUTO,
        about.format(SUMMARY, use, "our trials (attention/auto.py)"),
        f"yes\nthe calls of {', '.join(SHORTLIST)}",
    )
    for v in everything().values():
        can = ["decode"] if v.decode else ["causal", *([] if v.causal_only else ["not causal"])]
        can += ["window"] * v.windows + ["packed batches"] * (v.packs and not v.decode)
        lines = [_works(missing(v, device)), ", ".join(can), *_pairs(v.parse().plain())]
        yield v.name, about.format(v.summary, v.use, v.source), "\n".join(lines)


CATEGORIES = ["default", "small", "medium", "large", "gqa", "zigzag", "model", "long", "decode"]


def config() -> Iterator[Cells]:
    """The workloads by category and size, with their FLOPs and the memory of q, k and v."""
    configs = [overrides.composed([f"config={name}"]) for name in schema.groups()["config"]]

    def place(cfg: DictConfig) -> tuple[int, int]:
        return CATEGORIES.index(cfg.category), math.prod(cfg[key] or 0 for key in ("seq_len", "batch", "heads"))

    for cfg in sorted(configs, key=place):
        if cfg.seq_len is None:
            sizes = "sizes by hardware: see DEFAULT_SIZES in runner/config/schema.py"
            yield "default", cfg.config, *[""] * 4, sizes, *[""] * 3
            continue
        work = attention_call(cfg, "cpu")
        flops = counts.forward_flops(work.shapes, work.pairs)
        taken = work.queries * work.shapes.q_token + work.seq_len * work.shapes.kv_token
        heads = f"{work.heads}:{work.kv_heads}" if work.heads != work.kv_heads else f"{work.heads}"
        yield (
            cfg.category, cfg.config, f"{work.batch}", heads, f"{work.head_dim}", f"{work.seq_len:,}",
            ", ".join([work.mask.describe(), *work.features]), work.dtype, terminal.flop(flops), terminal.gib(taken),
        )  # fmt: skip


USUAL_WORLD = 8  # ranks whose costs are listed where no world_size is given


def cost(given: list[str]) -> Choices:
    """What each variant costs before it runs, for a workload and a world of any size. Raises Refusal for overrides that are refused."""
    if not any(text.startswith("world_size=") for text in given):
        given = [*given, f"world_size={USUAL_WORLD}"]
    title = (
        f"Costs: {' '.join(given)}; the busiest rank's; a backward has 2.5 times the FLOP where Dv = D; over NCCL; the peaks "
        "without inputs and kernels' scratch"
    )
    columns = (
        "name", "FLOP forward", "of even share", "received forward", "received backward", "peak forward",
        "peak with backward", "by what",
    )  # fmt: skip
    return Choices(title, columns, partial(_costs, given))


def _costs(given: list[str]) -> Iterator[Cells]:
    asked = [name for text in given if text.startswith("attention=") for name in text.partition("=")[2].split(",")]
    options = OmegaConf.from_dotlist([text for text in given if text.startswith("attention.")])
    composed = overrides.composed(overrides.jobs(["hardware=cuda", *given])[0])
    if AUTO in asked:
        yield AUTO, *[""] * 6, "those of the variant that it takes when it runs"
    for name, v in everything().items():
        if asked and name not in asked:
            continue
        cfg = with_variant(composed, name, options)
        try:
            spec = resolve.experiment(cfg, 1 << 20, 0)
        except (InvalidConfig, UnsupportedHere) as error:
            yield name, *[""] * 6, str(error)
            continue
        *cells, parts = _cost_cells(spec, v)
        if spec.workload.seqlens and cfg.seqlens is None:  # another workload than the rows around it
            parts = "; ".join(filter(None, [f"a packed batch of {len(spec.workload.seqlens)} sequences", parts]))
        yield name, *cells, parts


def with_variant(composed: DictConfig, name: str, options: Any) -> DictConfig:
    """The configuration with another variant and its defaults. Composing takes long, and variants differ in their group's file
    alone."""
    cfg = composed.copy()
    text = (resources.files("runner.conf") / "attention" / f"{name}.yaml").read_text()
    with open_dict(cfg):
        cfg.attention = OmegaConf.create(text)
        cfg.merge_with(options)
    return cfg


def _cost_cells(spec: Experiment, v: Variant[Any]) -> list[str]:
    work, shapes = spec.workload, spec.workload.shapes
    options = v.parse({}) if isinstance(v, Package) else spec.call_options  # a package's are tried when it runs
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
    parts = (", ".join(f"{what} {terminal.gib(n)}" for what, n in by.items() if n) for by in received)
    totals = [terminal.gib(sum(by.values())) for by in received]
    none = ["none"] * v.decode
    return [*computed, *totals, *none, *map(terminal.gib, peaks), *none, "; back ".join(filter(None, parts))]


PICTURED = 64  # tokens of a mask's picture
SMALL_MASKS: dict[str, dict[str, Any]] = {  # parameters for so few tokens
    "sliding_window": {"left": 16},
    "prefix_lm_documents": {"prefixes": [4, 8, 16, 4]},
    "global_window": {"window": 6, "global_tokens": 6},
    "dca": {"window": 12, "global_tokens": 6, "random": 8, "block": 4},
    "block_sparse": {"pattern": "dilated_sparse", "block": 2},
}


def mask() -> Iterator[Cells]:
    """The masks by name, each with a picture of a short sequence."""
    for name, comment, values in _files("mask"):
        parameters = {key: x for key, x in values.get("mask", {}).items() if key != "name"}
        lines = [f"mask.{pair}" for pair in _pairs(parameters)]
        if name != NONE:
            shown = named(name, parameters | SMALL_MASKS.get(name, {}), PICTURED, None).make()
            lines.append(f"{shown.describe()}:\n{shown.picture(PICTURED, 16)}")
        yield name, comment, "\n".join(lines)


def kernel() -> Iterator[Cells]:
    from attention.kernels import FASTEST, KERNELS

    device = _device()
    yield "auto", "yes", f"the fastest that supports the call, tried in this order: {', '.join(FASTEST[device])}"
    for k in KERNELS.values():
        yield k.name, _works(k.missing(device)), k.summary


def transport() -> Iterator[Cells]:
    from attention.transports import SUMMARIES, missing

    device = _device()
    yield "auto", "yes", "symm on GPUs that can read each other's memory, nccl on other GPUs, gloo on a CPU"
    for name, summary in SUMMARIES.items():
        yield name, _works(missing(name, device)), summary


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _works(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def key() -> Iterator[Cells]:
    """Every key of a run that is no group's name, with its default and its comment in the schema."""
    prefix = ""
    for line in inspect.getsource(schema).splitlines():
        if line[:1].strip():  # a class begins, or what has no keys
            prefix = {"TimingConf": "timing.", "Check": "check.", "Launch": "launch.", "RunConf": ""}.get(
                line[6:-1], "-"
            )
        if prefix != "-" and (parts := re.match(r"    (\w+): [^=]+ = (.+?)(?:  # (.*))?$", line)):
            name, default, comment = parts.groups()
            default = default.removeprefix("field(default_factory=lambda: ").rstrip(")").strip('"')
            is_group = name in schema.groups() or default == "MISSING"
            if not is_group and not default.startswith("field("):  # keys of its own stand under its class
                yield f"{prefix}{name}", {"None": "null"}.get(default, default.lower()), comment or ""


def group(name: str) -> Iterator[Cells]:
    """The choices of a group by their YAML files: comments and values."""
    for choice, comment, values in _files(name):
        shown = {k: v for k, v in values.items() if k not in ("name", "method", "defaults", "hydra")}
        if "hydra" in values:
            shown |= values["hydra"]["sweeper"]["params"]
        yield choice, comment, ", ".join(_pairs(shown))


def _files(group: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The choices of a group: name, the comments of its file, and its values."""
    root = resources.files("runner.conf") / group
    for choice in schema.groups()[group]:
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


@dataclass(frozen=True)
class Choices:
    """A list: its title, the titles of its columns, and its rows. spaced: with an empty line between rows."""

    title: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterator[Cells]]
    spaced: bool = False

    def show(self) -> None:
        left = [column for column in self.columns if column not in NUMBERS]
        terminal.print_rows(self.title, self.columns, [*self.rows()], left, WRAPPED, LEFT_OUT, int(self.spaced))


def _group(name: str) -> Choices:
    return Choices(f"{name}=NAME", ("name", "what it is", "values"), partial(group, name))


HERE = ("name", "works here", "what it is")
WORKLOADS = ("category", "name", "batch", "heads", "head dim", "tokens", "mask", "dtype", "forward", "q+k+v")
LISTS = {
    "attention": Choices("Variants: attention=NAME", ("name", *WRAPPED[:2]), attention, spaced=True),
    "mask": Choices("Masks, each with a picture: mask=NAME", ("name", "what it is", "values"), mask, spaced=True),
    "config": Choices("Workloads: config=NAME", WORKLOADS, config),
    "kernel": Choices("Kernels on this machine: kernel=NAME", HERE, kernel),
    "transport": Choices("Transports on this machine: transport=NAME", HERE, transport),
    "key": Choices("Keys: KEY=VALUE", ("key", "default", "what it is"), key),
}
LISTS |= {name: _group(name) for name in schema.groups() if name not in LISTS}


def main(arguments: list[str]) -> int:
    return commands.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = commands.parser("runner.catalog", __doc__)
    parser.add_argument("lists", nargs="*", metavar="LIST", help="one of those above; by default all")
    names = parser.parse_args(arguments).lists
    if names[:1] == ["cost"]:
        cost(names[1:]).show()
        return 0
    for name in names:
        if name not in (*LISTS, "support"):
            raise Refusal(f"{name}: not a list; {nearest(name, (*LISTS, 'support'))}")
    for name in names or LISTS:
        if name == "support":
            from runner.support import page

            print(page(), end="")
        else:
            LISTS[name].show()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
