"""The gradients of three branches together, in Triton's interpreter (`--require interpreter`): the
same as each branch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, functional, nsa_attention
from nsa.branches import Call, attend_view
from nsa.config import BRANCHES
from nsa.decode import View
from nsa.documents import Packing
from nsa.ops import joint_backward
from nsa.ops.interval import (
    backward_kv_kernels,
    backward_q_kernels,
    forward_kernels,
    tile_sizes,
)
from nsa.ops.interval import merged_backward_kernels as merged
from nsa.ops.kernels import common
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import chunks, dense_tiles, list_calls
from nsa.ops.selected.triton import forward as selected_forward
from tests import oracle
from tests.cases import SMALL, assert_parity, assert_same_function, randn
from tests.nsa.kernel_cases import (
    ORDINARY_LOADS,
    poisoned_memory,  # noqa: F401
)

NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
CALLS: list[tuple[int, int, dict[str, Any]]] = [  # rows of the batch, queries
    (2, 24, {}),
    (2, 9, {"q_start": 15}),
    (2, 9, {"q_start": torch.tensor([0, 15])}),
    (1, 24, {"cu_seqlens": torch.tensor([0, 9, 9, 24])}),
]


def inputs(batch: int, tokens: int = 90, queries: int = 90) -> list[Tensor]:
    q, gates = randn(batch, queries, 3, 12, seed=1), randn(batch, queries, 3, 3, seed=2).sigmoid()
    gates[:, 5:8, 1] = 0.0
    kv = [randn(batch, tokens, 1, dim, seed=3 + i) for i, dim in enumerate((12, 20) * 3)]
    return [q, *kv, gates]


def call(*given: Tensor, **options: Any) -> Tensor:
    q, *kv, gates = given
    pairs = ((kv[0], kv[1]), (kv[2], kv[3]), (kv[4], kv[5]))
    return nsa_attention(q, *pairs, gates, config=SMALL, path="triton", **options)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each use of the operator that joins the branches."""
    notes: list[str] = []
    arguments = joint_backward.arguments

    def noted(*x: Any, **options: Any) -> joint_backward.Joined:
        notes.append("joined")
        return arguments(*x, **options)

    monkeypatch.setattr(joint_backward, "arguments", noted)
    return notes


def gradients(of: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    o = of(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, randn(*o.shape, seed=11))]


