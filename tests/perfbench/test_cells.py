"""The axes of a cell: one typed record in memory, a mapping in files, and one way between them."""

from __future__ import annotations

import ast
import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from perfbench.records import AXES, Cell, PlannedCell, RouteLine, select_cells

ROOT = pathlib.Path(__file__).parents[2]
OLD = {"workload": "train", "seq_len": 128, "path": "v2", "fa2": "on", "batch": 2, "dtype": "bf16"}


def planned(axes: Any) -> PlannedCell:
    route = RouteLine(branches=[], counters=[])
    return PlannedCell(cell_id="c", axes=axes, config_sha256="", route=route)


def stored(cell: PlannedCell) -> dict[str, Any]:
    """The axes as they stand in a file, in their order."""
    axes: dict[str, Any] = json.loads(cell.model_dump_json())["axes"]
    assert list(axes.items()) == list(cell.model_dump()["axes"].items())
    return axes


def test_every_axis_of_a_new_cell_is_stored() -> None:
    cell = Cell("chunked_prefill", 4096, "triton", chunk=512, without="copy")
    turned = ["world_size", "parallel", "cache"]
    assert list(stored(planned(cell))) == [name for name in AXES if name not in turned]
    assert planned(stored(planned(cell))).axes == cell


def test_a_cell_of_several_ranks_stores_that_and_a_cell_of_one_is_one_cell() -> None:
    cell = Cell("train", 128, "v2", world_size=2, parallel="fsdp")
    assert sorted(stored(planned(cell))) == sorted(name for name in AXES if name != "cache")
    assert planned(stored(planned(cell))).axes == cell
    assert cell.cell_id == "parallel=fsdp,path=v2,seq_len=128,workload=train,world_size=2"
    alone = Cell("train", 128, "v2", parallel="fsdp")
    assert alone == Cell("train", 128, "v2") and alone.cell_id == (
        "path=v2,seq_len=128,workload=train"
    )


def test_what_an_older_perfbench_wrote_is_written_again_as_it_was() -> None:
    backwards = dict(reversed(OLD.items()))
    cell = planned(backwards)
    assert list(stored(cell).items()) == list(backwards.items())
    assert cell.axes == Cell("train", 128, "v2", "on", batch=2)
    assert (cell.axes.l2, cell.axes.value("l2")) == ("warm", "warm")


def test_an_axis_of_a_newer_perfbench_survives_and_tells_cells_apart() -> None:
    newer = {**OLD, "colour": "red", "depth": 3}
    cell = planned(newer)
    assert stored(cell) == newer and cell.axes.value("colour") == "red"
    assert cell.axes != planned(OLD).axes != planned({**newer, "depth": 4}).axes
    assert stored(planned(replace(cell.axes, seq_len=64))) == {**newer, "seq_len": 64}


def test_an_axis_that_was_changed_since_is_written() -> None:
    assert stored(planned(replace(planned(OLD).axes, l2="cold"))) == {**OLD, "l2": "cold"}
    dense = {name: value for name, value in OLD.items() if name != "fa2"} | {"path": "dense"}
    assert stored(planned(dense)) == dense, "n/a of a dense path is not a change"


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ({name: value for name, value in OLD.items() if name != "path"}, "no axis path"),
        ({**OLD, "seq_len": "128"}, "axis seq_len is '128', wanted int"),
        ({**OLD, "dtype": 16}, "axis dtype is '16', wanted str"),
        ({**OLD, "fa2": "n/a"}, "fa2=n/a belongs to dense paths"),
        ({**OLD, "batch": None}, "Input should be a valid"),
        (5, "Input should be a valid dictionary"),
    ],
)
def test_axes_that_are_none_are_refused(axes: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        planned(axes)


def test_no_axis_is_looked_up_by_a_text_and_cast() -> None:
    """``job.axes["seq_len"]`` would be a text or a number to mypy, and a KeyError at run time."""
    for path in sorted((ROOT / "perfbench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
                looked_up = node.value.attr == "axes" and isinstance(node.slice, ast.Constant)
                assert not looked_up, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Cell":
                assert all(word.arg is not None for word in node.keywords), (
                    f"{path}:{node.lineno}: Cell(**...) is not typed; use Cell.from_mapping"
                )


def test_a_cell_that_no_cell_is_like_gets_three_examples_and_not_all() -> None:
    cells = [Cell("train", 64 * n, "v2", "on") for n in range(1, 200)]
    with pytest.raises(
        ValueError, match="none of the 199 cells; they are .*`perfbench plan`"
    ) as it:
        select_cells(cells, ["cell=nope"])
    assert len(str(it.value)) < 400
    with pytest.raises(ValueError, match="did you mean"):
        select_cells(cells, [f"cell={cells[0].cell_id}x"])
