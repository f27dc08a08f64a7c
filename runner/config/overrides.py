"""Check command-line overrides before Hydra composes: an unknown name or a wrong type, in any value of a sweep, is
refused in one line with the nearest names."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import cache
from itertools import product
from math import prod
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from attention.errors import nearest
from runner.config import schema
from runner.config.groups import groups
from runner.config.values import InvalidConfig, shown, written

# Hydra's flags that take a value
VALUED = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--info", "-i",
)  # fmt: skip
KINDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", list[int]: "a list of whole numbers",
}  # fmt: skip
# examples in messages; of other keys the present value, or the one that null stands for
EXAMPLES = {
    "window": [512, 0], "scale": 0.125, "chunk": 8192, "softcap": 50.0, "v_head_dim": 128, "prefix": 4096, "mode": "forward", "launch.fault": "1:timing:raise",
}  # fmt: skip
# keys that a user may expect, and why there are none
LEFT_OUT = {
    "attention.memory_gb": "was an option of auto, which passes over a variant that runs out of memory; leave it out",
    "attention.trials": "was an option of auto, which now always times its variants; leave it out",
    "dropout": "not supported by any variant; leave it out",
    "feature": "is a switch of dilated attention; give attention.pattern_cache=true,false or attention.memory_pool=true,false, as +experiment=dilated_features does",
    "graphs": "is now replay; give replay=graphs for graphs=true, replay=none for false, replay=auto for auto",
}
MOST_CHARACTERS = 10_000  # of an override
MOST_VALUES = 1_024  # of an override: the time of Hydra's parser is quadratic in them
MOST_RUNS = 10_000  # of a sweep


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags of a command line with their values, and its overrides. They may alternate."""
    flags: list[str] = []
    found: list[str] = []
    valued = False
    for argument in arguments:
        if valued or argument.startswith("-"):
            valued = not valued and argument in VALUED
            flags.append(argument)
        else:
            found.append(argument)
    return flags, found


def problem(arguments: list[str], multirun: bool = True) -> str | None:
    """Why the overrides are refused, in one line, or None."""
    try:
        return _problem(arguments, multirun)
    except InvalidConfig as error:
        return str(error)


def _problem(arguments: list[str], multirun: bool) -> str | None:
    known = groups()
    keys: list[Override] = []
    choices: dict[str, list[str]] = {}  # of a group that is given twice the last ones hold
    sweeps = multirun or is_sweep(arguments)
    parsed = [parse(text) for text in arguments]
    check_sweep(parsed, known)
    for text, override in zip(arguments, parsed, strict=True):
        name = override.key_or_group
        if name.startswith("hydra"):
            continue
        if override.is_delete():
            return f"{shown(text)}: every key has a value and none can be taken out; give it another, {name}=VALUE"
        if override.is_sweep_override() and not sweeps:
            return f"{shown(text)}: several values are a sweep; add -m"
        if name == "experiment" and "canonical" in _values(override, known[name]):
            return f"{shown(text)}: has several sweeps; it stands alone: python -m runner +experiment=canonical [--only ...]"
        if name in known:
            if override.package is not None:
                return f"{shown(text)}: the package of a group is fixed; write {name}=NAME"
            if name == "experiment" and not override.is_add():
                return f"{shown(text)}: an experiment is added to the defaults; write +{shown(text)}"
            if name != "experiment" and (override.is_add() or override.is_force_add()):
                return f"{shown(text)}: every run has a {name}, of which there is one; write {shown(text.lstrip('+'))}"
            values = _values(override, known[name])
            for value in values:
                if not isinstance(value, str) or value not in known[name]:
                    return f"{name}={shown(value)}: not a choice of {name}; {nearest(shown(value), known[name])}"
            choices[name] = [f"{'+' if override.is_add() else ''}{name}={value}" for value in values]
        else:
            keys.append(override)
    check_sweep([*_of_experiment(parsed), *parsed], known)
    resumes = any(key.key_or_group == "resume" and True in _values(key, []) for key in keys)
    if resumes and not (sweeps and any(a.startswith("hydra.sweep.dir=") for a in arguments)):
        return (
            "resume=true: goes on with a sweep whose folder must be given; "
            "write -m resume=true hydra.sweep.dir=FOLDER and the sweep's own overrides"
        )
    return _check_keys(keys, choices, known) if keys else None


