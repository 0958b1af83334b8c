"""The proof of the layer that is timed: its own wiring, where the attention function is in
order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import attention as nsa_attention
from nsa import dense as nsa_dense
from nsa import shared_positions
from nsa.ops.positions import query_positions
from nsa.rope import rotate
from nsa.routing import Path
from perfbench.records.rows import ParityLine
from tests.perfbench.parity_cases import TOKENS, Attend, in_path, prove, wrong

pytestmark = pytest.mark.usefixtures("one_thread")


def only_the_layer(line: ParityLine) -> bool:
    return (
        not line.ok
        and line.tensors["layer"] > 1
        and wrong(line) == set()
        and line.worst.startswith("layer: ")
    )


@pytest.mark.parametrize("path", ["v2", "dense"])
@pytest.mark.parametrize("fault", ["nothing rotated", "a turn too far", "half for interleaved"])
def test_rope_of_the_layer(monkeypatch: pytest.MonkeyPatch, path: str, fault: str) -> None:
    rotated: dict[str, Attend] = {
        "nothing rotated": lambda x, theta, *, kind: x,
        "a turn too far": lambda x, theta, *, kind: rotate(x, theta**1.001, kind=kind),
        "half for interleaved": lambda x, theta, *, kind: rotate(x, theta, kind="half"),
    }
    monkeypatch.setattr(nsa_dense if path == "dense" else nsa_attention, "rotate", rotated[fault])
    assert only_the_layer(prove(path))


def test_rope_that_moves_all_positions_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only distances matter where keys are rotated before compression: what the proof must not
    depend on.
    """
    monkeypatch.setattr(
        shared_positions, "query_positions", lambda start, *rest: query_positions(start + 5, *rest)
    )
    assert prove(train=False).ok


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_branches_with_one_anothers_keys(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    per_branch = nsa_attention.NSAAttention._per_branch

    def crossed(self: nsa_attention.NSAAttention, *x: Tensor) -> list[Tensor]:
        return [per_branch(self, *x)[i] for i in order]

    monkeypatch.setattr(nsa_attention.NSAAttention, "_per_branch", crossed)
    assert only_the_layer(prove(train=False))


@pytest.mark.parametrize("fault", ["order", "ungated", "one head's for all"])
def test_gates_of_the_layer(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    attend_view = nsa_attention.attend_view
    spoil: Attend = {
        "order": lambda gates: gates.flip(-1),
        "ungated": torch.ones_like,
        "one head's for all": lambda gates: gates[:, :, :1].expand_as(gates),
    }[fault]
    monkeypatch.setattr(
        nsa_attention,
        "attend_view",
        lambda q, gates, *x, **options: attend_view(q, spoil(gates), *x, **options),
    )
    assert only_the_layer(prove(train=False))


def test_the_layer_takes_the_cells_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of v1 alone, at the layer's length alone, shows in the layer of v1 and in no
    other.
    """

    def spoil(attend: Attend) -> Attend:
        def spoilt(q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            o, lse = attend(q, *rest, **options)
            return o + 1e-2 * (q.shape[1] != TOKENS), lse

        return spoilt

    in_path(monkeypatch, Path.V1, spoil)
    assert only_the_layer(prove("v1", train=False)) and prove("v2", train=False).ok
