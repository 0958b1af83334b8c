"""The selected branch by dense tiles, in Triton's interpreter (`--require interpreter`): against
the oracle, and the rule that takes them.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, nsa_attention
from nsa.ops.kernels import products
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.dense_tile_masks import TileMasks
from nsa.ops.selected.triton.dense_tiles import NEVER, DenseTiles, TileLimits
from nsa.oracle import attention
from tests import oracle
from tests.cases import (
    Case,
    assert_bf16_rule,
    assert_lse,
    assert_parity,
    assert_same_function,
    eager_attention,
    qkv,
    randn,
    run,
)
from tests.nsa.kernel_cases import (
    QKV,
    RAGGED,
    attend,
    poisoned_memory,  # noqa: F401
)

ALWAYS = TileLimits(1e9, 1 << 40)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call goes by dense tiles; notes each."""
    notes: list[str] = []
    for name in ("forward", "backward"):
        launch = getattr(dense_tiles, name)

        def noted(*x: Any, name: str = name, launch: Any = launch, **options: Any) -> Any:
            notes.append(name)
            return launch(*x, **options)

        monkeypatch.setattr(dense_tiles, name, noted)
        monkeypatch.setattr(dense_tiles, f"{name.upper()}_LIMITS", (ALWAYS,) * 4)
    monkeypatch.setattr(dense_tiles, "MIN_ROWS", 0)
    return notes


def chosen(
    case: Case, sel_block: int, slots: int, *, seed: int, queries: int | None = None
) -> Tensor:
    """Random slots: any block, also of the future; some twice, some empty; row 0 has none."""
    shape = (case.batch, queries or case.tokens, case.kv_heads, slots)
    num_blocks = -(-case.tokens // sel_block)
    drawn = torch.randint(
        -1, num_blocks, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    drawn[:, 0] = -1
    return drawn


CASES = [
    # case, queries, where they begin, block, slots, rows of a tile
    (Case(33, 6, 60, 100, 1), 33, 0, 8, 5, 64),
    (Case(40, 6, 16, 24, 1), 40, 0, 16, 3, 64),  # query 30 does not see all of block 1
    (Case(60, 3, 16, 32, 2), 10, 50, 12, 5, 16),
    (Case(80, 2, 16, 16, 3), 6, RAGGED, 16, 3, 16),
    (Case(17, 64, 16, 16, 1), 3, 14, 4, 4, 64),
    (Case(90, 1, 16, 16, 1), 90, 0, 4, 20, 64),
    (Case(40, 16, 192, 128, 1), 40, 0, 16, 2, 64),
    (Case(20, 2, 256, 256, 1), 20, 0, 16, 1, 32),
]


@pytest.mark.parametrize(
    ("case", "queries", "start", "sel_block", "slots", "most_rows"),
    CASES,
    ids=["whole", "unmasked", "late", "ragged", "64 heads", "one head", "wide keys", "256 wide"],
)
def test_against_the_oracle(
    case: Case,
    queries: int,
    start: int | Tensor,
    sel_block: int,
    slots: int,
    most_rows: int,
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = (DenseTiles(most_rows, 4),) * 4
    monkeypatch.setattr(dense_tiles, "FORWARD", tiles)
    monkeypatch.setattr(dense_tiles, "BACKWARD", tiles)
    blocks = chosen(case, sel_block, slots, seed=5, queries=queries)
    options: dict[str, Any] = {"sel_block": sel_block, "q_start": start}
    assert_same_function(
        lambda *x: attend(*x, blocks, **options),
        lambda *x: oracle.selected(*x, blocks, **options),
        qkv(case, q_tokens=queries),
        QKV,
    )
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("wanted", [1, 1 << 20])
def test_gradients_of_keys_in_one_part_and_in_many(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 5 queries, so that a block has up to 16 of them and two parts; block 6 nobody
    chooses, and block 0 everybody.
    """
    monkeypatch.setattr(dense_tiles, "KV_PROGRAMS", wanted)
    case, tiles = Case(80, 3, 16, 24, 1), DenseTiles(16, 1)
    assert dense_tiles.num_parts(20, 16) == (2 if wanted > 1 else 1)
    q, k, v = qkv(case)
    blocks = chosen(case, 8, 4, seed=7)
    blocks[..., 3] = 0
    blocks[blocks == 6] = -1
    o, lse = dense_tiles.forward(q, k, v, blocks, sel_block=8, q_start=0, scale=0.25, tiles=tiles)
    do, held = randn(*o.shape, seed=4), randn(*q.shape, seed=9)
    got = dense_tiles.backward(
        do,
        q,
        k,
        v,
        blocks,
        lse,
        products.row_products(o, do),
        sel_block=8,
        q_start=0,
        scale=0.25,
        dq=held.clone(),
        tiles=tiles,
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = oracle.selected(*leaves, blocks, sel_block=8, scale=0.25)
    dq, dk, dv = torch.autograd.grad(want, leaves, do.double())
    for what, a, b in zip(
        ("o", "dq", "dk", "dv"), (o, *got), (want, dq + held, dk, dv), strict=True
    ):
        assert_parity(a, b, what)
    assert not got[1][:, 48:56].any() and not got[2][:, 48:56].any()
    keep = oracle.kept_selected(q, k, blocks, sel_block=8).transpose(1, 2)
    assert_lse(lse * log(2), attention(q, k, v, keep, 0.25)[1])


def test_a_row_without_a_key_is_exactly_zero() -> None:
    """Row 0 chose nothing, row 1 a block of the future, and both are in a tile of rows that did."""
    case = Case(24, 2, 16, 16, 1)
    q, k, v = qkv(case)
    blocks = torch.zeros(1, 24, 2, 2, dtype=torch.int32)
    blocks[..., 1] = -1
    blocks[:, 0], blocks[:, 1] = -1, 2
    options: dict[str, Any] = {"sel_block": 8, "q_start": 0, "scale": 0.25}
    o, lse = selected_forward.forward(q, k, v, blocks, **options)
    assert not o[:, :2].any() and bool(lse[:, :2].isneginf().all())
    assert bool(lse[:, 2:].isfinite().all())
    do = randn(*o.shape, seed=4)
    dq, dk, dv = selected_backward.backward(
        do, q, k, v, blocks, lse, products.row_products(o, do), **options
    )
    assert not dq[:, :2].any() and all(bool(x.isfinite().all()) for x in (dq, dk, dv))


def test_a_block_that_no_query_of_a_tile_chose_is_not_read() -> None:
    """32 queries a tile. Block 1 is NaN, and only the last tile has a query that chose it."""
    case = Case(96, 1, 16, 16, 1)
    q, k, v = qkv(case)
    blocks = torch.zeros(1, 96, 2, 1, dtype=torch.int32)
    want = attend(q, k, v, blocks)
    blocks[:, 80] = 1
    k[:, 16:32], v[:, 16:32] = torch.nan, torch.nan
    got = attend(q, k, v, blocks)
    assert torch.equal(got[:, :64], want[:, :64]) and bool(got[:, 80].isnan().all())


def test_nan_beyond_the_last_key_is_not_read() -> None:
    case = Case(21, 2, 16, 16, 1)
    q, *kv = qkv(case)
    blocks = torch.tensor([0, 1], dtype=torch.int32).expand(1, 21, 2, 2)
    room = [torch.full((1, 64, 2, 16), torch.nan) for _ in kv]
    for wide, x in zip(room, kv, strict=True):
        wide[:, :21] = x
    got = run(lambda q: attend(q, room[0][:, :21], room[1][:, :21], blocks), [q])
    want = run(lambda q: attend(q, *kv, blocks), [q])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1][0], want[1][0])


def test_three_runs_are_bitwise_equal() -> None:
    case = Case(40, 3, 16, 24, 1)
    blocks = chosen(case, 8, 3, seed=6)
    first, *others = (run(lambda *x: attend(*x, blocks, sel_block=8), qkv(case)) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0]) and all(
            torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True)
        )


@pytest.mark.parametrize("group", [1, 6])
def test_fp16(group: int) -> None:
    case = Case(70, group, 64, 64, 1)
    tensors, blocks = qkv(case, dtype=torch.float16), chosen(case, 16, 3, seed=8)
    kept = oracle.kept_selected(*tensors[:2], blocks, sel_block=16)
    assert_bf16_rule(
        lambda *x: attend(*x, blocks),
        lambda *x: oracle.selected(*x, blocks, sel_block=16),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )


def test_large_logits_are_finite() -> None:
    case = Case(40, 2, 16, 16, 1)
    q, k, v = qkv(case)
    blocks = chosen(case, 8, 3, seed=3)
    o, grads = run(lambda *x: attend(*x, blocks, sel_block=8), (q * 50, k * 50, v))
    assert all(bool(x.isfinite().all()) for x in (o, *grads))


def test_masks_say_who_chose_what() -> None:
    """Of each tile and of each block, against sets made by hand."""
    case, L, QT = Case(50, 1, 16, 16, 2), 4, 7
    start = torch.tensor([3, 25])  # the last queries lie beyond the keys
    blocks = chosen(case, L, 5, seed=2, queries=30)
    masks = TileMasks.of(blocks, 50, L, QT, start, keep=True)
    pairs, count = masks.by_block(L, QT, start)
    of_tiles = masks.pairs[:-1].view(2, 2, 5, masks.room)
    of_blocks = pairs[:-1].view(2, 2, 13, 5)
    who: dict[tuple[int, int, int, int], set[int]] = {}
    for b, t, g, slot in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        j = int(blocks[b, t, g, slot])
        if j >= 0 and j * L <= t + int(start[b]):
            who.setdefault((b, g, t // QT, j), set()).add(t % QT)

    def read(pairs: Tensor, many: Tensor) -> list[tuple[int, set[int]]]:
        return [
            (pair >> 32, {i for i in range(32) if pair >> i & 1})
            for pair in pairs[: int(many)].tolist()
        ]

    for b in range(2):
        for g in range(2):
            for tile in range(5):
                want = [(j, who[b, g, tile, j]) for j in range(13) if (b, g, tile, j) in who]
                assert read(of_tiles[b, g, tile], masks.count[b, g, tile, 0]) == want
                first = tile * QT + int(start[b])
                seen = [j for j, _ in want if (j + 1) * L <= min(first + 1, 50)]
                assert int(masks.count[b, g, tile, 1]) == len(seen)
            for j in range(13):
                want = [(n, who[b, g, n, j]) for n in range(5) if (b, g, n, j) in who]
                assert read(of_blocks[b, g, j], count[b, g, j, 0]) == want
                late = [n for n, _ in want if n * QT + int(start[b]) < (j + 1) * L - 1]
                assert int(count[b, g, j, 1]) == len(late)


@pytest.mark.parametrize(("tokens", "group"), [(512, 6), (256, 16)])
def test_work_is_what_masks_count(tokens: int, group: int) -> None:
    """The estimate of the rule against the pairs of random choices, blocks of 8 tokens, 6 slots."""
    tiles, L, slots = DenseTiles(64, 4), 8, 6
    M, QT = tiles.of_heads(group)
    past = torch.arange(tokens) // L + 1
    keys = randn(tokens, tokens // L, seed=1).masked_fill(
        torch.arange(tokens // L) >= past[:, None], -1e9
    )
    top = keys.topk(slots)
    blocks = top.indices.masked_fill(top.values <= -1e9, -1).int()[None, :, None]
    count = TileMasks.of(blocks, tokens, L, QT, 0, keep=False).count
    pairs, entries = int(count[..., 0].sum()) * M, int((blocks >= 0).sum()) * group
    estimate = dense_tiles.pairs_an_entry(tokens, tokens, slots, group, L, tiles)
    assert pairs / entries == pytest.approx(estimate, rel=0.05)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """By work and rows, a width class; never of few rows, or of a scale that is not above 0."""
    q, v = torch.empty(1, 1024, 12, 64, dtype=torch.bfloat16), torch.empty(1, 1024, 2, 64)
    blocks = torch.empty(1, 1024, 2, 4, dtype=torch.int32)
    work = dense_tiles.pairs_an_entry(1024, 1024, 4, 6, 64, dense_tiles.FORWARD[0])
    for limits, taken in (
        (TileLimits(work + 0.01, 2048), True),
        (TileLimits(work - 0.01, 2048), False),
        (TileLimits(work + 0.01, 2047), False),
        (NEVER, False),
    ):
        monkeypatch.setattr(dense_tiles, "FORWARD_LIMITS", (limits, NEVER, NEVER, NEVER))
        assert dense_tiles.serves(q, v, blocks, 64, 0.125) is taken
    monkeypatch.setattr(dense_tiles, "FORWARD_LIMITS", (ALWAYS, NEVER, NEVER, NEVER))
    assert dense_tiles.serves(q, v, blocks, 64, 0.125)
    assert not dense_tiles.serves(q.float(), v, blocks, 64, 0.125), "class 1, which is off"
    assert not dense_tiles.serves(q, v, blocks, 64, -0.125)
    long = [torch.empty(1, 1 << 17, *x.shape[2:], dtype=x.dtype, device="meta") for x in (q, v)]
    slots = torch.empty(1, 1 << 17, 2, 4, dtype=torch.int32, device="meta")
    assert dense_tiles.serves(*long, slots, 64, 0.125)
    assert not dense_tiles.serves(*long, slots, 64, 0.125, backward=True), "masks of 640 MB"
    for block, served in ((40, True), (64, True), (65, False), (256, False)):
        assert dense_tiles.serves(q, v, blocks, block, 0.125) is served, "400 KB of shared memory"
    many = torch.empty(1, 1024, 130, 64, dtype=torch.bfloat16)
    assert not dense_tiles.serves(many, v, blocks, 64, 0.125), "65 heads of one query: 128 rows"
    monkeypatch.setattr(dense_tiles, "MIN_ROWS", 2049)
    assert not dense_tiles.serves(q, v, blocks, 64, 0.125)


@pytest.mark.parametrize(("queries", "served"), [(1, False), (2, False), (64, True)])
def test_a_tile_that_few_queries_do_not_fill_is_no_gain(
    queries: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding of 1,024 sequences: of a tile's 64 rows, one query of 6 heads fills 6."""
    monkeypatch.undo()  # the limits that were measured
    batch = 1024 // queries
    q = torch.empty(batch, queries, 12, 64, dtype=torch.bfloat16, device="meta")
    v = torch.empty(batch, 2048, 2, 64, dtype=torch.bfloat16, device="meta")
    blocks = torch.empty(batch, queries, 2, 16, dtype=torch.int32, device="meta")
    assert dense_tiles.serves(q, v, blocks, 64, 0.125) is served


LITTLE = NSAConfig(
    cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_initial=1, num_local=1, window=5
)


@pytest.mark.parametrize("joined", [True, False])
def test_packed_documents_share_a_tile(joined: bool, taken: list[str]) -> None:
    """Three documents within one tile of 32 queries, each as if it were alone; NaN of the second
    stays there.
    """
    bounds = [0, 5, 9, 17]
    q, *kv, gates = (
        randn(1, 17, *x, seed=i) for i, x in enumerate([(2, 16), *[(2, 16)] * 6, (2, 3)])
    )
    given = [q, *kv, gates.sigmoid()]

    def attend_to(*x: Tensor, **options: Any) -> Tensor:
        pairs = ((x[1], x[2]), (x[3], x[4]), (x[5], x[6]))
        options |= {"config": LITTLE, "path": "triton", "nonnegative_gates": joined}
        return nsa_attention(x[0], *pairs, x[7], **options)

    def packed(*x: Tensor) -> Tensor:
        return attend_to(*x, cu_seqlens=torch.tensor(bounds))

    def one_by_one(*x: Tensor) -> Tensor:
        parts = [[y[:, a:b] for y in x] for a, b in pairwise(bounds)]
        # whole sequences by PyTorch, which knows no tile
        return torch.cat([nsa_attention_of(part) for part in parts], 1)

    def nsa_attention_of(x: list[Tensor]) -> Tensor:
        pairs = ((x[1], x[2]), (x[3], x[4]), (x[5], x[6]))
        return nsa_attention(x[0], *pairs, x[7], config=LITTLE, path="masked")

    assert_same_function(packed, one_by_one, given, ("q", *"kvkvkv", "gates"))
    assert taken == ["forward", "backward"]
    want = packed(*given)
    for x in given[3:5]:
        x[:, 7] = torch.nan
    got = packed(*given)
    assert torch.equal(got[:, :7], want[:, :7]) and torch.equal(got[:, 9:], want[:, 9:])
    assert bool(got[:, 7:9].isnan().all())
