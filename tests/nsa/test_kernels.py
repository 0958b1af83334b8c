"""The Triton kernels themselves, in Triton's interpreter (`--require interpreter`): what a small call through path `triton` does not reach.

Both forwards of the selected branch, several chunks and segments, every kind of interval, ties in the choice of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops import combine, interval
from nsa.ops.kernels import interval as interval_kernels
from nsa.ops.kernels import products, scores, selected
from nsa.ops.selected import triton as operator
from tests import oracle
from tests.cases import (
    SMALL,
    Case,
    assert_bf16_rule,
    assert_blocks,
    assert_lse,
    assert_parity,
    assert_same_function,
    choose_by_kernel,
    eager_attention,
    qkv,
    randn,
    random_blocks,
    run,
)

QKV = ("q", "k", "v")
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def poisoned_memory(one_thread: None) -> Iterator[None]:
    """Memory that no kernel wrote holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Attention over one interval of keys.

COMPRESSED, WINDOW, CAUSAL = (8, 4, None), (1, 1, 24), (1, 1, None)  # block, stride, width
RAGGED = torch.tensor([5, 60, 31])
DOCUMENTS = torch.tensor([0, 16, 48])  # where they begin


def seen(position_BT: Tensor, num_keys: int, grid: tuple[int, int, int | None], first_T: Tensor | None) -> Tensor:
    """bool [B, T, C]: the key's last token is no later than the query, its first is of the document, and it is within the width."""
    block, stride, width = grid
    key = torch.arange(num_keys)
    kept = key * stride + block - 1 <= position_BT[..., None]
    if first_T is not None:
        kept = kept & (key * stride >= first_T[:, None])
    if width is not None:
        kept = kept & (key > position_BT[..., None] - width)
    return kept


def first_of(tokens: int) -> Tensor:
    return DOCUMENTS[(torch.arange(tokens)[:, None] >= DOCUMENTS).sum(1) - 1]


@pytest.mark.parametrize("grid", [COMPRESSED, WINDOW, CAUSAL], ids=["cmp", "win", "causal"])
@pytest.mark.parametrize("start", [0, 37, "ragged", "documents"])
def test_interval(grid: tuple[int, int, int | None], start: int | str) -> None:
    block, stride, width = grid
    ragged, documents = start == "ragged", start == "documents"
    batch, tokens = (3, 20) if ragged else (1, 70)
    q_start = RAGGED if ragged else 0 if documents else int(start)
    keys = 80 if ragged else tokens + int(q_start)
    num_keys = (keys - block) // stride + 1
    dims = (60, 100) if start in (0, "documents") else (61, 99)  # rows of 16-byte units, which the copy engine takes, and others
    q, _, _ = qkv(Case(tokens, 3, *dims, batch))
    _, k, v = qkv(Case(num_keys, 3, *dims, batch))
    first = first_of(tokens) if documents else None
    visible = seen(oracle.row_positions(q_start, batch, tokens), num_keys, grid, first)[:, :, None].expand(-1, -1, 2, -1)
    options = {"block": block, "stride": stride, "width": width, "q_start": q_start, "first": first, "scale": 0.2}
    assert_same_function(
        lambda *x: interval.attend(*x, **options)[0], lambda *x: oracle.masked_attention(*x, visible, 0.2)[0], (q, k, v), QKV
    )
    o, lse = interval.attend(q, k, v, **options)
    _, want = oracle.masked_attention(q, k, v, visible, 0.2)
    assert_lse(lse * log(2), want)
    assert not o[torch.isneginf(want)].any(), "exactly 0"
    assert torch.isneginf(want).any() == (block > 1 and start != 37), "compressed, the case has rows that see nothing"


@pytest.mark.parametrize(
    "case", [Case(33, 1, 64, 64, 3), Case(33, 16, 192, 128, 1), Case(15, 17, 16, 16, 1), Case(130, 1, 16, 16, 1)], ids=str
)
def test_interval_of_any_heads(case: Case) -> None:
    q, k, v = qkv(case)
    assert_same_function(
        lambda *x: interval.attend(*x, block=1, stride=1, width=24, q_start=0, scale=case.key_dim**-0.5)[0],
        lambda *x: oracle.sliding(*x, window=24),
        (q, k, v),
        QKV,
    )


