"""The kernels of attention over chosen blocks, in Triton's interpreter (`--require interpreter`):
both forwards, chunks, segments.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.ops.kernels import products
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import chunks, list_calls
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.tile_sizes import Tiles
from tests import oracle
from tests.cases import (
    SMALL,
    Case,
    assert_bf16_rule,
    assert_parity,
    assert_same_function,
    eager_attention,
    qkv,
    randn,
    random_blocks,
    run,
)
from tests.nsa.kernel_cases import (
    QKV,
    RAGGED,
    attend,
    poisoned_memory,  # noqa: F401
)


@pytest.fixture(params=["query-outer", "KV-outer", "KV-outer in chunks"])
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel the forward takes; in chunks, the backward too."""
    if request.param != "query-outer":
        monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
    return str(request.param)


def chunks_of(rows: int, case: Case, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rows`` (b, t) a chunk of the narrower of K and V, fewer of the wider."""
    row_bytes = case.kv_heads * num_slots * case.group * min(case.key_dim, case.value_dim) * 4
    monkeypatch.setattr(chunks, "PART_BYTES", rows * row_bytes)


def assert_selected(
    tensors: tuple[Tensor, ...], blocks: Tensor, *, sel_block: int = 16, q_start: int | Tensor = 0
) -> None:
    options = {"sel_block": sel_block, "q_start": q_start}
    assert_same_function(
        lambda *x: attend(*x, blocks, **options),
        lambda *x: oracle.selected(*x, blocks, **options),
        tensors,
        QKV,
    )


SELECTED = [
    (Case(33, 6, 60, 100, 1), 33, 0, 8),  # sequence, queries, where they begin, selection block
    (Case(60, 3, 16, 32, 2), 10, 50, 12),
    (Case(80, 2, 16, 16, 3), 6, RAGGED, 16),
    (Case(17, 17, 16, 16, 1), 17, 0, 4),
]


@pytest.mark.parametrize(
    ("case", "queries", "start", "sel_block"),
    SELECTED,
    ids=["whole", "late", "ragged", "many heads"],
)
def test_selected(
    forward: str,
    case: Case,
    queries: int,
    start: int | Tensor,
    sel_block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sets given by hand: blocks of the future, rows of nothing but -1, chunks that end inside a
    sequence of the batch.
    """
    blocks = random_blocks(case, replace(SMALL, sel_block=sel_block), seed=5, q_tokens=queries)
    blocks[0, 0] = -1
    if forward == "KV-outer in chunks":
        chunks_of(7, case, blocks.shape[-1], monkeypatch)
    assert_selected(qkv(case, q_tokens=queries), blocks, sel_block=sel_block, q_start=start)


@pytest.mark.parametrize("segments", [1, 3])
def test_runs_of_one_block_over_many_tiles(segments: int) -> None:
    """Tiles of 16 rows: block 0's queries fill several, and a program of the backward has several
    segments of several blocks.
    """
    case, scale = Case(40, 3, 16, 32, 1), 0.25
    q, k, v = qkv(case)
    blocks = torch.tensor([0, 1, 2], dtype=torch.int32).expand(1, 40, 2, 3).clone()
    blocks[:, :, 1, 0] = -1  # the second kv head's list of block 0 is empty
    blocks = (
        torch.where(blocks * 8 > torch.arange(40)[:, None, None], -1, blocks)
        .sort(-1, descending=True)
        .values
    )
    blocks = (
        torch.where(blocks < 0, 9, blocks)
        .sort(-1)
        .values.masked_fill_((blocks < 0).sort(-1).values, -1)
        .int()
    )
    tiles, do = Tiles(16, 1, segments), randn(1, 40, 6, 32, seed=4)
    options = {"sel_block": 8, "q_start": 0, "scale": scale, "tiles": tiles}
    o, lse = selected_forward.forward(q, k, v, blocks, by_row=False, **options)
    got = (
        o,
        *selected_backward.backward(
            do, q, k, v, blocks, lse, products.row_products(o, do), **options
        ),
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = oracle.selected(*leaves, blocks, sel_block=8, scale=scale)
    for what, a, b in zip(
        ("o", "dq", "dk", "dv"),
        got,
        (want, *torch.autograd.grad(want, leaves, do.double())),
        strict=True,
    ):
        assert_parity(a, b, what)


def test_three_runs_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(12, 3, 16, 24, 1)
    blocks = random_blocks(case, SMALL, seed=6)
    monkeypatch.setattr(list_calls, "SORT_MIN_ROWS", 0)
    chunks_of(5, case, blocks.shape[-1], monkeypatch)
    first, *others = (run(lambda *x: attend(*x, blocks), qkv(case)) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0]) and all(
            torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True)
        )


def test_nan_beyond_the_last_key_is_not_read(forward: str) -> None:
    """The last block is cut off by the end of K and V; behind it lies NaN."""
    case = Case(21, 2, 16, 16, 1)
    q, *kv = qkv(case)
    blocks = torch.tensor([0, 1], dtype=torch.int32).expand(1, 21, 2, 2)
    room = [torch.full((1, 64, 2, 16), torch.nan) for _ in kv]
    for wide, x in zip(room, kv, strict=True):
        wide[:, :21] = x
    assert torch.equal(attend(q, room[0][:, :21], room[1][:, :21], blocks), attend(q, *kv, blocks))


def test_fp16(forward: str) -> None:
    case = Case(20, 3, 16, 16, 1)
    tensors, blocks = qkv(case, dtype=torch.float16), random_blocks(case, SMALL, seed=8)
    kept = oracle.kept_selected(*tensors[:2], blocks, sel_block=16)
    assert_bf16_rule(
        lambda *x: attend(*x, blocks),
        lambda *x: oracle.selected(*x, blocks, sel_block=16),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )
