"""Command lines that nobody would write: wrong values of every key, misspelt keys, forms that Hydra's grammar has, and
combinations. What is accepted is stopped before a world would start."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.torture import program

VALUES = (
    "", "null", "true", "abc", "-1", "0", "1.5", "1e308", "nan", "inf", "-inf", "2147483647", "2147483648", "9223372036854775807",
    "99999999999999999999999", "9" * 5000, "x" * 5000, "[]", "[1,[2]]", "[null]", "{}", "{a:1}", "{name:x}", "'???'", "???",
    "${nothing}", "${seq_len}", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${per_rank:abc}", "${run_name:}", "'${x'", "${now:%Y}",
    "'a\nb'", "'a\tb'", "':x:'", "'[red]x[/]'", "'../../x'", "\U0001f600", "\udcff", "'a,b'", "a:b:c", "'%s{}'", "\\", "$(id)", "é",
    "1:timing:raise", "host:99999",
)  # fmt: skip
SWEPT = (
    "1,2", "1,abc", ",", "range(0)", "range(0,10,0)", "range(0,1000000000)", "range(1,inf)", "interval(0,1)", "choice()",
    "choice(1,2)", "glob(tin*)", "glob(x*)", "sort(3,1,2)", "sort(1,a,[2])", "shuffle(1,2)", "tag(a,1)", "extend_list(1)",
    "int(abc)", "json_str(1)", "'${nothing}',1",
)  # fmt: skip
FORMS = (
    "{key}", "+{key}=1", "++{key}=1", "~{key}", "~{key}=1", "{key}", "={key}", "{key}==1", "{key}.x=1", "{key}@a=b", "@{key}=1",
    "{key}:a=b", "{key}[0]=1", ".{key}=1", "{key}.=1", "-{key}=1", "{key} =1", "{key}= 1", "+{key}.new=1",
)  # fmt: skip
HYDRA = (
    "hydra.run.dir=${nothing}", "hydra.run.dir=", "hydra.run.dir=null", "hydra.sweep.dir=null", "hydra.sweep.subdir=${x}",
    "hydra.mode=abc", "hydra.mode=MULTIRUN", "hydra.sweeper.params=3", "hydra.sweeper.max_batch_size=-1", "hydra/launcher=nope",
    "hydra/sweeper=nope", "hydra.callbacks=null", "hydra.callbacks={a:{_target_:nope}}", "hydra.output_subdir=null", "hydra.nope=1",
    "+hydra.nope=1", "hydra=null", "hydra/help=default", "hydra.job.chdir=true", "hydra.job.name=null", "hydra.searchpath=[nope]",
    "hydra.verbose=[1]", "hydra/job_logging=nope", "hydra.job.env_set={A:${x}}", "~hydra", "hydra.sweep.dir=/proc/x",
    "hydra.run.dir=/dev/null", "hydra.run.dir=/dev/null/x",
)  # fmt: skip
FLAGS = (
    ["--cfg", "job"], ["--cfg"], ["--cfg", "nope"], ["--nope"], ["-x"], ["--resolve"], ["--package", "nope"], ["--info", "nope"],
    ["-m", "--cfg", "job"], ["--config-name", "nope"], ["--config-dir", "/nope"], ["--config-path", "nope"], ["--version"], ["--"],
    ["--experimental-rerun", "/nope"], ["-sc"], ["-sc", "nope=bash"], ["-sc", "install=nope"], ["-h"], ["--hydra-help"], ["-m"],
    ["--cfg", "hydra", "--package", "x"], ["--help", "seq_len=abc"],
)  # fmt: skip
OUTPUTS = (
    "output=", "output=null", "output=/dev/null", "output=/proc/x", "output=/nope", "output=" + "x" * 300, "output=" + "y/" * 3000,
    "output='a\nb'", "output=${x}", "output=${oc.env:HOME}/../nope", "output='a b'", "output=[1]", "output=\U0001f600",
)  # fmt: skip
TINY = ["config=tiny", "seq_len=128"]
LEAST_S = 2.0  # of a CPU, and where that is slow
TIMES = 8  # as much as an ordinary command line takes here
LIMIT_S = 120.0


@cache
def keys() -> tuple[list[str], list[str]]:
    """Every key that has a value, and every group."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from runner.config.overrides import groups

    with initialize_config_module("runner.conf", version_base="1.3"):
        found: Any = OmegaConf.to_container(compose("config"))
    paths = [*found, *(f"{group}.{key}" for group, x in found.items() if isinstance(x, dict) for key in x)]
    return [p for p in dict.fromkeys([*paths, *owners()]) if p != "output" and p not in groups()], sorted(groups())


