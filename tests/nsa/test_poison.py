"""FAULTS 'a poisoned document': no value of a packed document, NaN and infinities included, reaches
another one, forward or backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, nsa_attention
from nsa.config import BRANCHES
from nsa.routing import Path
from tests.cases import PATHS_HERE, SMALL, Case, assert_parity, here, leaves, qkv, randn
from tests.nsa.test_cache import DIM, OPTIONS, layer_of

EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
# the second document begins within a selection block of the packed rows, and its third token in
# memory of no tile of its own
BOUNDS = here((0, 90, 200), (0, 21, 40))
BEGIN, POISON = BOUNDS[1], here(100, 25)
NAMES = ("q", "k", "v", "gates")
VALUES = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs() -> list[Tensor]:
    q, k, v = qkv(Case(BOUNDS[-1], 2, 16, 16, 1))
    return [q, k, v, randn(*q.shape[:3], 3, seed=3).sigmoid()]


def poisoned(x: Tensor, value: float) -> Tensor:
    return torch.cat([x[:, :POISON], torch.full_like(x[:, POISON:], value)], 1)


def attend(
    tensors: Sequence[Tensor],
    path: str,
    *,
    bounds: Sequence[int] | None = None,
    config: NSAConfig = SMALL,
    joined: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """o, and the gradients of the sum of squares."""
    q, k, v, gates = held = leaves(tensors)
    o = nsa_attention(
        q,
        *[(k, v)] * 3,
        gates,
        config=config,
        cu_seqlens=bounds,
        path=path,
        fa2="off",
        nonnegative_gates=joined,
    )
    return o, list(torch.autograd.grad(o.square().sum(), held))


def assert_isolated(tensors: Sequence[Tensor], path: str, **options: object) -> Tensor:
    """The first document's rows are those of it alone; returns o of both."""
    o, got = attend(tensors, path, bounds=BOUNDS, **options)
    alone, want = attend([x[:, :BEGIN] for x in tensors], path, **options)
    assert_parity(o[:, :BEGIN], alone, "o of the first document")
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_parity(a[:, :BEGIN], b, f"gradient of {name} of the first document")
        assert a.isfinite().all(), "a row that is NaN passes no gradient on"
    return o


@EVERY_PATH
@pytest.mark.parametrize("value", here(list(VALUES), ["nan"]))
@pytest.mark.parametrize("name", NAMES)
def test_a_poisoned_document_leaves_the_others_alone(path: Path, name: str, value: str) -> None:
    tensors = inputs()
    clean = attend(tensors, path, bounds=BOUNDS)[0]
    at = NAMES.index(name)
    tensors[at] = poisoned(tensors[at], VALUES[value])
    o = assert_isolated(tensors, path)
    assert torch.equal(o[:, :POISON], clean[:, :POISON]), "rows before the poison are exact"
    assert o[:, POISON:].isnan().all(), "rows from the poison on say so"


@EVERY_PATH
def test_everything_poisoned_and_gradients_joined(path: Path) -> None:
    assert_isolated([poisoned(x, torch.nan) for x in inputs()], path, joined=True)


@EVERY_PATH
@pytest.mark.parametrize("name", ["q", "k"])
def test_one_token_poisons_its_row_or_the_rows_after_it(path: Path, name: str) -> None:
    tensors = inputs()
    clean = attend(tensors, path, bounds=BOUNDS)[0]
    tensors[NAMES.index(name)][0, POISON, 0, 0] = torch.nan
    o = assert_isolated(tensors, path)
    hit = o.isnan().flatten(2).any(-1)[0].nonzero().flatten().tolist()
    assert hit == ([POISON] if name == "q" else list(range(POISON, BOUNDS[-1])))
    assert_parity(o[:, :POISON], clean[:, :POISON], "before")


@pytest.mark.parametrize("path", [Path.MASKED, Path.V2])
@pytest.mark.parametrize("branches", [BRANCHES[:1], BRANCHES[1:2], BRANCHES[2:], BRANCHES[1:]])
def test_branches_that_are_off(path: Path, branches: tuple[str, ...]) -> None:
    config = replace(SMALL, branches=branches)
    o = assert_isolated(
        [x if i == 3 else poisoned(x, torch.nan) for i, x in enumerate(inputs())],
        path,
        config=config,
    )
    assert o[:, POISON:].isnan().all()


@pytest.mark.parametrize("path", [Path.MASKED, Path.V2])
def test_the_first_document_poisons_no_later_one(path: Path) -> None:
    """A window and a tile reach back beyond the document's begin."""
    tensors = [x.clone() for x in inputs()]
    for x in tensors[:3]:
        x[:, BEGIN - 3 : BEGIN] = torch.nan
    o, got = attend(tensors, path, bounds=BOUNDS)
    alone, want = attend([x[:, BEGIN:] for x in tensors], path)
    assert_parity(o[:, BEGIN:], alone, "o")
    for a, b in zip(got, want, strict=True):
        assert_parity(a[:, BEGIN:], b, "gradient")


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "paper"])
def test_a_layer_isolates_documents_whatever_its_options(option: str) -> None:
    layer: NSAAttention = layer_of(OPTIONS[option], path=Path.MASKED)
    x = randn(1, 200, DIM, seed=1, dtype=torch.float64)
    x[:, 100:] = torch.nan
    x.requires_grad_()
    y, alone = layer(x, cu_seqlens=[0, 90, 200]), layer(x[:, :90])
    assert_parity(y[:, :90], alone, "y")
    assert y[:, 100:].isnan().all()
    (got,) = torch.autograd.grad(y[:, :90].square().sum(), x)
    (want,) = torch.autograd.grad(alone.square().sum(), x)
    assert_parity(got[:, :90], want[:, :90], "gradient of x")
