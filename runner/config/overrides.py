"""The overrides of a command: one pass parses, checks and expands them into runs, each a tuple of overrides. `composed` is the
configuration of a run. Hydra composes the choices of groups; OmegaConf's types refuse values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice, product
from math import prod

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attention.errors import nearest
from runner.config import resolve  # noqa: F401 (it registers the schema)
from runner.config.schema import CONF, UNMEASURED, groups
from runner.config.values import InvalidConfig, one_of, shown

# keys that a user may expect, and why there are none
LEFT_OUT = {
    "timing.do_bench": "was a comparison with triton.testing.do_bench; leave it out",
    "attention.memory_gb": "was an option of auto, which passes over a variant that runs out of memory; leave it out",
    "attention.trials": "was an option of auto, which now always times its variants; leave it out",
    "dropout": "not supported by any variant; leave it out",
    "feature": "is a switch of dilated attention; give attention.pattern_cache=true,false or attention.memory_pool=true,false, as +experiment=dilated_features does",
    "graphs": "is now replay; give replay=graphs for graphs=true, replay=none for false, replay=auto for auto",
    "hydra": "of Hydra's own keys only hydra.sweep.dir, hydra/launcher and hydra.launcher.* are used; leave it out, and give output=DIR for another folder",
    "topology": "is for predictions: python -m runner.predict topology=NAME; leave it out",
}
HYDRA = ("hydra.sweep.dir", "hydra/launcher", "hydra.launcher.")
MOST_CHARACTERS = 10_000  # of an override
MOST_VALUES = 1_024  # of an override: the time of Hydra's parser is quadratic in them
MOST_RUNS = 10_000  # of a sweep


def parse(text: str) -> Override:
    """Raises InvalidConfig for a text that is no override."""
    if len(text) > MOST_CHARACTERS or text.count(",") >= MOST_VALUES:
        raise InvalidConfig(
            f"{shown(text)}: {len(text):,} characters and {text.count(',') + 1:,} values; an override has at most "
            f"{MOST_CHARACTERS:,} and {MOST_VALUES:,}; give fewer, range(START,STOP,STEP) for a sweep, or seqlens=random"
        )
    try:
        text.encode()
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: not UTF-8, or an int of more than 4,300 digits
        raise InvalidConfig(
            f"{shown(text)}: not an override; write key=value in UTF-8, for a sweep key=value,value without spaces and "
            "empty values, and quote a value with other characters: \"key='a b'\""
        ) from None


def jobs(arguments: Sequence[str], multirun: bool = True) -> list[tuple[str, ...]]:
    """The runs of a command, those of its experiment's sweep included; of a key given twice the last values hold. An option goes
    to the runs whose choice of the group has it; of runs that thereby become equal the first stays. Raises InvalidConfig for what is
    none of this program's keys and choices, or has a value of another type."""
    own = [override for override in map(parse, arguments) if not override.key_or_group.startswith(HYDRA)]
    swept = [parse(text) for override in own if override.key_or_group == "experiment" for text in _sweep(override)]
    by_key = {override.key_or_group: values(override, multirun) for override in [*swept, *own]}
    if (number := prod(map(len, by_key.values()))) > MOST_RUNS:
        raise InvalidConfig(f"{number:g} runs or more; a sweep has at most {MOST_RUNS:,}; give fewer values")
    runs = list(dict.fromkeys(tuple(x for x in job if _applies(x, job)) for job in product(*by_key.values())))
    for texts in by_key.values():
        cfg = composed(next((job for job in runs if texts[0] in job), runs[0]))
        for text in texts:
            _set(cfg, text)
    return runs


def _sweep(experiment: Override) -> list[str]:
    """The overrides of the sweep that a chosen experiment has."""
    name = one_of("experiment", experiment.get_value_string(), groups()["experiment"])
    params = OmegaConf.select(OmegaConf.load(CONF / "experiment" / f"{name}.yaml"), "hydra.sweeper.params")
    return [f"{key}={value}" for key, value in params.items_ex(resolve=False)] if params else []


