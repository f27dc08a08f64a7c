"""The overrides of a command: each is parsed and checked before Hydra composes them, in every value of a sweep. Also the runs
that they stand for, and the configuration of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import resources
from itertools import product
from math import prod
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from attention.errors import nearest
from runner.config import schema
from runner.config.values import InvalidConfig, one_of, shown, written

# keys that a user may expect, and why there are none
LEFT_OUT = {
    "timing.do_bench": "was a comparison with triton.testing.do_bench; leave it out",
    "attention.memory_gb": "was an option of auto, which passes over a variant that runs out of memory; leave it out",
    "attention.trials": "was an option of auto, which now always times its variants; leave it out",
    "dropout": "not supported by any variant; leave it out",
    "feature": "is a switch of dilated attention; give attention.pattern_cache=true,false or attention.memory_pool=true,false, as +experiment=dilated_features does",
    "graphs": "is now replay; give replay=graphs for graphs=true, replay=none for false, replay=auto for auto",
}
MOST_CHARACTERS = 10_000  # of an override
MOST_VALUES = 1_024  # of an override: the time of Hydra's parser is quadratic in them
MOST_RUNS = 10_000  # of a sweep


OPEN = ("attention.", "mask.", "model.", "tracker.")  # options of a choice, which other choices of the group may lack


def choices_of(folder: str) -> list[str]:
    """The names of the files of a folder of conf/."""
    return sorted(f.name[:-5] for f in (resources.files("runner.conf") / folder).iterdir() if f.name.endswith(".yaml"))


@cache
def groups() -> dict[str, list[str]]:
    """Every config group's choices: the folders of conf/, each with a file a choice. Not to be changed."""
    return {
        folder.name: choices_of(folder.name)
        for folder in resources.files("runner.conf").iterdir()
        if folder.is_dir() and folder.name not in ("hydra", "topology", "__pycache__")  # which are no groups
    }


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
    except (HydraException, ValueError):  # ValueError: an int of more than 4,300 digits
        raise InvalidConfig(
            f"{shown(text)}: not an override; write key=value, for a sweep key=value,value without spaces and empty "
            "values, and quote a value with other characters: \"key='a b'\""
        ) from None


def check(arguments: Sequence[str], multirun: bool) -> DictConfig:
    """Raises InvalidConfig for an override that is none of this program's keys and choices, or has a value of another type, and
    HydraException for what cannot be composed. Returns the configuration of the first run, which is the only one without
    `multirun`."""
    keys: list[Override] = []
    choices: dict[str, list[str]] = {}  # of a group that is given twice the last ones hold
    parsed = _parsed(arguments)
    check_sweep(parsed)
    for override in parsed:
        text, name = shown(override.input_line), override.key_or_group
        if override.is_delete():
            raise InvalidConfig(
                f"{text}: every key has a value and none can be taken out; give it another, {name}=VALUE"
            )
        if override.is_sweep_override() and not multirun:
            raise InvalidConfig(f"{text}: several values are a sweep; add -m, or call runner.multirun")
        if name not in groups():
            keys.append(override)
            continue
        key = f"+{name}" if name == "experiment" else name
        if override.get_key_element() != key:
            raise InvalidConfig(f"{text}: every run has one {name}; write {key}=NAME")
        choices[name] = [f"{key}={one_of(name, value, groups()[name])}" for value in values(override)]
    first = {name: texts[0] for name, texts in choices.items()}
    for override in keys:
        name = override.key_or_group
        group, _, option = name.partition(".")
        # options differ by variant and mask: one choice must have the key
        made = [first | {group: text} for text in choices.get(group, [])] or [first]
        cfgs = [_composed(tuple(texts.values()))[0] for texts in made]
        cfg = copy.deepcopy(next((cfg for cfg in cfgs if option and option in cfg.get(group, ())), cfgs[0]))
        for value in values(override):
            _set(cfg, name, value)
    return composed(jobs(arguments)[0])


def check_sweep(parsed: Sequence[Override]) -> int:
    """The number of runs of a sweep; of a key given twice, the last override counts. Raises InvalidConfig for none or
    too many."""
    counts: dict[str, int] = {}
    for override in parsed:
        key, text = override.key_or_group, shown(override.input_line)
        counts[key] = number = _number(override)
        if number == 0:
            raise InvalidConfig(f"{text}: a sweep over no value; give at least one")
        if number > 1 and key in schema.UNMEASURED:
            raise InvalidConfig(f"{text}: applies to the whole command, as it changes nothing measured; give one value")
        if (runs := prod(counts.values())) > MOST_RUNS:
            raise InvalidConfig(f"{text}: {runs:g} runs; a sweep has at most {MOST_RUNS:,}; give fewer values")
    return prod(counts.values())


def _number(override: Override) -> int:
    """The number of an override's values, which are not listed: a range may have billions."""
    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop, value.step
        if stop is not None and step and all(map(math.isfinite, (start, stop, step))):
            return max(0, math.ceil((stop - start) / step))
    elif not override.is_sweep_override() or override.is_discrete_sweep():
        return len(values(override))
    raise InvalidConfig(
        f"{shown(override.input_line)}: has no list of values; give them, or range(START,STOP,STEP) of finite numbers"
    )


