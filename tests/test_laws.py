"""Laws of the house that ruff and import-linter cannot express, read from the syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted([*ROOT.glob("nsa/**/*.py"), *ROOT.glob("perfbench/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))
MAY_READ_ENVIRONMENT = {"nsa/settings.py", "perfbench/environment.py"}
MAX_LINES = 600  # a file is one idea; beyond this it is rarely one


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported dotted name with its line, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def is_causal_uses(tree: ast.AST) -> list[int]:
    """Lines that pass ``is_causal``, name a parameter so, or read an attribute of that name."""
    found = [
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.arg == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "is_causal"
    ]
    keys = [
        key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys
    ]  # **{"is_causal": True}
    return found + [
        key.lineno for key in keys if isinstance(key, ast.Constant) and key.value == "is_causal"
    ]


def environment_uses(tree: ast.AST) -> list[int]:
    """Lines that reach the process's environment through os, whatever they call it."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    found = [line for name, line in imports(tree) if name in {f"os.{n}" for n in names}]
    return found + [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names
    ]


def selected_paths(tree: ast.AST) -> list[int]:
    """Lines that import the registry of selected paths, or a path; what paths are made of is
    neither.
    """
    parts = ("nsa.ops.selected.gathered_rows", "nsa.ops.selected.triton.kernels")
    return [
        line
        for name, line in imports(tree)
        if name.startswith("nsa.ops.selected") and not name.startswith(parts)
    ]


def broad_catches(tree: ast.AST) -> list[int]:
    """Handlers of everything, however spelled: a bare except, Exception, BaseException,
    contextlib.suppress(Exception).
    """
    broad = ("Exception", "BaseException")

    def is_broad(node: ast.expr | None) -> bool:
        if isinstance(node, ast.Tuple):
            return any(is_broad(element) for element in node.elts)
        return isinstance(node, ast.Name) and node.id in broad

    found = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.ExceptHandler) and (n.type is None or is_broad(n.type))
    ]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return found + [
        c.lineno
        for c in calls
        if ast.unparse(c.func).endswith("suppress") and any(is_broad(a) for a in c.args)
    ]


def hidden_skips(tree: ast.AST) -> list[int]:
    """Uses of skip, importorskip and xfail: a test that does not run must not look like one that
    passed.
    """
    names = ("skip", "importorskip", "xfail")
    return [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and n.attr in names and "pytest" in ast.unparse(n)
    ]


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS], ids=name_of)
def test_is_causal_is_banned(path: Path) -> None:
    """Its corner depends on the library when T != S; ops/sdpa.py is the one place that knows
    which.
    """
    if name_of(path) != "nsa/ops/sdpa.py":
        assert is_causal_uses(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_environment_is_read_in_two_files(path: Path) -> None:
    if name_of(path) not in MAY_READ_ENVIRONMENT:
        assert environment_uses(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_broad_catch(path: Path) -> None:
    assert broad_catches(tree_of(path)) == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_hidden_skip(path: Path) -> None:
    assert hidden_skips(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_files_stay_small(path: Path) -> None:
    if path.stem != "kernels":
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_one_door(path: Path) -> None:
    """Only dispatch reaches the registry of selected paths, and only dispatch records
    engagement.
    """
    if name_of(path) == "nsa/dispatch.py" or "selected" in path.parts:
        return
    tree = tree_of(path)
    assert selected_paths(tree) == []
    records = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "engagement.record"
    ]
    assert records == []


@pytest.mark.parametrize(
    ("checker", "violation"),
    [
        (is_causal_uses, "sdpa(q, k, v, is_causal=True)"),
        (is_causal_uses, "sdpa(q, k, v, **{'is_causal': True})"),
        (is_causal_uses, "def f(q, is_causal): ..."),
        (environment_uses, "import os\nos.environ['A']"),
        (environment_uses, "from os import environ as e"),
        (environment_uses, "from os import getenv"),
        (environment_uses, "import os as o\no.getenv('A')"),
        (broad_catches, "try: f()\nexcept Exception: pass"),
        (broad_catches, "try: f()\nexcept: raise"),
        (broad_catches, "try: f()\nexcept (ValueError, Exception): pass"),
        (broad_catches, "with contextlib.suppress(BaseException): f()"),
        (selected_paths, "from nsa.ops.selected import PATHS"),
        (selected_paths, "from nsa.ops import selected"),
        (selected_paths, "from nsa.ops.selected.triton import attend"),
        (selected_paths, "import nsa.ops.selected.v2"),
        (hidden_skips, "pytest.importorskip('flash_attn')"),
        (hidden_skips, "@pytest.mark.xfail\ndef test(): ..."),
    ],
)
def test_checkers_see_what_they_ban(checker, violation: str) -> None:
    assert checker(ast.parse(violation)) != []


def loaded_by(module: str) -> set[str]:
    """Top-level packages in sys.modules after importing ``module`` in a fresh interpreter."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
    )


def test_help_loads_nothing_heavy() -> None:
    """What keeps `perfbench --help` under half a second, without a stopwatch."""
    assert (
        loaded_by("perfbench.cli")
        & {"torch", "numpy", "pandas", "matplotlib", "scipy", "pydantic", "ruamel", "rich"}
        == set()
    )


@pytest.mark.parametrize(
    "module",
    [
        "nsa.routing",
        "nsa.config",
        "nsa.blocks",
        "nsa.settings",
        "nsa.capability",
        "perfbench.matrix",
        "perfbench.plan",
    ],
)
def test_deciding_needs_no_torch(module: str) -> None:
    assert loaded_by(module) & {"torch", "numpy", "pandas", "matplotlib"} == set()


@pytest.mark.parametrize(
    "module", ["perfbench.gate", "perfbench.baseline", "perfbench.runfile", "perfbench.report"]
)
def test_judging_needs_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(module)


def test_the_map_of_perfbench_names_every_module() -> None:
    told = (ROOT / "perfbench" / "__init__.py").read_text(encoding="utf-8")
    modules = {
        path.stem
        for path in (ROOT / "perfbench").iterdir()
        if path.suffix == ".py" or path.name == "report"
    }
    missing = sorted(
        name
        for name in modules - {"__init__", "__main__"}
        if f"``{name}``" not in told and not name.startswith("doctor_")
    )
    assert not missing, f"perfbench/__init__.py does not say what these are for: {missing}"