@cache
def owners() -> dict[str, str]:
    """By the key of an option, a variant that has it."""
    from attention.variants.registry import VARIANTS

    return {f"attention.{option}": name for name, v in VARIANTS.items() for option in v.options.names()}


def misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key))
    return rng.choice(
        [key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "x" + key[at + 1 :], key.upper()]
    )


def command_line(rng: random.Random) -> list[str]:
    """A command line that nobody would write."""
    values, groups = keys()
    key, group = rng.choice(values), rng.choice(groups)
    needed = [f"attention={owners()[key]}"] if key in owners() else []
    swept = [key, group, "seq_len", "attention", "seed", "window", "config"]
    pairs = [f"{rng.choice(values)}={rng.choice(VALUES)}" for _ in range(rng.randrange(2, 4))]
    multirun = rng.choice([[], ["-m"]])
    lines = {
        "value": (12, [*TINY, *needed, f"{key}={rng.choice(VALUES)}"]),
        "swept": (2, ["-m", *TINY, *needed, f"{rng.choice(swept)}={rng.choice(SWEPT)}"]),
        "misspelt": (1, [*TINY, f"{misspelt(key, rng)}=1"]),
        "form": (2, [*TINY, rng.choice(FORMS).format(key=rng.choice([key, group]))]),
        "group": (2, [*TINY, f"{group}={rng.choice(VALUES)}"]),
        "hydra": (1, [*multirun, *TINY, rng.choice([*HYDRA, *OUTPUTS])]),
        "flags": (1, [*rng.choice([[], TINY]), *rng.choice(FLAGS)]),
        "pairs": (2, [*multirun, *TINY, *pairs]),
    }
    weights, found = zip(*lines.values(), strict=True)
    return list(rng.choices(found, weights)[0])


def answer(arguments: list[str], folder: Path) -> program.Ended:
    """How the program ends with these arguments."""
    return program.start(folder, _stopped, arguments).wait(LIMIT_S)


def _stopped() -> int:
    from runner import app
    from runner.__main__ import main
    from runner.launch.outcome import Outcome

    app._job = lambda *_: Outcome("crash", "stopped before a world started")  # type: ignore[assignment]
    return main()


@cache
def limit_s() -> float:
    """CPU seconds that a command line may take on this machine."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        usual = [answer(TINY, Path(folder)) for _ in range(2)]
    assert all("stopped before a world" in one.err for one in usual), usual[0]
    return max(LEAST_S, TIMES * min(one.cpu_s for one in usual))


def wrong(ended: program.Ended) -> list[str]:
    """What is wrong with how a command line ended: a known status, at most one line of reason, no traceback, and soon."""
    found = ended.wrong(0, 1, 2)
    lines = [line for line in ended.err.splitlines() if line.strip()]
    if found:
        return found
    if len(lines) > 1:
        found.append(f"{len(lines)} lines: {lines[0][:200]}")
    if ended.status and not lines and not ended.out.strip():
        found.append("no reason")
    if any(len(line) > 1500 for line in lines):
        found.append(f"a line of {max(map(len, lines))} characters")
    if ended.cpu_s > limit_s():
        found.append(f"{ended.cpu_s:.1f} s of a CPU")
    return found