def values(override: Override, multirun: bool) -> list[str]:
    """An override for each value; of a range, which may have billions, not many more than a sweep may have."""
    key, text, value = override.key_or_group, shown(override.input_line), override.value()
    if reason := LEFT_OUT.get(key, LEFT_OUT.get(key.partition(".")[0])):
        raise InvalidConfig(f"{key}: {reason}")
    if override.get_key_element().lstrip("+") != key:
        raise InvalidConfig(f"{text}: every run has one {key}; write {key}=VALUE")
    if isinstance(value, RangeSweep):
        value.shuffle = False  # which would list it
    texts = [] if override.is_sweep_override() else [override.get_value_element_as_str()]
    with suppress(HydraException, ValueError, ArithmeticError):  # of a range without an end or a step, or an interval
        texts = texts or list(islice(override.sweep_string_iterator(), MOST_RUNS + 1))
    if not texts:
        raise InvalidConfig(f"{text}: has no list of values; give them, or range(START,STOP,STEP) of finite numbers")
    if len(texts) > 1 and (key in UNMEASURED or not multirun):
        raise InvalidConfig(
            f"{text}: several values are a sweep; add -m, or call runner.multirun; what changes nothing measured, as "
            f"{UNMEASURED[0]}, has one value"
        )
    if key in groups():
        texts = [one_of(key, name, groups()[key]) for name in texts]
    return [f"{'+' * (key == 'experiment')}{key}={text}" for text in texts]


def _applies(text: str, job: Sequence[str]) -> bool:
    """Whether an override of a run is no option, or one that the run's choice of its group has."""
    group, _, option = text.partition("=")[0].partition(".")
    # a model chooses a variant, too
    choices = [x for x in job if x.startswith(("+experiment=", "model=", f"{group}="))]
    return not option or option in (_chosen(tuple(choices)).get(group) or ())


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether overrides are of a sweep without -m: those of an experiment, of `ab=`, or of a sweep that is resumed."""
    return any(text.startswith(("+experiment=", "order=interleaved:", "resume=true")) for text in arguments)


def composed(job: Sequence[str]) -> DictConfig:
    """The configuration of a run."""
    cfg = copy.deepcopy(_chosen(tuple(text for text in job if parse(text).key_or_group in groups())))
    for text in job:
        _set(cfg, text)
    return cfg


@cache
def _chosen(choices: tuple[str, ...]) -> DictConfig:
    """The configuration of these choices of groups, whose composition is slow. Not to be changed."""
    with initialize_config_module("runner.conf", version_base="1.3"):
        return compose("config", overrides=list(choices))


def _set(cfg: DictConfig, text: str) -> None:
    """Give a key its value. Raises InvalidConfig for a key that the configuration lacks, or a value of another type."""
    override = parse(text)
    key, value = override.key_or_group, override.value()
    if key in groups():
        return
    group, _, option = key.partition(".")
    before = OmegaConf.select(cfg, key, default=cfg)
    if before is cfg:
        reason = f"not a key; {nearest(group, [*cfg, *groups()])}"
        if option and OmegaConf.is_dict(cfg.get(group)):
            known = [f"{group}.{name}" for name in cfg[group]]
            reason = f"the chosen {group} has no such option; {nearest(key, known)}"
        raise InvalidConfig(f"{shown(key)}: {reason}")
    try:
        if type(before) is bool and type(value) is int:  # OmegaConf takes any whole number for true
            raise OmegaConfBaseException("must be true or false")
        OmegaConf.update(cfg, key, value)
        after = OmegaConf.select(cfg, key)  # where an interpolation leads
        if OmegaConf.is_dict(before) and not OmegaConf.is_dict(after):
            raise OmegaConfBaseException(f"has keys of its own; give {key}.OPTION=VALUE")
    except OmegaConfBaseException as error:
        reason = shown(str(error).partition("\n")[0])
        raise InvalidConfig(f"{key}={shown(value)}: {reason}; leave it out for the default") from None
