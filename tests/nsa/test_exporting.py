"""Whether a graph is traced for torch.export, or compiled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import nsa
from nsa.ops.exporting import is_exporting


class AddsTenIfExported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (10.0 if is_exporting() else 1.0)


def test_a_compiled_graph_is_not_exported() -> None:
    """In torch 2.11 Dynamo takes `torch.compiler.is_exporting` for True here."""
    x = torch.zeros(3)
    assert not is_exporting()
    assert (
        torch.compile(AddsTenIfExported(), fullgraph=True, backend="eager")(x).tolist() == [1.0] * 3
    )


def test_an_exported_graph_is() -> None:
    x = torch.zeros(3)
    for strict in (False, True):
        program = torch.export.export(AddsTenIfExported(), (x,), strict=strict)
        assert program.module()(x).tolist() == [10.0] * 3, strict


def test_it_is_asked_here_alone() -> None:
    folder = Path(nsa.__file__).parent
    asking = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*.py"))
        if "torch.compiler.is_exporting()" in file.read_text(encoding="utf-8")
    ]
    assert asking == ["ops/exporting.py"]