@pytest.mark.parametrize("parts", [(1, 1), (3, 1), (1, 3), (3, 3)], ids=["a head", "all heads", "ranges of a head", "ranges of all heads"])
@pytest.mark.parametrize("grid", [COMPRESSED, CAUSAL], ids=["cmp", "causal"])
def test_keys_gradients_in_parts(grid: tuple[int, int, int | None], parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """(query heads a program, ranges of queries): small shapes get one head and one range, large ones any."""
    block, stride, width = grid
    monkeypatch.setattr(interval_kernels, "parts_of", lambda *_, **__: parts)
    q, _, _ = qkv(Case(200, 3, 16, 16, 1))
    _, k, v = qkv(Case((200 - block) // stride + 1, 3, 16, 16, 1))
    visible = seen(torch.arange(200)[None], k.shape[1], grid, None)[:, :, None].expand(-1, -1, 2, -1)
    assert_same_function(
        lambda *x: interval.attend(*x, block=block, stride=stride, width=width, q_start=0, scale=0.25)[0],
        lambda *x: oracle.masked_attention(*x, visible, 0.25)[0],
        (q, k, v),
        QKV,
    )


@pytest.mark.parametrize("kind", ["odd offset", "odd address", "expanded", "room beyond the end"])
def test_layouts_of_inputs(kind: str) -> None:
    """Whatever strides and addresses: what the copy engine cannot take is loaded otherwise, and NaN beyond the end is never read."""

    def laid_out(x: Tensor) -> Tensor:
        if kind == "odd offset":
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        if kind == "odd address":  # as of memory that another library allocated
            memory = bytearray(4 * x.numel() + 32)
            begin = (4 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
            return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=begin).copy_(x.flatten()).view(x.shape)
        if kind == "expanded":
            return x[:1].expand(x.shape)
        room = x.new_full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), torch.nan)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]

    case = Case(40, 3, 16, 32, 2)
    plain = [x[:1].repeat(2, 1, 1, 1) if kind == "expanded" else x for x in (*qkv(case), randn(2, 40, 6, 32, seed=4))]
    other = [laid_out(x) for x in plain]
    geometry = {"block": 8, "stride": 4, "width": None, "q_start": 0, "first": None, "scale": 0.25}
    chosen = {"block": 8, "stride": 4, "sel_block": 8, "num_selected": 3, "num_initial": 1, "num_local": 1, "kv_len": 40, "scale": 0.25}

    def everything(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        k, v = k[:, :9], v[:, :9]
        o, lse = interval_kernels.forward(q, k, v, **geometry)
        blocks = scores.choose(q, k, lse, q_start=0, first=None, **chosen)
        return [o, lse, blocks, *interval_kernels.backward(do, q, k, v, lse, products.row_products(o, do.contiguous()), **geometry)]

    for a, b in zip(everything(*plain), everything(*other), strict=True):
        assert torch.equal(a, b)


def test_no_key_at_all() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Case(5, 2, 16, 16, 1)))
    o, lse = interval.attend(q, k[:, :0], v[:, :0], block=8, stride=4, width=None, q_start=0, scale=0.25)
    assert not o.any() and torch.isneginf(lse).all()
    assert not torch.autograd.grad(o.sum(), q)[0].any()


# Attention over chosen blocks.


@pytest.fixture(params=["query-outer", "KV-outer", "KV-outer in chunks"])
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel the forward takes; in chunks, the backward too."""
    if request.param != "query-outer":
        monkeypatch.setattr(selected, "MIN_ROWS_TO_SORT", 0)
    return str(request.param)


def chunks_of(rows: int, case: Case, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rows`` (b, t) a chunk of the narrower of K and V, fewer of the wider."""
    row_bytes = case.kv_heads * num_slots * case.group * min(case.key_dim, case.value_dim) * 4
    monkeypatch.setattr(selected, "PART_BYTES", rows * row_bytes)


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, sel_block: int = 16, q_start: int | Tensor = 0) -> Tensor:
    return operator.attend(q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=q.shape[-1] ** -0.5, fa2=None)


def assert_selected(tensors: tuple[Tensor, ...], blocks: Tensor, *, sel_block: int = 16, q_start: int | Tensor = 0) -> None:
    options = {"sel_block": sel_block, "q_start": q_start}
    assert_same_function(lambda *x: attend(*x, blocks, **options), lambda *x: oracle.selected(*x, blocks, **options), tensors, QKV)


