"""The kernels of attention over one interval of keys, in Triton's interpreter (`--require
interpreter`): every grid, layout and part.
"""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import interval
from nsa.ops.interval import backward as interval_backward
from nsa.ops.interval import backward_kv_kernels, backward_q_kernels, forward_kernels, parts
from nsa.ops.kernels import common, products
from nsa.ops.scores import kernels as scores
from tests import oracle
from tests.cases import (
    Case,
    assert_bf16_rule,
    assert_lse,
    assert_same_function,
    eager_attention,
    qkv,
    randn,
)
from tests.nsa.kernel_cases import (
    CAUSAL,
    COMPRESSED,
    QKV,
    RAGGED,
    WINDOW,
    first_of,
    poisoned_memory,  # noqa: F401
    seen,
)


@pytest.mark.parametrize("grid", [COMPRESSED, WINDOW, CAUSAL], ids=["cmp", "win", "causal"])
@pytest.mark.parametrize("start", [0, 37, "ragged", "documents"])
def test_interval(grid: tuple[int, int, int | None], start: int | str) -> None:
    block, stride, width = grid
    ragged, documents = start == "ragged", start == "documents"
    batch, tokens = (3, 20) if ragged else (1, 70)
    q_start = RAGGED if ragged else 0 if documents else int(start)
    keys = 80 if ragged else tokens + int(q_start)
    num_keys = (keys - block) // stride + 1
    # rows of 16-byte units, which the copy engine takes, and others
    dims = (60, 100) if start in (0, "documents") else (61, 99)
    q, _, _ = qkv(Case(tokens, 3, *dims, batch))
    _, k, v = qkv(Case(num_keys, 3, *dims, batch))
    first = first_of(tokens) if documents else None
    visible = seen(oracle.row_positions(q_start, batch, tokens), num_keys, grid, first)[
        :, :, None
    ].expand(-1, -1, 2, -1)
    options = {
        "block": block,
        "stride": stride,
        "width": width,
        "q_start": q_start,
        "first": first,
        "scale": 0.2,
    }
    assert_same_function(
        lambda *x: interval.attend(*x, **options)[0],
        lambda *x: oracle.masked_attention(*x, visible, 0.2)[0],
        (q, k, v),
        QKV,
    )
    o, lse = interval.attend(q, k, v, **options)
    _, want = oracle.masked_attention(q, k, v, visible, 0.2)
    assert_lse(lse * log(2), want)
    assert not o[torch.isneginf(want)].any(), "exactly 0"
    assert torch.isneginf(want).any() == (block > 1 and start != 37), (
        "compressed, the case has rows that see nothing"
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(33, 1, 64, 64, 3),
        Case(33, 16, 192, 128, 1),
        Case(15, 17, 16, 16, 1),
        Case(130, 1, 16, 16, 1),
    ],
    ids=str,
)
def test_interval_of_any_heads(case: Case) -> None:
    q, k, v = qkv(case)
    assert_same_function(
        lambda *x: interval.attend(
            *x, block=1, stride=1, width=24, q_start=0, scale=case.key_dim**-0.5
        )[0],
        lambda *x: oracle.sliding(*x, window=24),
        (q, k, v),
        QKV,
    )


