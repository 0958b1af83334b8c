"""The proof of a cell of the tiny model, and how a fault gets into what it proves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import ModelConfig
from nsa.ops.selected import PATHS
from nsa.routing import Path, Route
from perfbench.records.rows import ParityLine
from perfbench.worker.parity import proof
from perfbench.worker.parity.claim import Claim
from tests.perfbench.jobs import TINY, cell_of, route_of

TOKENS = (5 + 4) * 16 + 1  # (n + 4) l' + 1 of the tiny geometry
Attend = Callable[..., Tensor]


def prove(
    path: str = "v2",
    tokens: int = 64,
    *,
    train: bool = True,
    model: ModelConfig = TINY,
    seed: int = 3,
    timed: Route | None = None,
    **axes: Any,
) -> ParityLine:
    """The proof of a cell of ``tokens``, whose Route is its own or ``timed``."""
    cell = cell_of(path, "train" if train else "forward", tokens, **axes)
    return proof.prove(Claim(model, timed or route_of(cell, model), cell, "cpu", seed))


def wrong(line: ParityLine) -> set[str]:
    """Tensors of the attention function beyond their tolerance; ``layer`` has tests of its own
    (test_parity_layer.py).
    """
    assert line.ok == all(ratio <= 1 for ratio in line.tensors.values())
    return {name for name, ratio in line.tensors.items() if ratio > 1} - {"layer"}


def in_path(
    monkeypatch: pytest.MonkeyPatch, path: Path, change: Callable[[Attend], Attend]
) -> None:
    monkeypatch.setitem(PATHS, path, change(PATHS[path]))  # type: ignore[arg-type]


def last_block_dropped(attend: Attend) -> Attend:
    def dropped(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Tensor:
        return attend(
            q,
            k,
            v,
            torch.cat([blocks[..., :-1], torch.full_like(blocks[..., :1], -1)], -1),
            **options,
        )

    return dropped


def gradient_times(x: Tensor, factor: float) -> Tensor:
    return x.detach() + (x - x.detach()) * factor if factor else x.detach()