SELECTED = [
    (Case(33, 6, 60, 100, 1), 33, 0, 8),  # sequence, queries, where they begin, selection block
    (Case(60, 3, 16, 32, 2), 10, 50, 12),
    (Case(80, 2, 16, 16, 3), 6, RAGGED, 16),
    (Case(17, 17, 16, 16, 1), 17, 0, 4),
]


@pytest.mark.parametrize(("case", "queries", "start", "sel_block"), SELECTED, ids=["whole", "late", "ragged", "many heads"])
def test_selected(forward: str, case: Case, queries: int, start: int | Tensor, sel_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets given by hand: blocks of the future, rows of nothing but -1, chunks that end inside a sequence of the batch."""
    blocks = random_blocks(case, replace(SMALL, sel_block=sel_block), seed=5, q_tokens=queries)
    blocks[0, 0] = -1
    if forward == "KV-outer in chunks":
        chunks_of(7, case, blocks.shape[-1], monkeypatch)
    assert_selected(qkv(case, q_tokens=queries), blocks, sel_block=sel_block, q_start=start)


@pytest.mark.parametrize("segments", [1, 3])
def test_runs_of_one_block_over_many_tiles(segments: int) -> None:
    """Tiles of 16 rows: block 0's queries fill several, and a program of the backward has several segments of several blocks."""
    case, scale = Case(40, 3, 16, 32, 1), 0.25
    q, k, v = qkv(case)
    blocks = torch.tensor([0, 1, 2], dtype=torch.int32).expand(1, 40, 2, 3).clone()
    blocks[:, :, 1, 0] = -1  # the second kv head's list of block 0 is empty
    blocks = torch.where(blocks * 8 > torch.arange(40)[:, None, None], -1, blocks).sort(-1, descending=True).values
    blocks = torch.where(blocks < 0, 9, blocks).sort(-1).values.masked_fill_((blocks < 0).sort(-1).values, -1).int()
    tiles, do = selected.Tiles(16, 1, segments), randn(1, 40, 6, 32, seed=4)
    options = {"sel_block": 8, "q_start": 0, "scale": scale, "tiles": tiles}
    o, lse = selected.forward(q, k, v, blocks, by_row=False, **options)
    got = (o, *selected.backward(do, q, k, v, blocks, lse, products.row_products(o, do), **options))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = oracle.selected(*leaves, blocks, sel_block=8, scale=scale)
    for what, a, b in zip(("o", "dq", "dk", "dv"), got, (want, *torch.autograd.grad(want, leaves, do.double())), strict=True):
        assert_parity(a, b, what)


def test_three_runs_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(12, 3, 16, 24, 1)
    blocks = random_blocks(case, SMALL, seed=6)
    monkeypatch.setattr(selected, "MIN_ROWS_TO_SORT", 0)
    chunks_of(5, case, blocks.shape[-1], monkeypatch)
    first, *others = (run(lambda *x: attend(*x, blocks), qkv(case)) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0]) and all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))


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


def test_interval_in_fp16() -> None:
    tensors = qkv(Case(20, 3, 16, 16, 1), dtype=torch.float16)
    kept = oracle.kept_window(*tensors[:2], window=9)
    assert_bf16_rule(
        lambda *x: interval.attend(*x, block=1, stride=1, width=9, q_start=0, scale=0.25)[0],
        lambda *x: oracle.sliding(*x, window=9),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )


# The choice of blocks.


CHOICES = [
    (SMALL, 1, 97, 0, 1.0),  # config, batch, queries, where they begin, size of the queries
    (replace(SMALL, cmp_block=4, sel_block=4), 2, 12, 300, 1.0),
    (replace(SMALL, sel_block=8, num_selected=6, num_local=3, num_initial=2), 1, 12, 700, 3.0),
    (replace(SMALL, num_selected=7), 3, 6, torch.tensor([5, 300, 131]), 1.0),
    (replace(SMALL, num_selected=16), 1, 8, 4000, 1.0),  # 251 blocks: more than CANDIDATES, which a threshold thins out
]


