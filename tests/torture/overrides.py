"""Command lines that nobody would write: wrong values of every key, misspelt keys, forms that Hydra's grammar has, and
combinations. What is accepted is stopped before a world would start."""

from functools import cache

from omegaconf import OmegaConf

from attention.variants.registry import VARIANTS
from runner.config.overrides import composed
from runner.config.schema import groups
from tests.torture import program

VALUES = (
    "", "null", "true", "abc", "-1", "0", "1e308", "nan", "inf", "9223372036854775807",
    "99999999999999999999999", "9" * 5000, "x" * 5000, "[]", "[1,[2]]", "[null]", "{}", "{a:1}", "{name:x}", "'???'", "???",
    "${nothing}", "${seq_len}", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${per_rank:abc}", "${run_name:}", "'${x'", "${now:%Y}",
    "'a\nb'", "'a\tb'", "':x:'", "'../../x'", "\U0001f600", "\udcff", "'a,b'", "'%s{}'", "\\", "$(id)", "é",
    "1:timing:raise", "host:99999",
)  # fmt: skip
SWEPT = (
    "1,2", "1,abc", ",", "range(0)", "range(0,10,0)", "range(0,1000000000)", "range(1,inf)", "interval(0,1)", "choice()",
    "glob(tin*)", "glob(x*)", "sort(3,1,2)", "shuffle(1,2)", "extend_list(1)",
    "json_str(1)", "'${nothing}',1",
)  # fmt: skip
FORMS = (
    "{key}", "+{key}=1", "++{key}=1", "~{key}", "~{key}=1", "={key}", "{key}==1", "{key}.x=1", "{key}@a=b", "@{key}=1",
    "{key}:a=b", "{key}[0]=1", ".{key}=1", "{key}.=1", "{key} =1", "{key}= 1", "+{key}.new=1",
)  # fmt: skip
HYDRA = (
    "hydra.sweep.dir=null", "hydra.sweep.subdir=${x}", "hydra.mode=abc", "hydra/launcher=nope", "hydra.callbacks={a:{_target_:nope}}",
    "hydra.nope=1", "+hydra.nope=1", "hydra=null", "hydra.searchpath=[nope]", "hydra/job_logging=nope", "~hydra",
    "hydra.sweep.dir=/proc/x", "hydra.launcher.nope=1",
)  # fmt: skip
FLAGS = (
    "--cfg job", "--cfg nope", "--nope", "-x", "--resolve", "--package nope", "--info nope", "-m --cfg job", "--config-name nope",
    "--config-dir /nope", "--config-path nope", "--version", "--", "-sc nope=bash", "-sc install=nope",
    "-h", "-m", "--cfg hydra --package x", "--help seq_len=abc",
)  # fmt: skip
OUTPUTS = (
    "output=", "output=null", "output=/dev/null", "output=/proc/x", "output=" + "x" * 300, "output=" + "y/" * 3000,
    "output='a\nb'", "output=${x}", "output=${oc.env:HOME}/../nope", "output='a b'", "output=[1]", "output=\U0001f600",
)  # fmt: skip
TINY = ["config=tiny", "seq_len=128"]
MOST_S = 20.0  # of a CPU, imports included


STOPPED = """
from runner import app
from runner.__main__ import main
from runner.launch.outcome import Outcome
app._job = lambda *_: Outcome("crash", "stopped before a world started")
raise SystemExit(main())
"""


@cache
def keys():
    """Every key that has a value, and every group."""
    cfg = OmegaConf.to_container(composed([]))
    paths = [*cfg, *(f"{group}.{key}" for group, x in cfg.items() if isinstance(x, dict) for key in x), *owners()]
    return [p for p in dict.fromkeys(paths) if p != "output" and p not in groups()], sorted(groups())


@cache
def owners():
    """By the key of an option, a variant that has it."""
    return {f"attention.{option}": name for name, v in VARIANTS.items() for option in v.options.names()}


def command_line(rng):
    """A command line that nobody would write."""
    values, groups = keys()
    key, group = rng.choice(values), rng.choice(groups)
    needed = [f"attention={owners()[key]}"] if key in owners() else []
    swept = [key, group, "seq_len", "attention", "seed", "window", "config"]
    pairs = [f"{rng.choice(values)}={rng.choice(VALUES)}" for _ in range(rng.randrange(2, 4))]
    at = rng.randrange(len(key))
    lines = {
        12: [*TINY, *needed, f"{key}={rng.choice(VALUES)}"],
        6: ["-m", *TINY, *needed, f"{rng.choice(swept)}={rng.choice(SWEPT)}"],
        2: [*TINY, f"{key[:at]}x{key[at + 1 :]}=1"],
        4: [*TINY, rng.choice(FORMS).format(key=rng.choice([key, group]))],
        5: [*TINY, f"{group}={rng.choice(VALUES)}"],
        3: [*rng.choice([[], ["-m"]]), *TINY, rng.choice([*HYDRA, *OUTPUTS])],
        1: [*rng.choice([[], TINY]), *rng.choice(FLAGS).split()],
        7: [*rng.choice([[], ["-m"]]), *TINY, *pairs],
    }
    return list(rng.choices(list(lines.values()), list(lines))[0])


def answer(arguments, folder):
    """How the program ends with these arguments, stopped before a world starts."""
    return program.start(folder, ["-c", STOPPED, *arguments]).wait(120.0)


def wrong(ended):
    """What is wrong with how a command line ended: a known status, at most one line of reason, no traceback, and soon."""
    lines = [line for line in ended.err.splitlines() if line.strip()]
    wrong = ended.wrong(0, 1, 2)
    if len(lines) > 1 or any(len(line) > 1500 for line in lines):
        wrong.append(f"{len(lines)} lines: {ended.err[:200]}")
    if ended.status and not lines and not ended.out.strip():
        wrong.append("no reason")
    return wrong + [f"{ended.cpu_s:.1f} s of a CPU"] * (ended.cpu_s > MOST_S)