@pytest.mark.parametrize(
    "given",
    [(1, 1), (3, 1), (1, 3), (3, 3)],
    ids=["a head", "all heads", "ranges of a head", "ranges of all heads"],
)
@pytest.mark.parametrize("grid", [COMPRESSED, CAUSAL], ids=["cmp", "causal"])
def test_keys_gradients_in_parts(
    grid: tuple[int, int, int | None], given: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(query heads a program, ranges of queries): small shapes get one head and one range, large
    ones any.
    """
    block, stride, width = grid
    monkeypatch.setattr(parts, "heads_and_ranges", lambda *_, **__: given)
    q, _, _ = qkv(Case(200, 3, 16, 16, 1))
    _, k, v = qkv(Case((200 - block) // stride + 1, 3, 16, 16, 1))
    visible = seen(torch.arange(200)[None], k.shape[1], grid, None)[:, :, None].expand(
        -1, -1, 2, -1
    )
    assert_same_function(
        lambda *x: interval.attend(
            *x, block=block, stride=stride, width=width, q_start=0, scale=0.25
        )[0],
        lambda *x: oracle.masked_attention(*x, visible, 0.25)[0],
        (q, k, v),
        QKV,
    )


@pytest.mark.parametrize(
    ("tiles", "H", "T", "pairs", "wanted"),
    [
        (4, 6, 2_048, 1_560_000, (1, 8)),  # few queries: a range has 256 or more
        (32, 6, 2_048, 12_500_000, (1, 2)),  # eight sequences of them
        (32, 16, 8_192, 134_000_000, (1, 1)),
        (256, 16, 65_536, 8_590_000_000, (1, 1)),  # 4,096 programs
        (256, 16, 65_536, 2_100_000_000, (2, 1)),
        (1, 1, 1 << 20, 1 << 33, (1, 16)),
        # a million tokens: 4,096 are enough, and more would be memory
        (4096, 16, 1 << 20, 1 << 41, (16, 1)),
    ],
)
def test_programs_go_by_the_root_of_the_work(
    tiles: int, H: int, T: int, pairs: int, wanted: tuple[int, int]
) -> None:
    assert parts.heads_and_ranges(tiles, H, T, pairs=pairs, banded=False) == wanted
    assert parts.heads_and_ranges(tiles, H, T, pairs=pairs, banded=True)[1] == 1


def test_half_as_many_programs_that_are_alone() -> None:
    pairs = 12 * 65_536 * 4_095 // 2
    assert parts.heads_and_ranges(64, 6, 65_536, pairs=pairs, banded=False) == (1, 4)
    assert parts.heads_and_ranges(64, 6, 65_536, pairs=pairs, banded=False, alone=True) == (1, 2)
    assert parts.heads_and_ranges(256, 6, 16_384, pairs=pairs, banded=True) == (1, 1)
    assert parts.heads_and_ranges(256, 6, 16_384, pairs=pairs, banded=True, alone=True) == (3, 1)


@pytest.mark.parametrize("kind", ["odd offset", "odd address", "expanded", "room beyond the end"])
def test_layouts_of_inputs(kind: str) -> None:
    """Whatever strides and addresses: what the copy engine cannot take is loaded otherwise, and NaN
    beyond the end is never read.
    """

    def laid_out(x: Tensor) -> Tensor:
        if kind == "odd offset":
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        if kind == "odd address":  # as of memory that another library allocated
            memory = bytearray(4 * x.numel() + 32)
            begin = (4 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
            return (
                torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=begin)
                .copy_(x.flatten())
                .view(x.shape)
            )
        if kind == "expanded":
            return x[:1].expand(x.shape)
        room = x.new_full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), torch.nan)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]

    case = Case(40, 3, 16, 32, 2)
    plain = [
        x[:1].repeat(2, 1, 1, 1) if kind == "expanded" else x
        for x in (*qkv(case), randn(2, 40, 6, 32, seed=4))
    ]
    other = [laid_out(x) for x in plain]
    geometry = {"block": 8, "stride": 4, "width": None, "q_start": 0, "first": None, "scale": 0.25}
    chosen = {
        "block": 8,
        "stride": 4,
        "sel_block": 8,
        "num_selected": 3,
        "num_initial": 1,
        "num_local": 1,
        "kv_len": 40,
        "scale": 0.25,
    }

    def everything(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        k, v, do = k[:, :9], v[:, :9], do.contiguous()  # as the operators hand it over
        o, lse = forward_kernels.forward(q, k, v, **geometry)
        blocks = scores.choose(q, k, lse, q_start=0, first=None, **chosen)
        return [
            o,
            lse,
            blocks,
            *interval_backward.backward(do, q, k, v, lse, products.row_products(o, do), **geometry),
        ]

    for a, b in zip(everything(*plain), everything(*other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("least", [0, 40 * 6 * 16, 40 * 6 * 16 + 1])
def test_descriptors_are_made_for_calls_of_many_elements_only(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is loaded otherwise is the same."""
    q, k, v = qkv(Case(40, 3, 16, 32, 2))
    do, geometry = (
        randn(2, 40, 6, 32, seed=4),
        {"block": 1, "stride": 1, "width": 24, "q_start": 0, "first": None, "scale": 0.25},
    )
    taken: list[bool] = []

    def watched(*given: Any, **options: Any) -> Any:
        found = common.described(*given, **options)
        taken.append(found[1])
        return found

    def everything() -> list[Tensor]:
        o, lse = forward_kernels.forward(q[:1], k[:1], v[:1], **geometry)
        return [
            o,
            lse,
            *interval_backward.backward(
                do[:1], q[:1], k[:1], v[:1], lse, products.row_products(o, do[:1]), **geometry
            ),
        ]

    for module in (forward_kernels, backward_q_kernels, backward_kv_kernels):
        monkeypatch.setattr(module, "described", watched)
    want = everything()
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", least)
    for a, b in zip(everything(), want, strict=True):
        assert torch.equal(a, b)
    assert taken == [True] * 3 + [least <= q[:1].numel()] * 3


def test_no_key_at_all() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Case(5, 2, 16, 16, 1)))
    o, lse = interval.attend(
        q, k[:, :0], v[:, :0], block=8, stride=4, width=None, q_start=0, scale=0.25
    )
    assert not o.any() and torch.isneginf(lse).all()
    assert not torch.autograd.grad(o.sum(), q)[0].any()


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


@pytest.mark.parametrize("limit", [1, 2])
def test_a_grid_that_is_full_gives_the_same_gradients(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS.md, grid limits: five million keys are 81,920 tiles, and a grid's third dimension
    holds 65,535.
    """
    q, k, v = qkv(Case(330, 1, 16, 16, 1), seed=1)
    do, grid = randn(*q.shape, seed=5), {"block": 1, "stride": 1, "width": 24}
    geometry = {**grid, "q_start": 0, "first": None, "scale": 0.25}
    o, lse = forward_kernels.forward(q, k, v, **geometry)
    delta = products.row_products(o, do)
    want = interval_backward.backward(do, q, k, v, lse, delta, **geometry)
    monkeypatch.setattr(parts, "GRID_LIMIT", limit)
    got = interval_backward.backward(do, q, k, v, lse, delta, **geometry)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_grids_fit_at_five_million_keys() -> None:
    assert parts.grid(8, 1, 65_535) == (8, 1, 65_535)
    for tiles in (65_536, 5 * 2**20 // 64, 5 * 2**20 // 32):
        x, y, z = parts.grid(8, 3, tiles)
        assert y == 3 and z <= 65_535 and x % 8 == 0 and tiles <= x // 8 * z < tiles + x // 8
