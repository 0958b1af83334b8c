"""What the process inherits decides no exit: a notebook's backend, a matplotlibrc of the user,
Python's optimizations.

Row of the faults: the ambient process decides the exit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from perfbench.commands import app

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "data" / "runs" / "h100-demo" / "green"
NOTEBOOK = "module://matplotlib_inline.backend_inline"


def called(folder: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "perfbench", *argv]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, bytes]:
    """Exit and picture of a process that inherits nothing."""
    folder = tmp_path_factory.mktemp("plain")
    done = called(folder, "report", str(RUN), "--out", "out")
    return done.returncode, (folder / "out" / "throughput.png").read_bytes()


@pytest.mark.parametrize(
    ("rc", "variables"),
    [
        ("", {"MPLBACKEND": NOTEBOOK}),
        ("", {"MPLBACKEND": "no such backend"}),
        ("text.usetex: True\n", {}),
        ("axes.prop_cycle: cycler('color', ['r'])\nfont.size: 40\nsavefig.dpi: 10\n", {}),
        ("", {"PYTHONOPTIMIZE": "1"}),
    ],
)
def test_the_exit_and_the_pictures_are_those_of_a_plain_process(
    plain: tuple[int, bytes], tmp_path: Path, rc: str, variables: dict[str, str]
) -> None:
    (tmp_path / "matplotlibrc").write_text(rc, encoding="utf-8")
    done = called(tmp_path, "report", str(RUN), "--out", "out", **variables)
    assert done.returncode == plain[0], done.stderr
    assert (tmp_path / "out" / "throughput.png").read_bytes() == plain[1]


def test_where_nothing_can_be_drawn_the_report_says_so(
    plain: tuple[int, bytes], tmp_path: Path
) -> None:
    """A matplotlibrc that is no UTF-8 stops matplotlib's import."""
    (tmp_path / "matplotlibrc").write_bytes(b"font.size: \xff\n")
    done = called(tmp_path, "report", str(RUN), "--out", "out")
    assert done.returncode == plain[0], done.stderr
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "no picture can be drawn here: UnicodeDecodeError" in text
    assert not list((tmp_path / "out").glob("*.png"))


def test_every_matrix_is_read_under_python_o(tmp_path: Path) -> None:
    done = called(tmp_path, "plan", str(ROOT / "matrices" / "cpu.yaml"), PYTHONOPTIMIZE="1")
    assert done.returncode == 0 and "cells" in done.stdout, done.stderr


def test_no_assert_does_work() -> None:
    """PYTHONOPTIMIZE=1 leaves asserts out: none may take what an iterator holds, or store."""
    takers = {"next", "pop", "popitem", "read", "readline", "send", "setdefault", "remove"}
    found = [
        f"{path.relative_to(ROOT)}:{one.lineno}"
        for folder in ("perfbench", "nsa")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.Assert)
        for part in ast.walk(one.test)
        if isinstance(part, ast.NamedExpr)
        or (isinstance(part, ast.Call) and _name(part.func) in takers)
    ]
    assert found == []


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def test_a_fault_of_the_drawing_library_costs_only_the_picture(
    plain: tuple[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def broken(self: Figure, *arguments: object, **options: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(Figure, "savefig", broken)
    assert app.invoke(["report", str(RUN), "--out", str(tmp_path)]) == plain[0]
    assert "RuntimeError: no font" in (tmp_path / "report.md").read_text(encoding="utf-8")
