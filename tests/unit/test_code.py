"""Rules about the code itself, read from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.paths import ROOT

MOST_LINES = 60  # of a function with its decorators, without its docstring

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def within(statement: ast.AST) -> Iterator[Definition]:
    """All functions and classes in the bodies of a statement."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        found = getattr(statement, field, ())
        for each in found if isinstance(found, list) else ():
            if isinstance(each, Definition):
                yield each
            yield from within(each)


@cache
def definitions(folder: str) -> list[tuple[str, Definition]]:
    """The functions and classes of a folder, each with its file."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [(str(path.relative_to(ROOT)), each) for path in files for each in within(ast.parse(path.read_bytes()))]


@pytest.mark.parametrize("folder", ("attention", "runner", "tests"))
def test_no_function_is_longer_than_a_screen(folder):
    found = {}
    for path, each in definitions(folder):
        if not isinstance(each, ast.ClassDef):
            first = min(x.lineno for x in (each, *each.decorator_list))
            documented = each.body[0] if ast.get_docstring(each) else None
            docstring = documented.end_lineno - documented.lineno + 1 if documented and documented.end_lineno else 0
            found[f"{path}:{first} {each.name}"] = (each.end_lineno or first) - first + 1 - docstring
    assert len(found) > 500
    assert not {where: lines for where, lines in found.items() if lines > MOST_LINES}
