"""The public names are those of tests/data/public-api.txt: a change is seen, and meant."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
from typing import Any

import pytest
import typer

import perfbench
from tests import public_api


def test_the_public_names_are_those_that_were_promised() -> None:
    """A name that went away breaks a stranger's code: docs/stability.md says how it is retired."""
    then, now = public_api.FILE.read_text(encoding="utf-8"), public_api.text()
    changed = "\n".join(difflib.unified_diff(then.splitlines(), now.splitlines(), lineterm="", n=2))
    assert then == now, (
        f"{changed}\nIf it is meant: say so in CHANGELOG.md, then `{public_api.RENEW}`"
    )


def test_every_kind_is_in_it() -> None:
    kinds = {line.split()[0] for line in public_api.text().splitlines() if line[:1].isalpha()}
    assert kinds == {"class", "function", "enum", "command", "environment", "verdict"}
    for name in (*public_api.nsa.__all__, *perfbench.__all__):
        assert f".{name}\n" in public_api.text() or f".{name} " in public_api.text(), name


def lines_of(thing: Any) -> list[str]:
    package = types.ModuleType("p")
    package.__all__ = ["thing"]  # type: ignore[attr-defined]
    package.thing = thing  # type: ignore[attr-defined]
    return list(public_api.of_package(package))


def _function(a: int, *, b: str = "x") -> None: ...


def _renamed(a: int, *, c: str = "x") -> None: ...


def _another_default(a: int, *, b: str = "y") -> None: ...


def _by_position(a: int, b: str = "x") -> None: ...


def _returns(a: int, *, b: str = "x") -> int: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("other", [_renamed, _another_default, _by_position, _returns])
def test_a_changed_function_is_seen(other: Any) -> None:
    assert lines_of(other) != lines_of(_function)


@dataclasses.dataclass
class _Point:
    x: int = 0
    y: int = 0


@pytest.mark.parametrize("fields", [[("x", int, 0)], [("y", int, 0), ("x", int, 0)]])
def test_a_changed_field_is_seen(fields: list[tuple[str, type, int]]) -> None:
    assert lines_of(dataclasses.make_dataclass("_Point", fields)) != lines_of(_Point)


def test_a_changed_member_is_seen() -> None:
    def numbered(two: int) -> list[str]:
        return lines_of(enum.IntEnum("Code", {"ONE": 1, "TWO": two}))

    assert numbered(2) != numbered(3)


def test_a_changed_option_is_seen() -> None:
    def lines(flag: str, default: int) -> list[str]:
        app = typer.Typer()

        @app.command()
        def command(number: int = typer.Option(default, flag)) -> None: ...

        return list(public_api.of_command("c", typer.main.get_command(app)))

    assert lines("--number", 1) == lines("--number", 1)
    assert lines("--number", 1) != lines("--numbers", 1)
    assert lines("--number", 1) != lines("--number", 2)
