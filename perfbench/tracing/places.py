"""Where in the measured package the rows of a trace are defined: by reading its files, since the
package of another version cannot be imported here.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from perfbench.machine import PACKAGE
from perfbench.matrix import NAMESPACE

# Of nsa.ops.operator: the first argument names the operator, the third is its formula.
_DEFINES = ("define_operator", "define_formula")
_BACKWARD = "_backward"  # the second operator of a define_operator with a Backward
_NAMED_BY = "named_by"  # a kernel's name as it is shown: (begin, marks between, end)


class CodePlace(BaseModel):
    """``file``: from the folder that holds the package, with '/'. ``function``: empty where the
    line defines the row, else the one that called it.
    """

    model_config = ConfigDict(frozen=True)
    module: str
    file: str
    line: int = Field(ge=1)
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @classmethod
    def of_caller(cls, text: str) -> Self | None:
        """'nsa/FILE.py:LINE FUNCTION', as a trace stores it; None where it is none."""
        found = re.fullmatch(r"([^:]+\.py):([1-9]\d{0,8}) (.*)", text)
        if found is None:
            return None
        file, line, function = found.groups()
        return cls(module=_module_of(file), file=file, line=int(line), function=function)


def caller_that_grew(mine: Mapping[str, int], theirs: Mapping[str, int]) -> CodePlace | None:
    """Of the lines that called a row on one side, that of the function whose calls exceed the other
    side's most; among equals the one with the most calls.
    """
    others = Counter[tuple[str, str]]()
    for text, calls in theirs.items():
        if (place := CodePlace.of_caller(text)) is not None:
            others[place.file, place.function] += calls
    found = [
        (calls - others[place.file, place.function], calls, text, place)
        for text, calls in mine.items()
        if (place := CodePlace.of_caller(text)) is not None
    ]
    return max(found, key=lambda one: one[:3])[3] if found else None


class CodePlaces:
    """The kernels and operators that one version of the package defines: (begin, end) of a name,
    with what is between them left open where ``end`` is not null.
    """

    def __init__(self, found: Mapping[tuple[str, str | None], CodePlace]) -> None:
        self._found = found

    def of_rows(self, names: Iterable[str]) -> dict[str, CodePlace]:
        """Those of the rows ``names`` that the package defines."""
        return {name: place for name in names if (place := self._of(name)) is not None}

    def _of(self, name: str) -> CodePlace | None:
        if (name, None) in self._found:
            return self._found[name, None]
        fits = [
            (len(begin) + len(end), place)
            for (begin, end), place in self._found.items()
            if end is not None and name.startswith(begin) and name[len(begin) :].endswith(end)
        ]
        return max(fits, key=lambda one: one[0])[1] if fits else None


def places_in(folder: Path) -> CodePlaces:
    """Of ``folder``/nsa. A file that cannot be read or parsed defines nothing."""
    found: dict[tuple[str, str | None], CodePlace] = {}
    for path in sorted((folder / PACKAGE).rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        file = path.relative_to(folder).as_posix()
        for name, line in _definitions(tree):
            found.setdefault(name, CodePlace(module=_module_of(file), file=file, line=line))
    return CodePlaces(found)


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _definitions(tree: ast.Module) -> Iterator[tuple[tuple[str, str | None], int]]:
    """(begin and end of the name, line) of every kernel and operator of a file."""
    functions = {one.name: one.lineno for one in tree.body if isinstance(one, ast.FunctionDef)}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef):
            yield from _kernels(one)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _text(call.args, 0)
        if _called(call) not in _DEFINES or not name:
            continue
        yield (f"{NAMESPACE}{name}", None), _line_of(call.args, 2, functions, call)
        backward = call.args[4] if len(call.args) > 4 else None
        if isinstance(backward, ast.Call):  # of (schema, formula, ...)
            line = _line_of(backward.args, 1, functions, call)
            yield (f"{NAMESPACE}{name}{_BACKWARD}", None), line


def _kernels(one: ast.FunctionDef) -> Iterator[tuple[tuple[str, str | None], int]]:
    """The names of a kernel: its function's, and what its `repr` shows."""
    for decorator in (each for each in one.decorator_list if _called(each) == "jit"):
        yield (one.name, None), one.lineno
        for call in (node for node in ast.walk(decorator) if isinstance(node, ast.Call)):
            if _called(call) == _NAMED_BY and (begin := _text(call.args, 0)):
                yield (begin, _text(call.args, 2)), one.lineno


def _line_of(
    arguments: list[ast.expr], place: int, functions: Mapping[str, int], call: ast.Call
) -> int:
    """The line of the function that an argument names, or of the call that registers it."""
    one = arguments[place] if len(arguments) > place else None
    return functions.get(one.id, call.lineno) if isinstance(one, ast.Name) else call.lineno


def _called(node: ast.expr) -> str:
    """'jit' of `triton.jit` and of `triton.jit(...)`."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(arguments: list[ast.expr], place: int) -> str:
    """An argument that is a text as written; empty for any other."""
    one = arguments[place] if len(arguments) > place else None
    return one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""