@pytest.fixture(params=["lists", "rows", "tiles"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels serve the selected branch; of lists, several chunks."""
    if request.param == "lists":
        monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
        monkeypatch.setattr(chunks, "PARTS_OF_Q", 0)
        monkeypatch.setattr(chunks, "PART_BYTES", 40 * 3 * SMALL.num_selected * 20 * 4)
    if request.param == "tiles":
        for module in (selected_forward, selected_backward):
            monkeypatch.setattr(module, "Lists", None)  # so that whatever sorts fails
        monkeypatch.setattr(dense_tiles, "MIN_ROWS", 0)
        always = dense_tiles.TileLimits(1e9, 1 << 40)
        monkeypatch.setattr(dense_tiles, "FORWARD_LIMITS", (always,) * 4)
        monkeypatch.setattr(dense_tiles, "BACKWARD_LIMITS", (always,) * 4)
    return str(request.param)


@pytest.mark.parametrize(
    ("batch", "queries", "options"), CALLS, ids=["two rows", "a chunk", "ragged chunks", "packed"]
)
def test_together_is_what_each_branch_gives(
    batch: int, queries: int, options: dict[str, Any], taken: list[str]
) -> None:
    given = inputs(batch, 24, queries)
    together = gradients(lambda *x: call(*x, nonnegative_gates=True, **options), given)
    assert taken == ["joined"]
    apart = gradients(lambda *x: call(*x, **options), given)
    assert taken == ["joined"]
    for name, a, b in zip(("o", *NAMES), together, apart, strict=True):
        assert_parity(a, b.double(), name)


@pytest.mark.parametrize(
    ("small", "cu_seqlens"),
    [(True, None), (False, None), (True, [0, 16, 32])],
    ids=["in one launch each", "large", "documents"],
)
def test_a_window_whose_keys_begin_later(
    small: bool,
    cu_seqlens: list[int] | None,
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries 20 .. 31 of 32, as a rank of several has them, with the keys of their windows alone:
    the same as in a call of all queries, whose other rows are not asked for.
    """
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", ORDINARY_LOADS if small else 0)
    config, given = replace(SMALL, window=6), inputs(1, 32, 32)

    def whole(q: Tensor, *x: Tensor) -> Tensor:
        kv = ((x[0], x[1]), (x[2], x[3]), (x[4], x[5]))
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "config": config, "path": "triton"}
        return nsa_attention(q, *kv, x[6], nonnegative_gates=True, **options)[:, 20:]

    def part(q: Tensor, *x: Tensor) -> Tensor:
        packing = None if cu_seqlens is None else Packing.of(torch.tensor(cu_seqlens), 32, 16)
        documents = None if packing is None else packing.part((20, 32), (20, 32)).documents
        options: dict[str, Any] = {"branches": BRANCHES, "path": "triton", "fa2": "off"}
        route = functional.route_for(q[:, 20:], 1, 20, 32, q_start=20, config=config, **options)
        cmp = functional.compress_kv(x[0], x[1], config=config, route=route)
        view = View(cmp, (x[2], x[3]), (x[4][:, 15:], x[5][:, 15:]), q_start=20, win_start=5)
        of = Call(route, config, 12**-0.5, documents=documents, nonnegative_gates=True)
        return attend_view(q[:, 20:], x[6][:, 20:], view, of)

    got, want = gradients(part, given), gradients(whole, given)
    assert taken == ["joined", "joined"]
    for name, a, b in zip(("o", *NAMES), got, want, strict=True):
        assert_parity(a, b.double(), name)


@pytest.mark.parametrize("together", [True, False])
def test_against_the_oracle(
    together: bool, by: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lists, rows below num_selected * sel_block = 80 go without them."""
    whole: list[int] = []
    forward = forward_kernels.forward
    monkeypatch.setattr(
        forward_kernels,
        "forward",
        lambda q, *x, **o: (whole.append(q.shape[1]) if "into" in o else None, forward(q, *x, **o))[
            1
        ],
    )

    def reference(
        q: Tensor,
        k_cmp: Tensor,
        v_cmp: Tensor,
        k_sel: Tensor,
        v_sel: Tensor,
        k_win: Tensor,
        v_win: Tensor,
        gates: Tensor,
    ) -> Tensor:
        k_c, v_c = (
            oracle.compress_mean(x, SMALL.cmp_block, SMALL.cmp_stride) for x in (k_cmp, v_cmp)
        )
        blocks = oracle.select(q.detach(), k_c.detach(), config=SMALL, kv_len=90)[0]
        outputs = (
            oracle.compressed(q, k_c, v_c, block=SMALL.cmp_block, stride=SMALL.cmp_stride)[0],
            oracle.selected(q, k_sel, v_sel, blocks, sel_block=SMALL.sel_block),
            oracle.sliding(q, k_win, v_win, window=SMALL.window),
        )
        return sum((gates[..., i, None] * o for i, o in enumerate(outputs)), torch.zeros(()))

    assert_same_function(
        lambda *x: call(*x, nonnegative_gates=together),
        reference,
        inputs(2 if by == "lists" else 1),
        NAMES,
    )
    assert bool(taken) == together and whole == ([80] if by == "lists" else [])


@pytest.mark.parametrize(
    ("alike", "small", "apart"),
    [(True, True, 0), (True, False, 2), (False, True, 4)],
    ids=["in one launch each", "large", "tiles unlike"],
)
def test_two_branches_in_one_launch(
    alike: bool, small: bool, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the best tiles of both are the same; dK and dV only of few queries."""
    alone: list[int] = []
    tiles_of = tile_sizes.tiles_of
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", ORDINARY_LOADS if small else 0)
    if not alike:

        def unlike(kernel: str, q: Tensor, DV: int, width: int | None) -> dict[str, int]:
            found = tiles_of(kernel, q, DV, width)
            return found if width is None else {**found, "BC": 16}

        for module in (merged, backward_q_kernels, backward_kv_kernels):
            monkeypatch.setattr(module, "tiles_of", unlike)
    given = inputs(1, 40, 40)
    by_itself = gradients(call, given)
    for name in ("backward_q", "backward_kv"):
        plain = getattr(merged, name)
        monkeypatch.setattr(
            merged,
            name,
            lambda *x, plain=plain, **o: (alone.append(1), plain(*x, **o))[1],
        )
    together = gradients(lambda *x: call(*x, nonnegative_gates=True), given)
    assert len(alone) == apart
    for name, a, b in zip(("o", *NAMES), together, by_itself, strict=True):
        assert_parity(a, b.double(), name)


def test_a_negative_gate_breaks_the_promise_loudly() -> None:
    given = inputs(1, 30, 30)
    given[-1][0, 20, 2, 1] = -0.25
    kept = gradients(call, given)
    broken = gradients(lambda *x: call(*x, nonnegative_gates=True), given)
    assert all(bool(x.isfinite().all()) for x in kept)
    assert torch.equal(broken[0], kept[0]) and bool(broken[1][0, 20, 2].isnan().all())


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_layer_takes_it_where_gradients_are_recorded(gate: str, taken: list[str]) -> None:
    layer = NSAAttention(24, 3, 1, 12, 20, config=replace(SMALL, gate=gate), path="triton")
    x = randn(1, 30, 24, seed=0)
    with torch.no_grad():
        layer(x)
    assert not taken
    layer(x).sum().backward()
    assert taken == ["joined"]
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_a_branch_that_is_off_leaves_the_others_apart(taken: list[str]) -> None:
    config = replace(SMALL, branches=("cmp", "sel"))
    q, *kv, gates = inputs(1, 30, 30)
    leaves = [x.requires_grad_() for x in (q, gates)]
    o = nsa_attention(
        leaves[0],
        (kv[0], kv[1]),
        (kv[2], kv[3]),
        (kv[4], kv[5]),
        leaves[1],
        config=config,
        path="triton",
        nonnegative_gates=True,
    )
    o.sum().backward()
    assert not taken and gates.grad is not None and not gates.grad[..., 2].any()
