"""The kernels of few queries, in Triton's interpreter (`--require interpreter`): all heads in one
tile, the keys split over programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import interval
from nsa.ops.decode import kernels as decode
from nsa.ops.interval import forward_kernels
from nsa.ops.selected import triton as operator
from nsa.routing.thresholds import SORT_MIN_ROWS
from tests import oracle
from tests.cases import (
    SMALL,
    Case,
    assert_bf16_rule,
    assert_lse,
    assert_parity,
    assert_same_function,
    eager_attention,
    qkv,
    random_blocks,
)
from tests.nsa.kernel_cases import (
    CAUSAL,
    COMPRESSED,
    DOCUMENTS,
    QKV,
    RAGGED,
    WINDOW,
    first_of,
    poisoned_memory,  # noqa: F401
    seen,
)

Pair = tuple[Tensor, Tensor]
TILES = (16, 1, 1)  # keys, warps, stages
GRIDS = pytest.mark.parametrize("grid", [COMPRESSED, WINDOW, CAUSAL], ids=["cmp", "win", "causal"])


def options(
    grid: tuple[int, int, int | None], q_start: int | Tensor, first: Tensor | None = None
) -> dict[str, Any]:
    return dict(zip(("block", "stride", "width"), grid, strict=True)) | {
        "q_start": q_start,
        "first": first,
        "scale": 0.2,
    }


def split(q: Tensor, k: Tensor, v: Tensor, *, splits: int, **given: Any) -> Pair:
    into = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.empty(q.shape[:3])
    decode.interval(q, k, v, into=into, splits=splits, tiles=TILES, **given)
    return into


def of_one_head(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Pair:
    """The kernel of many queries: a tile of one head, all of its keys."""
    tiles = {"BM": 16, "BC": 16, "num_warps": 1, "num_stages": 1}
    return forward_kernels.forward(q, k, v, tiles=tiles, **given)


# The interval of keys.

KINDS = [
    (0, Case(4, 16, 16, 16, 1)),  # where the queries begin; how many, and their heads
    (37, Case(1, 6, 60, 100, 2)),
    ("ragged", Case(3, 3, 61, 99, 3)),
    ("documents", Case(2, 6, 16, 32, 1)),
    (63, Case(2, 1, 16, 16, 1)),
]


@GRIDS
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(("start", "case"), KINDS, ids=[str(start) for start, _ in KINDS])
def test_interval(
    start: int | str, case: Case, splits: int, grid: tuple[int, int, int | None]
) -> None:
    block, stride, _ = grid
    documents = start == "documents"
    tokens = int(DOCUMENTS[-1]) + 9 if documents else case.tokens
    q_start = RAGGED if start == "ragged" else 0 if documents else int(start)
    num_keys = (80 - block) // stride + 1
    (q, _, _), (_, k, v) = qkv(replace(case, tokens=tokens)), qkv(replace(case, tokens=num_keys))
    first = None
    positions = oracle.row_positions(q_start, case.batch, tokens)
    if documents:  # the last queries of the one document and the first of the next
        rows = slice(int(DOCUMENTS[-1]) - 1, int(DOCUMENTS[-1]) + 1)
        q, first, positions, q_start = (
            q[:, rows],
            first_of(tokens)[rows],
            positions[:, rows],
            rows.start,
        )
    visible = seen(positions, num_keys, grid, first)[:, :, None].expand(-1, -1, k.shape[2], -1)
    want, want_lse = oracle.masked_attention(q, k, v, visible, 0.2)
    given = options(grid, q_start, first)
    o, lse = split(q, k, v, splits=splits, **given)
    assert_parity(o, want, "o")
    assert_lse(lse * log(2), want_lse)
    assert not o[torch.isneginf(want_lse)].any(), "exactly 0"
    assert torch.isneginf(want_lse).any() == (block > 1 and start in (0, "ragged", "documents")), (
        "the case has rows that see nothing"
    )


@GRIDS
def test_the_kernel_of_many_queries_gives_the_same(grid: tuple[int, int, int | None]) -> None:
    (q, _, _), (_, k, v) = (
        qkv(Case(3, 1, 16, 24, 3)),
        qkv(Case((80 - grid[0]) // grid[1] + 1, 1, 16, 24, 3)),
    )
    (o, lse), (other, other_lse) = (
        run(q, k, v, **options(grid, RAGGED)) for run in (partial(split, splits=5), of_one_head)
    )
    assert_parity(o, other, "o")
    assert_lse(lse, other_lse)


@GRIDS
@pytest.mark.parametrize("num_keys", [1, 3])
def test_more_splits_than_keys(num_keys: int, grid: tuple[int, int, int | None]) -> None:
    case = Case(num_keys, 3, 16, 16, 2)
    q, k, v = qkv(case, q_tokens=2)
    starts = torch.tensor([3, 90])  # the first row sees none of the compressed keys
    visible = seen(oracle.row_positions(starts, 2, 2), num_keys, grid, None)[:, :, None].expand(
        -1, -1, 2, -1
    )
    want, want_lse = oracle.masked_attention(q, k, v, visible, 0.2)
    o, lse = split(q, k, v, splits=7, **options(grid, starts))
    assert_parity(o, want, "o")
    assert_lse(lse * log(2), want_lse)


def test_more_parts_than_are_summed_at_once() -> None:
    """A tile of keys each; the largest logits come last, in the second pass, which scales what the
    first left.
    """
    num_keys, splits = 16 * (decode.AT_ONCE + 3) - 5, decode.AT_ONCE + 4
    q, k, v = qkv(Case(num_keys, 3, 16, 16, 1), q_tokens=1)
    k = k * torch.linspace(0.1, 4.0, num_keys)[:, None, None]
    o, lse = split(q, k, v, splits=splits, **options(CAUSAL, num_keys - 1))
    want, want_lse = oracle.masked_attention(
        q, k, v, torch.ones(1, 1, 2, num_keys, dtype=torch.bool), 0.2
    )
    assert_parity(o, want, "o")
    assert_lse(lse * log(2), want_lse)


@GRIDS
def test_keys_that_no_query_sees_are_not_read(grid: tuple[int, int, int | None]) -> None:
    """NaN before the window, after the query, and beyond the end of K and V; no part holds any."""
    q, k, v = qkv(Case(90, 3, 16, 24, 1), q_tokens=1)
    visible = seen(torch.tensor([[60]]), 90, grid, None)
    poisoned = (x.masked_fill(~visible[0, 0][:, None, None], torch.nan) for x in (k, v))
    given = options(grid, 60)
    for got, want in zip(
        split(q, *poisoned, splits=3, **given), split(q, k, v, splits=3, **given), strict=True
    ):
        assert torch.equal(got, want)


def test_the_branch_takes_it_where_queries_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients through the operator, of as many splits as shapes ask for; then without,
    bit for bit the other kernel's.
    """
    called: list[int] = []
    real = decode.interval_splits
    monkeypatch.setattr(
        decode, "interval_splits", lambda *x, **o: called.append(real(*x, **o)) or called[-1]
    )
    q, k, v = qkv(Case(300, 3, 16, 16, 1), q_tokens=2)
    given = options(CAUSAL, 298)
    visible = seen(torch.tensor([[298, 299]]), 300, CAUSAL, None)[:, :, None].expand(-1, -1, 2, -1)
    assert_same_function(
        lambda *x: interval.attend(*x, **given)[0],
        lambda *x: oracle.masked_attention(*x, visible, 0.2)[0],
        (q, k, v),
        QKV,
    )
    assert called == [3]
    monkeypatch.setattr(decode, "MAX_ROWS", 0)
    assert torch.equal(
        forward_kernels.forward(q, k, v, **given)[0], interval.attend(q, k, v, **given)[0]
    )
    assert called == [3]


