"""Where the rows of a trace come from: definitions in files, and callers in real frames."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa import TinyLM
from nsa.config import preset
from perfbench.records.kernel_table import Kernel, Kernels
from perfbench.tracing.diff import Traced, TraceDiff
from perfbench.tracing.places import CodePlace, caller_that_grew, places_in
from perfbench.worker.callers import callers, counted_callers
from tests.perfbench.repositories import ROOT

KERNELS = """\
import triton

from nsa.ops.kernels.common import named_by


@triton.jit
def nsa_sum(x):
    pass


@triton.jit(repr=named_by("nsa_forward", {"COPY": "_copy"}), do_not_specialize=["n"])
def _forward(x, n):
    pass


@triton.jit(repr=named_by("nsa_forward", {}, "_split"))
def _of_splits(x):
    pass


def nsa_plain(x):
    pass
"""
OPERATORS = """\
from nsa.ops.operator import Backward, define_formula, define_operator


def _run(x): ...


def _backward(x): ...


define_operator("scores", "(Tensor x) -> Tensor", _run, _run, Backward("", _backward, _run))
define_formula("masked", "(Tensor x) -> Tensor", lambda x: x)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an nsa of two files, and one that is no Python."""
    home = tmp_path / "nsa" / "ops"
    home.mkdir(parents=True)
    (home / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (home / "__init__.py").write_text(OPERATORS, encoding="utf-8")
    (home / "broken.py").write_text("def (:", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ("nsa_sum", "nsa/ops/kernels.py:7"),
        ("nsa_forward", "nsa/ops/kernels.py:12"),
        ("nsa_forward_copy", "nsa/ops/kernels.py:12"),
        ("nsa_forward_copy_split", "nsa/ops/kernels.py:17"),
        ("nsa_plain", None),
        ("nsa::scores", "nsa/ops/__init__.py:4"),
        ("nsa::scores_backward", "nsa/ops/__init__.py:7"),
        ("nsa::masked", "nsa/ops/__init__.py:11"),
        ("nsa::masked_backward", None),
        ("aten::add", None),
    ],
)
def test_a_row_is_placed_by_its_definition(package: Path, row: str, where: str | None) -> None:
    found = places_in(package).of_rows([row])
    assert {name: str(place) for name, place in found.items()} == ({row: where} if where else {})


def test_a_place_names_its_module(package: Path) -> None:
    found = places_in(package).of_rows(["nsa_sum", "nsa::masked"])
    assert [one.module for one in found.values()] == ["nsa.ops.kernels", "nsa.ops"]


def test_every_operator_that_a_cpu_runs_is_placed_in_this_checkout() -> None:
    """The lines are those of real definitions."""
    rows = ["nsa::selected_masked", "nsa::sliding", "nsa::compressed_sdpa", "nsa::selected_v2"]
    found = places_in(ROOT).of_rows(rows)
    assert [*found] == rows
    for place in found.values():
        line = (ROOT / place.file).read_text(encoding="utf-8").splitlines()[place.line - 1]
        assert line.startswith("def _")


def test_the_callers_of_a_real_step_are_lines_of_nsa() -> None:
    model = TinyLM(preset("tiny"), path="masked")
    ids = torch.zeros(1, 64, dtype=torch.int64)
    found = callers(lambda: model(ids))
    (place,) = (CodePlace.of_caller(text) for text in found["aten::scatter_"])
    assert place is not None and place.function == "token_mask"
    source = (ROOT / place.file).read_text(encoding="utf-8").splitlines()[place.line - 1]
    assert "scatter_" in source
    assert all(CodePlace.of_caller(text) is not None for texts in found.values() for text in texts)


def frame(file: str, line: int, name: str) -> Any:
    return SimpleNamespace(file_name=file, line_number=line, function_name=name)


def node(kind: str, name: str = "", fields: Any = None, *children: Any) -> Any:
    tag = SimpleNamespace(name=kind)
    return SimpleNamespace(tag=tag, name=name, extra_fields=fields, children=children)


def test_the_innermost_frame_of_the_package_counts() -> None:
    """A call of torch's own Python inside it changes nothing, nor does what no frame leads to."""
    mine = SimpleNamespace(caller=frame("bench.py", 1, "main"), callsite=frame("nsa/m.py", 5, "f"))
    torchs = SimpleNamespace(caller=frame("nsa/m.py", 8, "f"), callsite=frame("torch/f.py", 2, "g"))
    inside = SimpleNamespace(caller=frame("torch/f.py", 3, "g"))
    tree = node(
        "PyCall",
        "",
        mine,
        node("TorchOp", "aten::add"),
        node("PyCall", "", torchs, node("PyCCall", "", inside, node("TorchOp", "aten::mul"))),
    )
    assert counted_callers([tree, node("TorchOp", "aten::mul")]) == {
        "aten::add": {"nsa/m.py:5 f": 1},
        "aten::mul": {"nsa/m.py:8 f": 1},
    }


def test_the_caller_that_grew_is_shown_though_others_call_more() -> None:
    base = {"nsa/a.py:10 f": 50, "nsa/b.py:3 g": 2}
    candidate = {"nsa/a.py:12 f": 50, "nsa/b.py:3 g": 9}
    assert str(caller_that_grew(candidate, base)) == "nsa/b.py:3"
    assert str(caller_that_grew(base, base)) == "nsa/a.py:10"
    assert caller_that_grew({"no place": 3}, {}) is None


def test_rows_that_changed_name_their_lines_on_both_sides() -> None:
    def side(line: int, calls: int) -> Traced:
        rows = {
            "nsa::masked": Kernel(count=calls, seconds=calls * 1e-3),
            "aten::mul": Kernel(count=calls, seconds=calls * 2e-3),
            "Memcpy": Kernel(count=calls, seconds=calls * 3e-3),
        }
        called = {"aten::mul": {f"nsa/m.py:{line + 1} f": calls}}
        places = {"nsa::masked": CodePlace(module="nsa.m", file="nsa/m.py", line=line)}
        kernels = Kernels(device="cpu", rows=rows, called_from=called)
        return Traced(name="v", kernels=kernels, places=places)

    diff = TraceDiff(cell_id="cell", base=side(4, 1), candidate=side(6, 3))
    shown = [(one.name, str(one.base_place), str(one.candidate_place)) for one in diff.changes]
    assert shown == [
        ("Memcpy", "None", "None"),
        ("aten::mul", "nsa/m.py:5", "nsa/m.py:7"),
        ("nsa::masked", "nsa/m.py:4", "nsa/m.py:6"),
    ]
    text = diff.to_markdown()
    assert "| each call | where |" in text
    assert "| `nsa/m.py:4` -> `nsa/m.py:6` |" in text and "| - |\n" in text
    alone = side(4, 1).model_copy(update={"places": {}})
    without = alone.model_copy(update={"kernels": Kernels(device="cpu", rows={})})
    assert "where" not in TraceDiff(cell_id="c", base=without, candidate=without).to_markdown()
