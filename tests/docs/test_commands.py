"""Every command in README.md and docs/ runs, or its options at least exist.

Blocks without a mark are run in a copy of the checkout's layout; what needs a GPU, a network or
minutes is parsed by the command line's own parser, so that a renamed option is red.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from nsa.cli import app as nsa_app
from nsa.train.cli import app as train_app
from nsa.train.cli import completed
from perfbench.commands.app import app as perfbench_app
from tests.docs.blocks import (
    MARKS,
    PAGES,
    PYTHON,
    REASONS,
    ROOT,
    SHELL,
    Block,
    arguments_to,
    blocks_of,
    calls_of,
    spans_of,
)

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNABLE = [block for block in BLOCKS if block.language in SHELL and "needs" not in block.marks]
COMMANDS = [
    (f"{block.id} {command}", command)
    for block in BLOCKS
    if block.language in SHELL
    for command in block.commands
]
SPANS = [
    (f"{page.name}:{line} {span}", span)
    for page in PAGES
    for line, span in spans_of(page)
    if re.match(r"--\w|([A-Z_]\w*=\S+ )*(\S*/)?(perfbench|python|nox) ", span)
]
LINKED = (
    "matrices",
    "configs",
    "examples",
    "tests",
    "nsa",
    "perfbench",
    "tools",
    "docs",
    "README.md",
)
# typer's own copy of click is private; its public exceptions lead to it.
UsageError = typer.BadParameter.__mro__[1]
App = Any  # a typer group, which has `commands`, or a command
WIDTH = 100  # columns of a terminal, in what is shown


def sandbox(folder: Path) -> Path:
    """A folder that looks like the checkout; what a command writes stays in it."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "reports").mkdir()
    for entry in (ROOT / "reports").iterdir():
        if entry.name != "runs":
            (folder / "reports" / entry.name).symlink_to(entry)
    programs = folder / "bin"
    programs.mkdir()
    for name, start in (("perfbench", "-m perfbench "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
        (programs / name).chmod(0o755)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One shell line in a `sandbox`, with `perfbench` and `python` of this environment."""
    setup = [
        f'PATH="{folder}/bin:$PATH"',
        f'PYTHONPATH="{ROOT}"',
        f"COLUMNS={WIDTH}",
        "NO_COLOR=1",
        "OMP_NUM_THREADS=1",
    ]
    return subprocess.run(
        ["bash", "-c", f"export {' '.join(setup)}\n{command}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,  # of what hangs
        check=False,
    )


@functools.cache
def apps() -> dict[str, App]:
    """The command lines by name."""
    return {
        "perfbench": typer.main.get_command(perfbench_app),
        "nsa": typer.main.get_command(nsa_app),
        "nsa.train": typer.main.get_command(train_app),
    }


def parse(app: App, arguments: Sequence[str], *, whole: bool = True) -> None:
    """AssertionError unless ``app`` has that command with those options; nothing is run.

    Without ``whole`` arguments may be missing, as in running text.
    """
    rest = [word.strip("[]") for word in arguments]
    while hasattr(app, "commands"):
        if not rest:
            assert not whole, "no command is named"
            return
        name = rest.pop(0)
        assert name in app.commands, f"no command {name}; there are {', '.join(app.commands)}"
        app = app.commands[name]
    try:
        app.make_context(app.name, rest)
    except UsageError as error:
        missing = type(error).__name__ == "MissingParameter"
        assert missing and not whole, f"{app.name}: {error}"


def test_pages_hold_blocks_of_every_kind() -> None:
    """What follows is parametrized over them: none is a failure."""
    assert {"sh", "console", "python", "yaml"} <= {block.language for block in BLOCKS}
    assert len(RUNNABLE) >= 5 and len(COMMANDS) >= 30 and len(SPANS) >= 30


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_marks_are_known(block: Block) -> None:
    assert set(block.marks) <= set(MARKS)
    assert block.marks.get("needs", "gpu") in REASONS


@pytest.mark.parametrize(
    "block",
    [block for block in RUNNABLE if block.language != "console"],
    ids=lambda block: block.id,
)
def test_block_runs(block: Block, tmp_path: Path) -> None:
    folder = sandbox(tmp_path)
    *before, last = block.commands
    for command, code in [*((line, 0) for line in before), (last, int(block.marks.get("exit", 0)))]:
        done = run(command, folder)
        assert done.returncode == code, f"$ {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize(
    "block",
    [block for block in RUNNABLE if block.language == "console"],
    ids=lambda block: block.id,
)
def test_shown_output_is_what_is_printed(block: Block, tmp_path: Path) -> None:
    """`python -m tests.docs.update` writes today's output into the pages."""
    assert replayed(block, tmp_path) == block.exchanges


def replayed(block: Block, folder: Path) -> list[tuple[str, str]]:
    """Each command of a console block with its stdout today; `echo $?` shows the exit before."""
    sandbox(folder)
    answers, code = [], 0
    for command, _ in block.exchanges:
        if command == "echo $?":
            answers.append((command, str(code)))
            continue
        done = run(command, folder)
        code = done.returncode
        answers.append((command, done.stdout.rstrip("\n")))
    return answers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page build on one another."""
    monkeypatch.chdir(sandbox(tmp_path))
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.language == PYTHON and "needs" not in block.marks:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == PYTHON], ids=lambda block: block.id
)
def test_python_names_what_there_is(block: Block) -> None:
    """Also of blocks that are not run: they parse."""
    ast.parse(block.text)


@pytest.mark.parametrize("command", [c for _, c in COMMANDS], ids=[name for name, _ in COMMANDS])
def test_commands_of_blocks_exist(command: str) -> None:
    """Programs, options, modules, files and nox sessions that a block names."""
    for call in calls_of(command):
        check_call(call, whole=True)


@pytest.mark.parametrize("span", [s for _, s in SPANS], ids=[name for name, _ in SPANS])
def test_commands_in_text_exist(span: str) -> None:
    """`perfbench ...`, `python -m ...`, `nox ...` and options alone, as in a table."""
    if span.startswith("--"):
        known = {"--help"} | options_of_all()
        assert span.split()[0] in known, f"no command has {span}"
        return
    for call in calls_of(span):
        check_call(call, whole=False)


@functools.cache
def options_of_all() -> frozenset[str]:
    """Every `--option` of every command line."""
    return frozenset(option for app in apps().values() for option in options_of(app))


def options_of(app: App) -> set[str]:
    """Every `--option` of a command line."""
    if hasattr(app, "commands"):
        return {option for one in app.commands.values() for option in options_of(one)}
    return {option for parameter in app.params for option in parameter.opts}


def check_call(call: Sequence[str], *, whole: bool) -> None:
    for name, app in apps().items():
        if (arguments := arguments_to(name, call)) is not None:
            words = completed(arguments) if name == "nsa.train" and arguments else arguments
            parse(app, words, whole=whole)
            check_files(arguments)
            return
    program = Path(call[0]).name
    if program == "nox" and "-s" in call:
        assert call[list(call).index("-s") + 1] in nox_sessions()
    elif program.startswith("python") and call[1:2] == ["-m"] and call[2] != "venv":
        assert importlib.util.find_spec(call[2]) is not None, f"no module {call[2]}"
        check_files(call[3:])
    elif program.startswith("python"):
        check_files(call[1:])


def check_files(words: Sequence[str]) -> None:
    """Paths into the checkout exist, where they are not the reader's own run."""
    for word in words:
        if (
            word.startswith(("matrices/", "configs/", "examples/", "reports/"))
            and "/RUN" not in word
        ):
            assert (ROOT / word).exists(), f"no file {word}"


def nox_sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("perfbench plann matrices/cpu.yaml", "no command plann"),
        ("perfbench run matrices/cpu.yaml --onyl path=v2", "No such option"),
        ("perfbench run matrices/gone.yaml", "no file matrices/gone.yaml"),
        ("perfbench run", "Missing parameter: matrix"),
        ("perfbench baseline demote RUN", "no command demote"),
        ("perfbench schema nothing", "nothing"),
        ("X=1 .venv/bin/perfbench gate RUN --strict --lax", "No such option"),
        ("python -m venv x && python -m nsa explain --len 4", "No such option"),
        ("python -m nsa.train configs/tiny-cpu.yaml --resum", "No such option"),
        ("python -m nsa.train configs/gone.yaml", "no file configs/gone.yaml"),
        ("python -m tools.gone", "no module tools.gone"),
        ("nox -s gone", "gone"),
    ],
)
def test_a_wrong_command_is_red(command: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        test_commands_of_blocks_exist(command)


@pytest.mark.parametrize("span", ["--onyl AXIS=V", "perfbench check MATRIX --lax"])
def test_a_wrong_span_is_red(span: str) -> None:
    with pytest.raises(AssertionError):
        test_commands_in_text_exist(span)


def test_a_wrong_block_is_red(tmp_path: Path) -> None:
    """A failing command, another exit code, another output, an unknown mark and reason."""
    text = """<!-- exit: 8 -->
```sh
perfbench schema matrix
```
```console
$ python -c "print(1)"
2
```
<!-- needs: magic -->
```sh
true
```
<!-- skip: yes -->
```sh
true
```
"""
    code, output, reason, mark = blocks_of(Path("page.md"), text)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError):
        test_block_runs(code, tmp_path / "a")
    with pytest.raises(AssertionError):
        test_shown_output_is_what_is_printed(output, tmp_path / "b")
    for block in (reason, mark):
        with pytest.raises(AssertionError):
            test_marks_are_known(block)
