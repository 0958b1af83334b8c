"""tests/data/faults.toml: every kind of fault that users met has tests, which exist and name it."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KINDS = {"nsa": 19, "perfbench": 14}
ROWS: list[dict[str, Any]] = tomllib.loads(
    (ROOT / "tests" / "data" / "faults.toml").read_text(encoding="utf-8")
)["row"]


@functools.cache
def module_of(file: str) -> ast.Module | None:
    path = ROOT / file
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def complaint(test: str) -> str | None:
    """What is wrong with ``FILE::FUNCTION`` or ``FILE::FUNCTION[CASE]``; None where it exists.

    Each part of a case is a text of its module, or an argument's name and a number, as pytest
    writes them.
    """
    match = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)(?:\[(.+)\])?", test)
    if match is None:
        return f"{test!r} is no test id"
    file, name, case = match.groups()
    module = module_of(file)
    if module is None:
        return f"{file} does not exist"
    function = function_of(module, name)
    if function is None:
        return f"{file} has no {name}"
    texts = {n.value for n in ast.walk(module) if isinstance(n, ast.Constant)}
    words = {str(text) for text in texts}
    arguments = {one.arg for one in function.args.args}
    parts = [] if case is None or case in words else case.split("-")
    if case is not None and not function.decorator_list:
        return f"{name} has no cases"
    for part in parts:
        if part not in words and part.rstrip("0123456789") not in arguments:
            return f"{name} has no case {part!r}"
    return None


def function_of(module: ast.Module, name: str) -> ast.FunctionDef | None:
    found = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[0] if found else None


def names_its_kind(test: str, named: str) -> bool:
    """Whether the docstring of the test, or of its module, names the kind of fault."""
    file, _, name = test.partition("::")
    module = module_of(file)
    assert module is not None
    function = function_of(module, name.partition("[")[0])
    docstrings = [ast.get_docstring(x) or "" for x in (function, module) if x is not None]
    return any(
        re.search("FAULTS|Row of the faults", text) and named in " ".join(text.split())
        for text in docstrings
    )


def faults_of(row: dict[str, Any]) -> list[str]:
    """What is missing in one kind."""
    instances, more = row["instance"], set(row["more"]) - set(row["instance"])
    found = [text for test in (*instances, *more) if (text := complaint(test)) is not None]
    if not instances:
        found.append("no test of what was found")
    if len(more) < 2:
        found.append(f"{len(more)} more instances; wanted two")
    if not found and not any(names_its_kind(test, row["named"]) for test in instances):
        found.append(f"no test of it names {row['named']!r}")
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row["named"] for row in ROWS])
def test_each_kind_of_fault_has_its_tests(row: dict[str, Any]) -> None:
    assert row["kind"] and faults_of(row) == []


def test_no_kind_is_left_out() -> None:
    for package, count in KINDS.items():
        assert len({r["named"] for r in ROWS if r["package"] == package}) == count
    assert len(ROWS) == sum(KINDS.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instance": []}, "no test of what was found"),
        ({"more": []}, "0 more instances"),
        ({"more": ["tests/test_faults.py::test_no_kind_is_left_out"]}, "1 more instances"),
        ({"instance": ["tests/test_faults.py::test_gone"]}, "has no test_gone"),
        ({"instance": ["tests/test_gone.py::test_x"]}, "does not exist"),
        ({"instance": ["test_faults.py"]}, "is no test id"),
        ({"named": "another kind"}, "names 'another kind'"),
        (
            {"instance": ["tests/nsa/test_somebodys_model.py::test_ids_may_be_int32[x]"]},
            "has no cases",
        ),
        (
            {"instance": [ROWS[0]["instance"][0].replace("adapter", "adaptor")]},
            "has no case 'adaptor'",
        ),
    ],
)
def test_a_row_that_lacks_something_is_red(change: dict[str, Any], words: str) -> None:
    found = faults_of(ROWS[0] | change)
    assert len(found) == 1 and words in found[0]
