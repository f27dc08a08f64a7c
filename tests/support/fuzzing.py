"""Command lines that nobody would write, and a warm interpreter that answers them: `python fuzzing.py FOLDER` reads argument
lists, a JSON line each, runs the program with each in a fork, stopped before a world would start, and writes how it ended.

As many wrong values of every key as `VALUES` has, misspelt keys, forms that Hydra's grammar has, and combinations."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


# command lines that once ended wrongly
FOUND = [
    ["-m", "config=tiny", "seq_len=128", "seqlens='${nothing}',1"],
    ["config=tiny", "hydra.searchpath=[nope]"],
    ["config=tiny", "seq_len=128", "window=${seq_len}"],
]


def keys() -> tuple[list[str], list[str]]:
    """Every key that has a value, and every group."""
    from omegaconf import OmegaConf

    from runner.config.groups import groups
    from runner.config.overrides import _paths
    from tests.support.composing import composed

    found: Any = OmegaConf.to_container(composed())
    paths = list(_paths(found))
    options = [
        f"attention.{name}"
        for name in ("head_parts", "heads_k_stride", "trials", "memory_gb", "ulysses_size", "reduce")
    ]
    return [p for p in dict.fromkeys([*paths, *options]) if p != "output" and p not in groups()], sorted(groups())


OWNERS = {
    "attention.heads_k_stride": "llama3", "attention.trials": "auto", "attention.memory_gb": "auto",
    "attention.ulysses_size": "usp", "attention.reduce": "tree",
}  # fmt: skip


def misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key))
    return rng.choice(
        [key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "x" + key[at + 1 :], key.upper()]
    )


def cases(seed: int) -> list[list[str]]:
    """All command lines, in an order that the seed determines."""
    rng = random.Random(seed)
    found = list(_cases(rng))
    rng.shuffle(found)
    return found


def _cases(rng: random.Random) -> Iterator[list[str]]:
    tiny = ["config=tiny", "seq_len=128"]
    values, groups = keys()
    for key in values:
        needed = [f"attention={OWNERS[key]}"] if key in OWNERS else []
        for value in VALUES:
            yield [*tiny, *needed, f"{key}={value}"]
        yield ["-m", *tiny, *needed, f"{key}={rng.choice(SWEPT)}"]
        yield [*tiny, f"{misspelt(key, rng)}=1"]
        yield [*tiny, rng.choice(FORMS).format(key=key)]
    for group in groups:
        for value in VALUES:
            yield [*tiny, f"{group}={value}"]
        for form in FORMS:
            yield [*tiny, form.format(key=group)]
    for text in SWEPT:
        for key in ("seq_len", "attention", "seed", "window", "config"):
            yield ["-m", *tiny, f"{key}={text}"]
    for text in (*HYDRA, *OUTPUTS):
        yield [*tiny, text]
        yield ["-m", *tiny, text]
    for flags in FLAGS:
        yield [*tiny, *flags]
        yield flags
    for _ in range(300):
        pairs = [f"{rng.choice(values)}={rng.choice(VALUES)}" for _ in range(rng.randrange(2, 4))]
        yield [*rng.choice([[], ["-m"]]), *tiny, *pairs]


def answer(arguments: list[str], folder: Path) -> dict[str, Any]:
    """How the program ends with these arguments: status, output, errors, CPU seconds."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
            work = folder / "work"
            work.mkdir(exist_ok=True)
            os.chdir(work)
            signal.alarm(60)
            sys.argv = ["runner", *arguments]
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            status = _status()
            sys.stdout.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, ended, used = os.wait4(pid, 0)
    return {
        "status": os.waitstatus_to_exitcode(ended),
        "out": (folder / "out").read_text(errors="replace"),
        "err": (folder / "err").read_text(errors="replace"),
        "cpu_s": used.ru_utime + used.ru_stime,
    }


def _status() -> int:
    from runner.__main__ import main

    try:
        return main()
    except SystemExit as ended:  # as the interpreter takes it
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0


def wrong(found: dict[str, Any], limit_s: float) -> str | None:
    """What is wrong with how the program ended, or None."""
    lines = [line for line in found["err"].splitlines() if line.strip()]
    if found["status"] not in (0, 1, 2):
        return f"ended with {found['status']}"
    if "Traceback" in found["err"] + found["out"]:
        return "a traceback"
    if len(lines) > 1:
        return f"{len(lines)} lines"
    if found["status"] and not lines and not found["out"].strip():
        return "no reason"
    if any(len(line) > 1500 for line in lines):
        return f"a line of {max(map(len, lines))} characters"
    return f"{found['cpu_s']:.1f} s of a CPU" if found["cpu_s"] > limit_s else None


def main(folder: Path) -> None:
    from hydra.core.plugins import Plugins

    from runner import app, environment
    from runner.config import overrides, resolve
    from runner.launch.outcome import Outcome

    app._in_world = lambda *_: Outcome("crash", "stopped before a world started")  # type: ignore[assignment]
    resolve.register()
    Plugins.instance()
    environment.host()
    environment.gpu_count()
    overrides.problem(["config=tiny", "seq_len=128"])
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
