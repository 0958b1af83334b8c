"""The lists of queries of each block, in Triton's interpreter (`--require interpreter`): what a
stable sort of PyTorch gives; and how many launches a call makes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, nsa_attention
from nsa.ops.kernels import common, products
from nsa.ops.selected.triton import backward as selected_backward
from nsa.ops.selected.triton import chunks
from nsa.ops.selected.triton import forward as selected_forward
from nsa.ops.selected.triton.block_lists import Grid, Lists
from nsa.ops.selected.triton.chunks import grid_of
from nsa.routing.thresholds import COPY_MIN_ELEMENTS
from tests.cases import SMALL, Case, qkv, randn, random_blocks
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401
from tests.nsa.launch_count import launches, table

# batch, rows, kv heads, slots, blocks, rows a chunk; the first rows of a sequence without lists
SIZES = {
    "one chunk": ((1, 300, 2, 13, 40, 300), 0),
    "some rows without": ((2, 90, 2, 5, 12, 180), 33),
    "chunks within a sequence": ((1, 300, 1, 4, 9, 100), 0),
    "chunks that end in a sequence": ((3, 40, 2, 3, 5, 7), 0),
    "chunks of whole sequences": ((4, 20, 2, 3, 5, 40), 4),
    "chunks over a sequence's end": ((3, 40, 1, 3, 5, 60), 10),
    "short sequences": ((70, 3, 2, 4, 6, 45), 0),
    "one row": ((1, 1, 1, 1, 1, 1), 0),
    "one row each": ((9, 1, 2, 3, 4, 4), 0),
    "one slot": ((1, 70, 3, 1, 7, 70), 0),
    "one block": ((2, 70, 2, 1, 1, 140), 0),
    "more blocks than entries": ((1, 30, 2, 4, 3000, 30), 0),
    "many slots": ((1, 20, 2, 100, 150, 20), 0),
}


def chosen(size: tuple[int, ...], kind: str) -> Tensor:
    B, T, G, N, J, _ = size
    given = torch.Generator().manual_seed(B * T + J)
    if kind == "hot":
        return torch.full((B, T, G, N), J // 2, dtype=torch.int32)
    if kind == "empty":
        return torch.full((B, T, G, N), -1, dtype=torch.int32)
    # blocks that do not exist and the same one twice are not lists of their own, nor harm others
    return torch.randint(-2, J + 1, (B, T, G, N), generator=given, dtype=torch.int32)


def by_sorting(blocks: Tensor, J: int, rows_per_chunk: int, full: int) -> tuple[Tensor, ...]:
    """(keys, order, bounds) of int64: (chunk, b, kv head, block), and behind those of a chunk what
    is in no list.
    """
    B, T, G, _ = blocks.shape
    b, t, g = (torch.arange(n) for n in (B, T, G))
    list_ = (b[:, None, None, None] * G + g[:, None]) * J + blocks
    listed = (blocks >= 0) & (blocks < J) & (t[:, None, None] >= full)
    chunk = (b[:, None] * T + t) // rows_per_chunk
    key = chunk[:, :, None, None] * (B * G * J + 1) + torch.where(listed, list_, B * G * J)
    key, order = key.flatten().sort(stable=True)
    num_lists = -(-B * T // rows_per_chunk) * (B * G * J + 1)
    return key, order, torch.searchsorted(key, torch.arange(num_lists + 1))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "sorted"])
@pytest.mark.parametrize("name", SIZES)
def test_lists_are_a_stable_sort(name: str, counted: bool) -> None:
    size, full = SIZES[name]
    for kind in ("random", "hot", "empty"):
        blocks, J, step = chosen(size, kind), *size[4:]
        lists = Lists.of(blocks, J, step, full=full, counted=counted)
        want = by_sorting(blocks, J, step, full)
        for what, got, right in zip(
            ("keys", "order", "bounds"),
            (lists.key_E, lists.order_E, lists.bound),
            want,
            strict=True,
        ):
            assert torch.equal(got.long(), right), (kind, what)
        assert Lists.in_(lists.all, Grid(*size)).key_E.data_ptr() == lists.key_E.data_ptr()


@pytest.mark.parametrize("entries", [1, 10_000], ids=["small tiles", "one tile a part"])
def test_any_tile_gives_the_same(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.ops.selected.triton.block_lists.TILE_ENTRIES", entries)
    size = (2, 40, 2, 4, 6, 50)
    blocks = chosen(size, "random")
    lists = Lists.of(blocks, 6, 50, full=0, counted=True)
    assert torch.equal(lists.order_E.long(), by_sorting(blocks, 6, 50, 0)[1])


def test_what_is_counted() -> None:
    """Counts take no more than the entries times a constant: not few rows over a million tokens."""
    assert Grid(1, 65_536, 2, 16, 1024, 21_845).is_counted
    assert Grid(1, 1 << 20, 4, 16, 1 << 14, 1 << 15).is_counted
    assert Grid(1, 256, 2, 16, 1 << 14, 256).is_counted
    assert not Grid(1024, 1, 2, 16, 1024, 1024).is_counted
    assert not Grid(64, 1 << 20, 2, 16, 1 << 14, 1 << 15).is_counted  # positions beyond int32


def gradients(lists: bool, **options: Any) -> list[Tensor]:
    """o, lse, dq, dk, dv of one case; with ``lists``, of the forward's own."""
    case = Case(14, 2, 16, 16, 2)
    q, k, v = qkv(case)
    blocks, do = random_blocks(case, SMALL, seed=6), randn(2, 14, 4, 16, seed=4)
    where: dict[str, Any] = {"sel_block": SMALL.sel_block, "q_start": 0, "scale": 0.25, **options}
    memory = None
    if lists:
        room = grid_of(q, v, blocks, SMALL.sel_block).room
        memory = torch.empty(room, dtype=torch.int32)
    o, lse = selected_forward.forward(q, k, v, blocks, by_row=False, lists=memory, **where)
    delta = products.row_products(o, do)
    return [
        o,
        lse,
        *selected_backward.backward(do, q, k, v, blocks, lse, delta, lists=memory, **where),
    ]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 65_536), (1, 21_846), (3, 30_000), (1, 100)])
