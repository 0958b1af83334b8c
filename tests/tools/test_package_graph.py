"""tools/package_graph.py on small packages made here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import package_graph as tool

Make = Callable[[dict[str, str]], str]
NUMBERS = itertools.count()
GOOD = {
    "__init__.py": "",
    "__main__.py": "from PKG import top",
    "top.py": "from PKG.mid import door\nfrom PKG import base",
    "mid/__init__.py": "",
    "mid/door.py": "import json\nfrom PKG.mid import inner",
    "mid/inner.py": "import PKG.base",
    "base.py": "",
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write a package of these files, PKG standing for its name, and return the name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]) -> str:
        name = f"rooms{next(NUMBERS)}"
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("PKG", name), encoding="utf-8")
        return name

    return write


def test_rooms_are_children_and_carry_what_is_inside(make: Make) -> None:
    assert tool.graph_of(make(GOOD)) == {
        "base": frozenset(),
        "mid": frozenset({"base"}),
        "top": frozenset({"mid", "base"}),
    }


def test_the_package_is_a_room_where_something_imports_it(make: Make) -> None:
    name = make({"__init__.py": "VERSION = 1", "a.py": "from PKG import VERSION"})
    assert tool.graph_of(name) == {name: frozenset(), "a": frozenset({name})}
    name = make({"__init__.py": "from PKG import a", "a.py": "from PKG import VERSION"})
    assert set(tool.circle_of(tool.graph_of(name)) or []) == {name, "a"}


def test_layers_and_arrows(make: Make) -> None:
    graph = tool.graph_of(make(GOOD))
    assert tool.layers_of(graph) == [["base"], ["mid"], ["top"]]
    assert tool.reduced(graph)["top"] == {"mid"}  # base is reached through mid


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ("from PKG.mid import door", "base -> mid -> base"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PKG.mid import door",
            "base -> mid -> base",
        ),
        ("def late():\n    from PKG import top", "base -> top -> base"),
    ],
    ids=["plain", "TYPE_CHECKING", "inside a function"],
)
def test_a_circle_is_named(
    text: str, circle: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = make(GOOD | {"base.py": text})
    assert tool.main([name, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{name}: a circle of imports: {circle}\n"
    assert not list(tmp_path.glob("*.svg"))


def test_a_long_circle_is_found_whole() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"a"}}
    frozen = {room: frozenset(imports) for room, imports in graph.items()}
    assert tool.circle_of(frozen) == ["b", "c", "d", "b"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["--max-nodes", "3", "--max-layers", "3"], None),
        (["--max-nodes", "2"], "3 rooms; wanted at most 2"),
        (["--max-layers", "2"], "3 layers; wanted at most 2"),
    ],
)
def test_limits(
    limits: list[str],
    message: str | None,
    make: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tool.main([make(GOOD), "--out", str(tmp_path), *limits]) == (message is not None)
    assert (message or "") in capsys.readouterr().err


def test_a_stale_drawing_is_red(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = make(GOOD)
    file = tmp_path / f"architecture-{name}.svg"
    check = [name, "--out", str(tmp_path), "--check"]
    assert tool.main(check) == 1 and not file.exists()
    assert tool.main(check[:-1]) == 0 and tool.main(check) == 0
    file.write_text(file.read_text(encoding="utf-8").replace(">mid<", ">old<"), encoding="utf-8")
    capsys.readouterr()
    assert tool.main(check) == 1 and "is stale" in capsys.readouterr().err


def test_drawing_has_every_room_below_its_importers(make: Make) -> None:
    name = make(GOOD)
    svg = tool.svg_of(name, tool.graph_of(name))
    assert svg == tool.svg_of(name, tool.graph_of(name))
    heights = {
        room: float(y) for y, room in re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>(\w+)<', svg)
    }
    assert heights["top"] < heights["mid"] < heights["base"]
    assert svg.count("<path") == 2 and "3 rooms on 3 layers" in svg


def test_order_of_rooms_crosses_few_arrows() -> None:
    """Two chains side by side, named so that the alphabet would cross them."""
    graph = {"a": {"y"}, "b": {"x"}, "y": {"p"}, "x": {"q"}, "p": set(), "q": set()}
    frozen = {room: frozenset(imports) for room, imports in graph.items()}
    rows, paths = tool._ordered(tool.layers_of(frozen), tool.reduced(frozen))
    assert tool._crossings(rows, paths) == 0