@pytest.mark.parametrize(("config", "batch", "queries", "start", "size"), CHOICES, ids=["whole", "no overlap", "sharp", "ragged", "far"])
def test_choice(config: NSAConfig, batch: int, queries: int, start: int | Tensor, size: float) -> None:
    keys = queries + int(torch.as_tensor(start).max())
    num_cmp = oracle.num_compressed(keys, config.cmp_block, config.cmp_stride)
    q = size * randn(batch, queries, 3 if batch == 1 else 4, 16, seed=1)
    k_cmp = randn(batch, num_cmp, 1 if batch == 1 else 2, 16, seed=2)
    got = choose_by_kernel(q, k_cmp, config, q_start=start, kv_len=keys)
    want = oracle.select(q, k_cmp, config=config, q_start=start)
    assert torch.isfinite(want[1]).any(), "blocks compete"
    assert assert_blocks(got, *want) <= 0.02


def test_choice_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_cmp = randn(2, 40, 2, 16, seed=1), randn(2, 33, 1, 16, seed=2)
    options = {"block": 8, "stride": 4, "q_start": 100, "first": None, "scale": 0.25}
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **options)
    tiles = {"BM": 16, "BC": 16, "num_warps": 1, "num_stages": 1}
    slots = {"sel_block": 16, "num_selected": 5, "num_initial": 1, "num_local": 2, "kv_len": 140}
    got = scores.choose(q, k_cmp, lse, **options, **slots, tiles=tiles, score_bytes=1)
    assert_blocks(got, *oracle.select(q, k_cmp, config=SMALL, q_start=100))