def test_chunks_are_of_one_size_and_no_more_than_needed(batch: int, tokens: int) -> None:
    """Of shape A, whose 65,536 rows would else be three chunks of 21,845 and one of a row."""
    q, v = (torch.empty(batch, tokens, n, 64, dtype=torch.half, device="meta") for n in (12, 2))
    blocks = torch.empty(batch, tokens, 2, 16, dtype=torch.int32, device="meta")
    step, most = (
        grid_of(q, v, blocks, 64).rows_per_chunk,
        (512 << 20) // (16 * 12 * 64 * 2),
    )
    chunks = -(-batch * tokens // step)
    assert step <= most and (chunks - 1) * most < batch * tokens
    assert chunks * step - batch * tokens < chunks


@pytest.mark.parametrize("chunk", [None, 10], ids=["one chunk", "chunks"])
def test_no_bit_depends_on_who_made_the_lists(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted or sorted, the forward's or the backward's own."""
    if chunk is not None:
        monkeypatch.setattr(chunks, "PARTS_OF_Q", 0)
        monkeypatch.setattr(chunks, "PART_BYTES", chunk * SMALL.num_selected * 4 * 16 * 4)
    shared, own = gradients(True), gradients(False)
    monkeypatch.setattr(Grid, "is_counted", False)
    for found in (own, gradients(True), gradients(False)):
        for what, a, b in zip(("o", "lse", "dq", "dk", "dv"), found, shared, strict=True):
            assert torch.equal(a, b), what


def test_the_backward_makes_no_lists_where_the_forward_left_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    of = Lists.of
    monkeypatch.setattr(Lists, "of", lambda *x, **o: (made.append(1), of(*x, **o))[1])
    gradients(True)
    assert len(made) == 1
    gradients(False)
    assert len(made) == 3


# tokens -> launches of a forward and of its backward, shape A: not one more
MOST = {2_048: (8, 9), 16_384: (12, 9)}


@pytest.mark.parametrize("tokens", MOST)
def test_launches(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes the host some 10 us, and 2,048 tokens are to take it 1,000 both ways."""
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", COPY_MIN_ELEMENTS)  # as on a GPU
    config = NSAConfig(cmp_block=32, cmp_stride=16, sel_block=64, num_selected=16, window=512)

    def made(heads: int, dim: int) -> Tensor:
        return torch.empty(1, tokens, heads, dim, dtype=torch.float16).requires_grad_()

    q, *kv = (made(heads, 64) for heads in (12, 2, 2, 2, 2, 2, 2))
    gates, do = made(12, 3), made(12, 64).detach()
    pairs = ((kv[0], kv[1]), (kv[2], kv[3]), (kv[4], kv[5]))
    with launches() as forward:
        o = nsa_attention(q, *pairs, gates, config=config, path="triton", nonnegative_gates=True)
    with launches() as backward:
        torch.autograd.grad(o, [q, gates, *kv], do)
    for names, most in zip((forward, backward), MOST[tokens], strict=True):
        assert len(names) <= most, table(names)
        assert not [name for name in names if name.startswith("aten.")], table(names)
    assert "nsa_gate_products" in backward and "nsa_choose" in forward
