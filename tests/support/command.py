"""The program in a process of its own, and what it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.composing import apart

SMALL = [
    "seq_len=128",
    "batch=1",
    "heads=2",
    "kv_heads=2",
    "head_dim=32",
    "timing.timing_runs=3",
    "timing.warmup_runs=1",
]


def environment(tmp_path):
    return {**os.environ, "TEST_OUTPUT": str(tmp_path)}


def run(tmp_path, *arguments, small=True, timeout=300, variables=(), stdout=subprocess.PIPE, **options):
    command = [sys.executable, "-m", "runner", f"output={tmp_path}", *(SMALL if small else []), *apart(arguments)]
    env = environment(tmp_path) | dict(variables)
    streams = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(command, timeout=timeout, env=env, **streams, **options)


def results_in(tmp_path):
    return {p.parent.name: json.loads(p.read_text()) for p in sorted(Path(tmp_path).glob("**/result.json"))}


def only(tmp_path):
    (value,) = results_in(tmp_path).values()
    return value


def started_by(tmp_path):
    """Living processes that a program run with `output=tmp_path` started: they inherit its environment."""
    mark = f"TEST_OUTPUT={tmp_path}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