def values(override: Override) -> list[Any]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(groups().get(override.key_or_group, []))
    return list(override.sweep_iterator()) if override.is_sweep_override() else [value]


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether overrides are of a sweep without -m: those of an experiment, of `ab=`, or of a sweep that is resumed."""
    of_sweeps = "+experiment=", "hydra.mode=", "order=interleaved:", "resume=true"
    return any(text.startswith(of_sweeps) for text in arguments)


def for_each_run(arguments: Sequence[str]) -> list[str]:
    """Overrides of a sweep as Hydra needs them. It applies a key of one value to the defaults, too, and refuses one that the choice of
    its group lacks. So an option becomes a sweep that Hydra adds to each run; `applied` takes it from the runs that have no such
    key."""
    parsed = [parse(text) for text in arguments]
    elements = {override.key_or_group: override.get_key_element() for override in _of_experiment(parsed)}
    texts = []
    for text, override in zip(arguments, parsed, strict=True):
        name, value = override.key_or_group, text.partition("=")[2]
        if "." in name and (name in elements or name.startswith(OPEN)):
            if not override.is_sweep_override() and override.value() is not None:  # which Hydra's choice() refuses
                value = f"choice({override.get_value_element_as_str() or repr('')})"
            text = f"{elements.get(name, f'++{name}')}={value}"
        texts.append(text)
    return texts


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
        if key in cfg[group]:
            yield text.removeprefix("++")


def _of_experiment(parsed: Sequence[Override]) -> list[Override]:
    """The overrides that the chosen experiment sweeps over."""
    chosen = [o.value() for o in parsed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    if not chosen:
        return []
    swept = _composed((f"+experiment={one_of('experiment', chosen[-1], groups()['experiment'])}",))[1]
    return [parse(f"{key}={value}") for key, value in swept.items()]


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """The overrides, first those of the experiment, without Hydra's own."""
    own = [override for override in map(parse, arguments) if not override.is_hydra_override()]
    return [*_of_experiment(own), *own]


def jobs(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, those of its experiment included, as Hydra's sweeper has them; of a key given twice
    the last ones hold."""
    by_key: dict[str, list[str]] = {}
    for override in _parsed(for_each_run(arguments)):
        key = override.get_key_element()
        if isinstance(override.value(), Glob):
            texts = values(override)
        elif override.is_sweep_override():
            texts = list(override.sweep_string_iterator())
        else:
            texts = [override.get_value_element_as_str()]
        by_key[key] = [f"{key}={text}" for text in texts]
    return applied(product(*by_key.values()))


def composed(job: Sequence[str]) -> DictConfig:
    """The configuration of a run. The choices of groups, whose composition is slow, are composed once for all runs that have
    them."""
    parsed = [override for override in map(parse, job) if not override.is_hydra_override()]
    cfg = copy.deepcopy(_composed(tuple(str(o.input_line) for o in parsed if o.key_or_group in groups()))[0])
    for override in parsed:
        if override.key_or_group not in groups():
            _set(cfg, override.key_or_group, override.value())
    return cfg


@cache
def _composed(choices: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """The configuration of these choices of groups, and what an experiment among them sweeps over. Not to be changed."""
    ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if ready else initialize_config_module("runner.conf", version_base="1.3"):
        cfg = compose("config", overrides=list(choices), return_hydra_config=True)
    swept = OmegaConf.to_container(cfg.hydra.sweeper, resolve=False).get("params")  # type: ignore[union-attr]
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, swept or {}


def _set(cfg: DictConfig, name: str, value: Any) -> None:
    """Give a key this value. Raises InvalidConfig for a key that the configuration lacks, or a value of another type."""
    before = OmegaConf.select(cfg, name)
    try:
        if type(before) is bool and type(value) is int:  # OmegaConf takes any whole number for true
            raise OmegaConfBaseException("must be true or false")
        if isinstance(before, DictConfig) and not isinstance(value, dict):
            raise InvalidConfig(
                f"{name}={shown(value)}: has keys of its own; give one of {', '.join(map(str, before))}"
            )
        OmegaConf.update(cfg, name, value)
    except (ConfigAttributeError, ConfigKeyError) as error:
        raise InvalidConfig(_unknown(max(name, error.full_key or "", key=len), cfg)) from None
    except OmegaConfBaseException as error:
        reason = shown(str(error).partition("\n")[0])
        raise InvalidConfig(f"{name}={shown(value)}: {reason}; leave it out for {name}={written(before)}") from None


def _unknown(name: str, cfg: DictConfig) -> str:
    """The message for a key that a configuration lacks."""
    group, _, option = name.partition(".")
    if name in LEFT_OUT:
        return f"{name}: {LEFT_OUT[name]}"
    if option and group in cfg:
        options = ", ".join(f"{group}.{key}" for key in cfg[group] if key != "name")
        choice = f"{group}={cfg[group].name}" if "name" in cfg[group] else group
        return f"{shown(name)}: {choice} has no such option; its options: {options or 'none'}"
    return f"{shown(name)}: not a key; {nearest(shown(group), [*cfg, *groups()])}"
