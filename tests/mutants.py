"""Breaks functions of the library and the program, one at a time, and says which breaks the tests find.

    python -m tests.mutants --functions 30

Functions are drawn by the commit, but for files that need a GPU. In each, one condition is inverted or one number is another. Tests of the
broken file's folder come first, then all. It works on a copy of the checkout, so files that are not committed are left out."""

import argparse
import ast
import random
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
    parser.add_argument("--skip", type=int, default=0, help="functions of the draw that were tried before")
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
        drawn = rng.sample(list(breaks), given.functions)
        found = 0
        for number, (file, name) in enumerate(drawn):
            node, text = rng.choice(breaks[file, name])
            if number < given.skip:
                continue
            source = file.read_text()
            file.write_text(replaced(source, node, text))
            by = failing(copy, file)
            file.write_text(source)
            found += by is not None
            line = f"{file.relative_to(copy)}:{node.lineno} {name}: {ast.get_source_segment(source, node)} -> {text}"
            print(f"{'found' if by else 'MISSED'}  {line}  {by or ''}", flush=True)
    print(f"{found} of {given.functions - given.skip} found")


def failing(copy: Path, broken: Path) -> str | None:
    """The first failing test, of the nearest folder or of all."""
    near = copy / "tests" / "unit" / broken.parent.relative_to(copy)
    for tests in ([str(near)] if near.is_dir() else []), []:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if run.returncode not in (0, 5):
            lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return lines[0] if lines else run.stdout[-200:] + run.stderr[-200:]
    return None


if __name__ == "__main__":
    main()
