"""The overrides of a command: one pass parses, checks and expands them into runs, each a tuple of overrides. `composed` is the
configuration of a run. Hydra composes the choices of groups; OmegaConf's types refuse values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from itertools import islice, product
from math import prod

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attention.errors import nearest
from runner.config import resolve  # noqa: F401 (it registers the schema)
from runner.config.schema import CONF, LEFT_OUT, UNMEASURED, groups
from runner.config.values import InvalidConfig, message, one_of, shown

HYDRA = ("hydra.sweep.dir", "hydra/launcher", "hydra.launcher.")  # its keys that are used here
MOST_CHARACTERS = 10_000  # of an override: the time of Hydra's parser is quadratic in a list's values
MOST_RUNS = 10_000  # of a sweep


@cache
def parse(text: str) -> Override:
    """Raises InvalidConfig for a text that is no override."""
    if len(text) > MOST_CHARACTERS:
        raise InvalidConfig(
            f"{shown(text)}: {len(text):,} characters; an override has at most {MOST_CHARACTERS:,}; give fewer values, "
            "or seqlens=random"
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
    by_key = {
        parse(text).key_or_group: values(text, multirun) for text in arguments if not text.lstrip("+").startswith(HYDRA)
    }
    for text in by_key.get("experiment", ()):
        cfg = OmegaConf.load(CONF / "experiment" / f"{text.partition('=')[2]}.yaml")
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or OmegaConf.create()
        swept = [f"{key!s}={value}" for key, value in params.items_ex(resolve=False)]
        by_key = {parse(text).key_or_group: values(text, multirun) for text in swept} | by_key
    if (number := prod(map(len, by_key.values()))) > MOST_RUNS:
        raise InvalidConfig(f"{number:,} runs; a sweep has at most {MOST_RUNS:,}; give fewer values")
    runs = list(dict.fromkeys(tuple(x for x in job if _applies(x, job)) for job in product(*by_key.values())))
    for texts in by_key.values():
        cfg = composed(next((job for job in runs if texts[0] in job), runs[0]))
        for text in texts:
            _set(cfg, text)
    return runs


def values(text: str, multirun: bool) -> list[str]:
    """An override for each value."""
    override = parse(text)
    key = override.key_or_group
    if override.get_key_element().lstrip("+") != key:
        raise InvalidConfig(f"{shown(text)}: every run has one {key}; write {key}=VALUE")
    if not override.is_sweep_override():
        texts = [override.get_value_element_as_str()]
    elif isinstance(pattern := override.value(), Glob):
        texts = pattern.filter(groups().get(key, []))
    elif isinstance(pattern, RangeSweep) and pattern.step and not pattern.shuffle:  # it may have billions
        texts = list(islice(override.sweep_string_iterator(), MOST_RUNS + 1))
    else:  # an interval has any number
        texts = list(override.sweep_string_iterator()) if isinstance(pattern, ChoiceSweep) else []
    if not texts:
        raise InvalidConfig(f"{shown(text)}: a sweep over no list of values; write {key}=VALUE,VALUE")
    if len(texts) > 1 and (key in UNMEASURED or not multirun):
        raise InvalidConfig(
            f"{shown(text)}: several values are a sweep; add -m, or call runner.multirun; what changes nothing measured, "
            f"as {UNMEASURED[0]}, has one value"
        )
    if key == "topology":  # a group that no run has
        raise InvalidConfig(f"{shown(text)}: {LEFT_OUT[key]}")
    if key in groups():
        texts = [one_of(key, name, groups()[key]) for name in texts]
    return [f"{'+' * (key == 'experiment')}{key}={value}" for value in texts]


def _applies(text: str, job: Sequence[str]) -> bool:
    """Whether an override of a run is no option, or one that the run's choice of its group has."""
    group, _, option = text.partition("=")[0].partition(".")
    # a model chooses a variant, too
    choices = tuple(x for x in job if x.startswith(("+experiment=", "model=", f"{group}=")))
    return not option or option in (_chosen(choices).get(group) or ())


def composed(job: Sequence[str]) -> DictConfig:
    """The configuration of a run."""
    cfg = copy.deepcopy(_chosen(tuple(text for text in job if parse(text).key_or_group in groups())))
    for text in job:
        _set(cfg, text)
    return cfg


@cache
def _chosen(choices: tuple[str, ...]) -> DictConfig:
    """The configuration of these choices of groups, whose composition is slow. Not to be changed."""
    try:
        with initialize_config_module("runner.conf", version_base="1.3"):
            return compose("config", overrides=list(choices))
    except HydraException as error:  # in a file of conf/
        raise InvalidConfig(message(error)) from None


def _set(cfg: DictConfig, text: str) -> None:
    """Give a key its value. Raises InvalidConfig for a key that the configuration lacks, or a value of another type."""
    override = parse(text)
    key, value = override.key_or_group, override.value()
    if key in groups():
        return
    group, _, option = key.partition(".")
    node, name = (cfg[group], option) if OmegaConf.is_dict(cfg.get(group)) else (cfg, group)
    if name not in node:
        reason = f"not a key that these choices have; {nearest(shown(name), map(str, node))}"
        raise InvalidConfig(f"{shown(key)}: {LEFT_OUT.get(key, LEFT_OUT.get(group, reason))}")
    try:
        if type(node[name]) is bool and type(value) is int:  # OmegaConf takes any whole number for true
            raise OmegaConfBaseException("must be true or false")
        OmegaConf.update(cfg, key, value)
        OmegaConf.select(cfg, key, throw_on_missing=True)  # where an interpolation leads
    except OmegaConfBaseException as error:
        reason = shown(str(error).partition("\n")[0])
        raise InvalidConfig(f"{key}={shown(value)}: {reason}; leave it out for the default") from None