# Chosen blocks.

CHOSEN = [
    (Case(33, 6, 60, 100, 1), 2, 31, 8),  # sequence, queries, where they begin, selection block
    (Case(60, 3, 16, 32, 2), 1, 50, 12),
    (Case(80, 1, 16, 16, 3), 2, RAGGED, 16),
    (Case(40, 16, 16, 16, 1), 3, 20, 4),
]


def split_slots(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, per_split: int, **given: Any
) -> Pair:
    into = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.empty(q.shape[:3])
    decode.selected(q, k, v, blocks, into=into, per_split=per_split, tiles=(1, 1), **given)
    return into


@pytest.mark.parametrize("per_split", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("case", "queries", "start", "sel_block"), CHOSEN, ids=["odd", "late", "ragged", "many heads"]
)
def test_selected(
    case: Case, queries: int, start: int | Tensor, sel_block: int, per_split: int
) -> None:
    """Sets given by hand, of which five slots are no multiple of a split's: blocks of the future,
    rows of nothing but -1.
    """
    blocks = random_blocks(case, replace(SMALL, sel_block=sel_block), seed=5, q_tokens=queries)
    blocks[0, 0] = -1
    tensors, scale = qkv(case, q_tokens=queries), case.key_dim**-0.5
    given = {"sel_block": sel_block, "q_start": start, "scale": scale}
    o, lse = split_slots(*tensors, blocks, per_split, **given)
    kept = oracle.kept_selected(*tensors[:2], blocks, sel_block=sel_block, q_start=start)
    want, want_lse = oracle.masked_attention(*tensors, kept, scale)
    assert_parity(o, want, "o")
    assert_lse(lse * log(2), want_lse)
    assert not o[torch.isneginf(want_lse)].any() and torch.isneginf(want_lse).any(), (
        "exactly 0, where all slots are empty"
    )