def is_sweep(arguments: Iterable[str]) -> bool:
    """Whether overrides are of a sweep without -m, as every experiment is."""
    return any(text.startswith(("+experiment=", "hydra.mode=")) for text in arguments)


def for_each_run(arguments: list[str]) -> list[str]:
    """Good overrides as Hydra needs them. It applies a key of one value to the defaults, too, and refuses one that the choice of its
    group lacks. So where the group is swept, the key becomes a sweep that Hydra adds to each run; `applied` takes it from the runs
    that have no such key."""
    parsed = [parse(text) for text in arguments]
    last = {override.key_or_group: override for override in [*_of_experiment(parsed), *parsed]}
    swept = {name for name, override in last.items() if override.is_sweep_override()}
    added = {override.key_or_group for override in _of_experiment(parsed) if override.is_force_add()}
    return [_for_each_run(text, x, swept, added) for text, x in zip(arguments, parsed, strict=True)]


def _for_each_run(text: str, override: Override, swept: set[str], added: set[str]) -> str:
    name = override.key_or_group
    group, _, key = name.partition(".")
    of_swept = bool(key) and group in swept
    if override.type != OverrideType.CHANGE or not (of_swept or name in added):
        return text
    if override.is_sweep_override() or override.value() is None:  # None: which Hydra's choice() refuses
        return f"++{text}"
    return f"++{name}=choice({override.get_value_element_as_str() or repr('')})"


def applied(jobs: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The runs of a sweep, each by its overrides, without the keys that were added to all runs and that the choice of their group
    lacks, such as attention.mixing of attention=dense. Of runs that thereby become equal, the first."""
    return list(dict.fromkeys(tuple(_applied(job)) for job in jobs))


def _applied(job: Sequence[str]) -> Iterator[str]:
    for text in job:
        name = text.removeprefix("++").partition("=")[0]
        group, _, key = name.partition(".")
        if not text.startswith("++") or not key or group not in groups():
            yield text
            continue
        cfg = _composed(tuple(x for x in job if x.startswith(("+experiment=", f"{group}="))))[0]
        if OmegaConf.select(cfg[group], key, default=_applied) is not _applied:
            yield text.removeprefix("++")


def _of_experiment(parsed: list[Override]) -> list[Override]:
    """The overrides that the chosen experiment sweeps over."""
    chosen = [o for o in parsed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    params = _composed((f"+experiment={chosen[-1].value()}",))[1] if chosen else {}
    return [parse(f"{key}={value}") for key, value in params.items()]


def jobs(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, those of its experiment included, as Hydra's sweeper has them; of a key given twice
    the last ones hold."""
    values: dict[str, list[str]] = {}
    for override in [*_of_experiment(list(map(parse, arguments))), *map(parse, for_each_run(list(arguments)))]:
        if override.is_hydra_override():
            continue
        key = override.get_key_element()
        if isinstance(override.value(), Glob):
            texts: Iterable[Any] = _values(override, groups()[override.key_or_group])
        elif override.is_sweep_override():
            texts = override.sweep_string_iterator()
        else:
            texts = [override.get_value_element_as_str()]
        values[key] = [f"{key}={text}" for text in texts]
    return applied(product(*values.values()))


def composed(job: Sequence[str]) -> DictConfig:
    """The configuration of a run. The choices of groups, whose composition is slow, are composed once for all runs that have
    them."""
    choices: list[str] = []
    keys: list[Override] = []
    for text in job:
        override = parse(text)
        if override.key_or_group in groups():
            choices.append(text)
        elif not override.is_hydra_override():
            keys.append(override)
    cfg: DictConfig = copy.deepcopy(_composed(tuple(choices))[0])
    for override in keys:
        OmegaConf.update(
            cfg, override.key_or_group, override.value(), force_add=override.is_add() or override.is_force_add()
        )
    return cfg


def parse(text: str) -> Override:
    """Raises InvalidConfig for a text that is no override."""
    if any("\udc80" <= c <= "\udcff" for c in text):
        raise InvalidConfig(f"{shown(text)}: not UTF-8; write it in that encoding")
    if len(text) > MOST_CHARACTERS or text.count(",") >= MOST_VALUES:
        raise InvalidConfig(
            f"{shown(text)}: {len(text):,} characters and {text.count(',') + 1:,} values; an override has at most "
            f"{MOST_CHARACTERS:,} and {MOST_VALUES:,}; give fewer, range(START,STOP,STEP) for a sweep, or seqlens=random"
        )
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:  # ValueError: an int of more than 4,300 digits
        reason = shown((str(error).splitlines() or ["no reason given"])[0])
        raise InvalidConfig(f"{shown(text)}: not an override ({reason}); write key=value") from None


def check_sweep(parsed: list[Override], known: dict[str, list[str]]) -> int:
    """The number of runs of a sweep; of a key given twice, the last override counts. Raises InvalidConfig for none or
    too many."""
    counts: dict[str, int] = {}
    for override in parsed:
        key = override.key_or_group
        counts[key] = number = _count(override, known.get(key, []))
        text = shown(override.input_line)
        if number == 0:
            raise InvalidConfig(f"{text}: a sweep over no value; give at least one")
        if number > 1 and key in schema.UNMEASURED:
            raise InvalidConfig(f"{text}: applies to the whole command, as it changes nothing measured; give one value")
        if (runs := prod(counts.values())) > MOST_RUNS:
            raise InvalidConfig(f"{text}: {runs:g} runs; a sweep has at most {MOST_RUNS:,}; give fewer values")
    return prod(counts.values())


def count(texts: list[str]) -> int:
    """The number of runs of a sweep of these overrides. Raises InvalidConfig."""
    return check_sweep([parse(text) for text in texts], groups())


def _count(override: Override, choices: list[str]) -> int:
    """The number of an override's values, which are not listed: a range may have billions."""
    if not override.is_sweep_override():
        return 1
    value = override.value()
    if isinstance(value, Glob):
        return len(value.filter(choices))
    if isinstance(value, IntervalSweep):
        raise InvalidConfig(
            f"{shown(override.input_line)}: an interval has no separate values; give a list or range(START,STOP,STEP)"
        )
    if not isinstance(value, RangeSweep):
        return len(value.list) if isinstance(value, ChoiceSweep) else 1
    start, stop, step = value.start or 0, value.stop, value.step
    if stop is None or not step or not all(map(math.isfinite, (start, stop, step))):
        raise InvalidConfig(f"{shown(override.input_line)}: must be range(START,STOP,STEP) of finite numbers")
    return max(0, math.ceil((stop - start) / step))


def _check_keys(keys: list[Override], choices: dict[str, list[str]], known: dict[str, list[str]]) -> str | None:
    # options differ by variant and mask, so each of a sweep is composed; of groups without a given key, the first choice
    of_keys = {key.key_or_group.partition(".")[0] for key in keys}.intersection(known)
    if of_keys and len(choices.get("experiment", [])) == 1:
        for each in _of_experiment([parse(choices["experiment"][0])]):
            if (group := each.key_or_group) in of_keys - choices.keys():
                choices[group] = [f"{group}={value}" for value in _values(each, known[group])]
    varied = [found if group in of_keys else found[:1] for group, found in choices.items()]
    lacking: dict[str, str] = {}  # why a key is refused where no choice has it
    had: set[str] = set()
    for chosen in product(*varied):
        try:
            cfg = copy.deepcopy(_composed(chosen)[0])
        except HydraException as error:
            return " ".join(str(error).split())
        paths = list(_paths(OmegaConf.to_container(cfg)))  # type: ignore[arg-type]
        mine = [key for key in keys if key.key_or_group in paths]
        had.update(key.key_or_group for key in mine)
        for name in (key.key_or_group for key in keys if key not in mine):
            lacking.setdefault(name, _unknown(name, cfg, paths, known))
        if reason := _against(cfg, mine):
            return reason
    return next((reason for name, reason in lacking.items() if name not in had), None)


@cache
def _composed(chosen: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """The configuration of these choices of groups, and what an experiment among them sweeps over. Callers must not change
    them."""
    ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if ready else initialize_config_module("runner.conf", version_base="1.3"):
        cfg = compose("config", overrides=list(chosen), return_hydra_config=True)
    params = OmegaConf.to_container(cfg.hydra.sweeper, resolve=False).get("params")  # type: ignore[union-attr]
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, params or {}


def _against(cfg: Any, keys: list[Override]) -> str | None:
    """Why a configuration cannot take these overrides of its keys, or None."""
    interpolated: list[tuple[str, Any, str]] = []
    for override in keys:
        name = override.key_or_group
        for value in _values(override, []):
            text = f"{name}={shown(value)}"
            if "???" in str(value):
                return f"{text}: ??? is the mark of a value that is still missing; give one"
            try:
                if not _has_form(name, value):
                    raise ValueError
                OmegaConf.update(cfg, name, value)
            except GrammarParseError:
                return f"{text}: not an interpolation; write ${{KEY}} for another key's value"
            except (OmegaConfBaseException, ValueError):
                return f"{text}: {_expected(name, OmegaConf.select(cfg, name))}"
            if name == "output" and not str(value):
                return "output=: must be a folder; give output=DIR, or leave it out for output=outputs"
            if "${" in str(value):
                interpolated.append((name, value, text))
    for name, value, text in interpolated:
        try:
            OmegaConf.update(cfg, name, value)  # a later value of a sweep may have taken its place
            node = OmegaConf.select(cfg, name, throw_on_resolution_failure=True)
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            return f"{text}: {shown(str(error).splitlines()[0])}; write ${{KEY}} for another key's value"
    return None


def _unknown(name: str, cfg: Any, paths: list[str], known: Iterable[str]) -> str:
    """The message for a key that a configuration lacks, with the nearest keys."""
    if name in LEFT_OUT:
        return f"{name}: {LEFT_OUT[name]}"
    for group, what in (("attention", "option"), ("mask", "parameter"), ("model", "option"), ("tracker", "option")):
        if name.startswith(f"{group}."):
            able = [path for path in paths if path.startswith(f"{group}.") and path != f"{group}.name"]
            return (
                f"{shown(name)}: {group}={cfg[group].name} has no such {what}; its {what}s: {', '.join(able) or 'none'}"
            )
    keys = list(dict.fromkeys([*paths, *known]))
    if difflib.get_close_matches(shown(name), keys, cutoff=0.5):
        return f"{shown(name)}: not a key; {nearest(shown(name), keys)}"
    close = ", ".join(difflib.get_close_matches(shown(name), keys, cutoff=0.0))
    return f"{shown(name)}: not a key; the nearest are {close}; python -m runner --help lists all"


def _kind(name: str) -> Any:
    """The schema's type of a key."""
    kind: Any = schema.RunConf
    for part in name.split("."):
        kind = get_type_hints(kind)[part] if is_dataclass(kind) else Any
    return kind


def _has_form(name: str, value: Any) -> bool:
    """Whether a value is a dict, a list, a truth value or another, as its key needs it. OmegaConf accepts others and fails
    later, or takes any whole number for true."""
    kind = _kind(name)
    if kind is bool and type(value) is int:
        return False
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind == list[int] and isinstance(value, list):
        return not any(isinstance(one, (list, dict)) for one in value)
    return True


def _expected(name: str, value: Any) -> str:
    """The schema's type of a key that now has this value, in words, with an example."""
    kind = _kind(name)
    if is_dataclass(kind):
        key, default = next(iter(value.items()))
        return f"has keys of its own; give one of {', '.join(value)}, for instance {name}.{key}={written(default)}"
    kinds = [k for k in get_args(kind) if k is not NoneType] if NoneType in get_args(kind) else [kind]
    wanted = " or ".join([*(KINDS[k] for k in kinds), *(["null"] if kinds != [kind] else [])])
    example = EXAMPLES.get(name, value)
    if example is None:  # what null stands for
        key = name.rpartition(".")[2]
        example = {**schema.DEFAULT_SIZES["cpu"], **schema.TIMING_DEFAULTS["cuda"]}.get(key, 1)
    return f"must be {wanted}; for instance {name}={written(example)}"


def _values(override: Override, choices: list[str]) -> list[Any]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(choices)
    return list(override.sweep_iterator()) if override.is_sweep_override() else [value]


def _paths(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
