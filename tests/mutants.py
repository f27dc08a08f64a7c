"""Breaks functions of the library and the program, one at a time, and says which breaks the tests find.

    python -m tests.mutants --functions 30

Functions are drawn by the commit, but for files that need a GPU. In each, one condition is inverted or one number is another. For all of them
the test files that name the broken module run, then all tests for those that are left. It works on a copy of what is committed."""

import argparse
import ast
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

GPU_ONLY = (
    "attention/gpu/", "attention/kernels/cudnn", "attention/kernels/flash", "attention/kernels/xformers",
    "attention/transports/fabric", "runner/measure/ncu", "runner/peers/",
)  # fmt: skip


def mutants(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(function, node, what replaces its source) of every break."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = [node for statement in function.body for node in ast.walk(statement)]
        for node in inside:
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                yield function.name, node.test, f"(not ({ast.unparse(node.test)}))"
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield function.name, node, f"({node.value!r} + 1)"


def replaced(source: str, node: ast.AST, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    return (source.encode()[:start] + text.encode() + source.encode()[stop:]).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=30)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rng = random.Random(commit.strip())
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        copy, breaks = Path(folder), dict[tuple[Path, str], list[tuple[ast.AST, str]]]()
        for file in sorted([*copy.glob("attention/**/*.py"), *copy.glob("runner/**/*.py")]):
            if not str(file.relative_to(copy)).startswith(GPU_ONLY):
                for name, node, text in mutants(ast.parse(file.read_text())):
                    breaks.setdefault((file, name), []).append((node, text))
        left = [(*place, *rng.choice(breaks[place])) for place in rng.sample(list(breaks), given.functions)]
        for near in True, False:
            left = [mutant for mutant in left if not found(copy, near, *mutant)]
    print(f"{given.functions - len(left)} of {given.functions} found")


def found(copy: Path, near: bool, file: Path, name: str, node: ast.AST, text: str) -> bool:
    """Whether a test fails: of the files that name the broken module, or of all."""
    source, module = file.read_text(), file.relative_to(copy).with_suffix("")
    names = re.compile(rf"\b{'.'.join(module.parts)}\b|from {'.'.join(module.parts[:-1])} import .*\b{module.name}\b")
    naming = sorted(str(test) for test in copy.glob("tests/**/test_*.py") if names.search(test.read_text()))
    if near and not naming:
        return False
    file.write_text(replaced(source, node, text))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "0", "-m", "not nightly and not gpu", *naming] if near else []
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    file.write_text(source)
    by = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or [run.stderr[-300:]]
    if run.returncode or not near:
        what = f"{ast.get_source_segment(source, node)} -> {text}"
        said = f"found by {by[0]}" if run.returncode else "missed"
        print(f"{module}.py:{node.lineno} {name}: {what}: {said}", flush=True)
    return run.returncode != 0


if __name__ == "__main__":
    main()