def test_keys_beyond_the_last_and_later_ones_are_not_read() -> None:
    """The last block is cut off by the end of K and V, and before it by the query's position."""
    q, *kv = qkv(Case(21, 2, 16, 16, 1), q_tokens=1)
    blocks = torch.tensor([-1, 1, 0], dtype=torch.int32).expand(1, 1, 2, 3).contiguous()
    room = [torch.full((1, 64, 2, 16), torch.nan) for _ in kv]
    for wide, x in zip(room, kv, strict=True):
        wide[:, :19] = x[:, :19]
    given = {"sel_block": 16, "q_start": 18, "scale": 0.25}
    got, want = (
        split_slots(q, room[0][:, :21], room[1][:, :21], blocks, 1, **given),
        split_slots(q, *kv, blocks, 1, **given),
    )
    assert all(map(torch.equal, got, want)) and not want[0].isnan().any()


@pytest.mark.parametrize("programs", [decode.PROGRAMS, 1], ids=["split", "one program a row"])
def test_the_selected_branch_takes_it_where_rows_are_few(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    real = decode.selected

    def watched(*x: Any, **given: Any) -> None:
        called.append(1)
        real(*x, **given)

    monkeypatch.setattr(decode, "selected", watched)
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    case = Case(60, 3, 16, 32, 2)
    blocks = random_blocks(case, SMALL, seed=5, q_tokens=2)
    assert_same_function(
        lambda *x: operator.attend(*x, blocks, sel_block=16, q_start=58, scale=0.25, fa2=None)[0],
        lambda *x: oracle.selected(*x, blocks, sel_block=16, q_start=58, scale=0.25),
        qkv(case, q_tokens=2),
        QKV,
    )
    assert called == ([1] if programs > 1 else [])


# Of both.


def attended() -> dict[str, Callable[..., Tensor]]:
    blocks = random_blocks(Case(60, 3, 16, 16, 1), SMALL, seed=6, q_tokens=2)
    return {
        "interval": lambda *x: split(*x, splits=4, **options(CAUSAL, 58))[0],
        "selected": lambda *x: split_slots(*x, blocks, 2, sel_block=16, q_start=58, scale=0.2)[0],
    }


@pytest.mark.parametrize("name", attended())
def test_three_runs_are_bitwise_equal(name: str) -> None:
    tensors = qkv(Case(60, 3, 16, 16, 1), q_tokens=2)
    first, *others = (attended()[name](*tensors) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


def test_fp16() -> None:
    tensors = qkv(Case(60, 3, 16, 16, 1), q_tokens=2, dtype=torch.float16)
    kept = oracle.kept_window(*tensors[:2], window=24, q_start=58)
    assert_bf16_rule(
        lambda *x: interval.attend(*x, block=1, stride=1, width=24, q_start=58, scale=0.25)[0],
        lambda *x: oracle.sliding(*x, window=24, q_start=58),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )
    blocks = random_blocks(Case(60, 3, 16, 16, 1), SMALL, seed=8, q_tokens=2)
    chosen = {"sel_block": 16, "q_start": 58}
    kept = oracle.kept_selected(*tensors[:2], blocks, **chosen)
    assert_bf16_rule(
        lambda *x: operator.attend(*x, blocks, **chosen, scale=0.25, fa2=None)[0],
        lambda *x: oracle.selected(*x, blocks, **chosen),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )


# How many.


@pytest.mark.parametrize(
    ("tiles", "keys", "splits"),
    [
        (2, 4095, 32),
        (16, 4095, 16),
        (128, 4095, 2),
        (256, 4095, 1),
        (2, 512, 4),
        (2, 1, 1),
        (2, 0, 1),
        (0, 9, 1),
        (2, 1 << 20, 132),
    ],
)
def test_splits_of_an_interval(tiles: int, keys: int, splits: int) -> None:
    """About 264 programs, of at least 128 keys each; of a window, at least 64."""
    assert decode.interval_splits(tiles, keys, banded=False) == splits


def test_splits_of_a_window() -> None:
    assert [decode.interval_splits(tiles, 512, banded=True) for tiles in (2, 16, 128, 256)] == [
        8,
        8,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("rows", "small", "per_split"),
    [
        (2, False, 1),
        (16, False, 1),
        (32, False, 2),
        (64, False, 4),
        (256, False, 16),
        (16, True, 1),
        (128, True, 2),
        (256, True, 4),
    ],
)
def test_slots_of_a_split(rows: int, small: bool, per_split: int) -> None:
    """Of 16 slots."""
    assert decode.slots_per_split(rows, 16, small=small) == per_split


@pytest.mark.parametrize(
    ("queries", "heads", "few"),
    [(1, 6, True), (4, 16, True), (5, 16, False), (64, 1, True), (0, 6, False)],
)
def test_few_queries_fit_one_tile(queries: int, heads: int, few: bool) -> None:
    assert decode.few_queries(queries, heads) == few


def test_many_rows_are_served_as_before() -> None:
    assert decode.few_rows(256) and not decode.few_rows(265) and not decode.few_rows(SORT_MIN_ROWS)