def test_choice_in_packed_documents() -> None:
    """Each document's blocks are those it would choose alone, counted from its own first."""
    config, bounds = replace(SMALL, num_selected=4), [0, 16, 112, 128]
    q, k_cmp = randn(1, 128, 2, 16, seed=1), randn(1, 31, 1, 16, seed=2)
    first = torch.tensor([0] * 16 + [16] * 96 + [112] * 16)
    got = choose_by_kernel(q, k_cmp, config, q_start=0, kv_len=128, first=first)
    for begin, end in itertools.pairwise(bounds):
        own = k_cmp[:, begin // 4 : (end - 8) // 4 + 1]
        blocks, gap = oracle.select(q[:, begin:end], own, config=config)
        assert_blocks(got[:, begin:end], torch.where(blocks < 0, -1, blocks + begin // 16), gap)


@pytest.mark.parametrize(("start", "branch"), [(400, "counted"), (1500, "one by one")])
def test_equal_scores_go_to_the_lower_index(start: int, branch: str) -> None:
    """Of queries of 0 every block inside the past has one score; beyond CANDIDATES of them slots are filled one by one."""
    config = replace(SMALL, num_selected=8)
    assert (start // 16 + 1 > scores.CANDIDATES) == (branch == "one by one")
    num_cmp = oracle.num_compressed(start + 6, 8, 4)
    got = choose_by_kernel(torch.zeros(1, 6, 2, 16), randn(1, num_cmp, 1, 16, seed=2), config, q_start=start, kv_len=start + 6)
    for i in range(6):
        current = (start + i) // 16
        assert got[0, i, 0].tolist() == [0, 1, 2, 3, 4, 5, current - 1, current]


def one_hot(num_cmp: int, hot: int) -> tuple[Tensor, Tensor]:
    """(q, k_cmp) whose probabilities are exactly 1 at compressed block ``hot`` and 0 elsewhere, in fp32."""
    k_cmp = torch.zeros(1, num_cmp, 1, 16)
    k_cmp[0, hot, 0, 0] = 500.0
    q = torch.zeros(1, 3, 2, 16)
    q[..., 0] = 1.0
    return q, k_cmp


@pytest.mark.parametrize("start", [480, 1600])
@pytest.mark.parametrize(
    ("hot", "wanted"),
    [(4 * 9 + 1, [0, 1, 2, 9]), (4 * 9 + 3, [0, 1, 9, 10]), (4 * 20, [0, 1, 2, 20])],
    ids=["inside", "straddling", "first"],
)
def test_one_probability_of_1_names_the_blocks_it_overlaps(start: int, hot: int, wanted: list[int]) -> None:
    """All other scores are exactly 0: the lowest indices take what is left."""
    config = replace(SMALL, num_selected=6)
    q, k_cmp = one_hot(oracle.num_compressed(start + 3, 8, 4), hot)
    got = choose_by_kernel(q, k_cmp, config, q_start=start, kv_len=start + 3, scale=1.0)
    assert got[0, :, 0].tolist() == [[*wanted, start // 16 - 1, start // 16]] * 3


def test_a_tie_of_a_few_among_many_goes_to_the_lower_index() -> None:
    """Six blocks share the best score, three slots are free, and no other of the 100 comes near: a threshold leaves nine to count."""
    config, start, k_cmp = replace(SMALL, num_selected=6), 1600, torch.zeros(1, 399, 1, 16)
    assert start // 16 + 1 > scores.CANDIDATES
    for block in (9, 20, 33, 47, 60, 70):
        k_cmp[0, 4 * block + 1, 0, 0] = 20.0
    got = choose_by_kernel(torch.eye(16)[:1].expand(1, 3, 2, 16), k_cmp, config, q_start=start, kv_len=start + 3, scale=1.0)
    assert got[0, :, 0].tolist() == [[0, 9, 20, 33, 99, 100]] * 3


# The gated sum.


@pytest.mark.parametrize("value_dim", [16, 100])
def test_gated_sum(value_dim: int) -> None:
    gates = randn(2, 3, 33, 3, seed=0).transpose(1, 2)
    tensors = (gates, *(randn(2, 33, 3, value_dim, seed=i) for i in (1, 2, 3)))

    def truth(g: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("bthn,nbthd->bthd", g, torch.stack([a, b, c]))

    def fused(g: Tensor, *outputs: Tensor) -> Tensor:
        return combine.fused_gated_sum(g, outputs, (0, 1, 2))

    assert_same_function(fused, truth, tensors, ("gates", "cmp", "sel", "win"))


# What PyTorch is told of the operators.


def operator_calls() -> dict[str, tuple[object, ...]]:
    q, k, v = qkv(Case(6, 2, 16, 24, 1))
    o, lse = randn(1, 6, 4, 24, seed=3), randn(1, 6, 4, seed=4)
    blocks = torch.zeros(1, 6, 2, 2, dtype=torch.int32)
    blocks[..., 1] = -1
    gates, window, chosen = randn(1, 6, 4, 3, seed=5), (0, 1, 1, 3, 0.25), (0, 4, 0, 0.25)
    left = (blocks, *(o + i for i in range(3)), *(lse + i for i in range(3)))
    joined = (gates.sigmoid(), q, *(x + i for i in range(3) for x in (k, v)), *left, None, None, 0, 1, 1, 4, 3, 0, 0.25)
    return {
        "interval": (q, k, v, None, None, *window),
        "interval_backward": (o, o, lse, q, k, v, None, None, *window),
        "selected_triton": (q, k, v, blocks, None, *chosen),
        "selected_triton_backward": (o, o, lse, q, k, v, blocks, None, *chosen),
        "choose": (q, k, lse, None, None, 0, 6, 1, 1, 4, 2, 1, 1, 0.25),
        "gated_sum": (gates, o, o + 1, o + 2),
        "gated_sum_backward": (o, gates, o, o + 1, o + 2),
        "joined": joined,
        "joined_backward": (o, *joined),
    }


@pytest.mark.parametrize("name", operator_calls())
def test_the_operators_keep_what_their_schemas_promise(name: str) -> None:
    """No alias, no mutation, a gradient that is registered; fake tensors as real ones, for dynamic shapes as well."""
    arguments = operator_calls()[name]
    if name in ("interval", "selected_triton", "gated_sum", "joined"):
        wanted = len(arguments) if name != "joined" else 8  # what the branches left is constant
        arguments = tuple(
            x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and i < wanted else x for i, x in enumerate(arguments)
        )
    torch.library.opcheck(getattr(torch.ops.nsa, name).default, arguments)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Case(4, 1, 16, 16, 1)))
    blocks = torch.zeros(1, 4, 2, 1, dtype=torch.int32)
    (d_q,) = torch.autograd.grad(attend(q, k, v, blocks).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        d_q.sum().backward()


def test_a_penalty_on_gradients_is_not_dropped() -> None:
    """The incoming gradient depends on nothing here; the gradients do."""
    q, k, v = (x.requires_grad_() for x in qkv(Case(4, 1, 16, 16, 1)))
    blocks = torch.zeros(1, 4, 2, 1, dtype=torch.int32)
    o = attend(q, k, v, blocks)
    (d_q,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (o.sum() + d_q.square().sum()).backward()
