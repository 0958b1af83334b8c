"""Property 1: every branch equals the fp64 oracle, value and gradients, over pairwise covers of
shapes.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from nsa import compress, compressed_attention, select_blocks, selected_attention, sliding_attention
from nsa.config import NSAConfig
from nsa.routing import Path
from tests import oracle
from tests.cases import (
    BF16_PATHS,
    COVER,
    FAST_PATHS,
    FP64_PATHS,
    INTERPRETED,
    PATHS_HERE,
    SLOW_PATHS,
    SMALL,
    Case,
    assert_bf16_rule,
    assert_blocks,
    assert_lse,
    assert_parity,
    assert_same_function,
    eager_attention,
    here,
    qkv,
    randn,
    random_blocks,
    run,
)

QKV = ("q", "k", "v")
# The slow paths loop in Python, so they take the short sequences of the cover.
SLOW_COVER = tuple(
    case for case in COVER if case.tokens <= 65 or (case.tokens <= 129 and case.group == 6)
)
PATH_CASES = [(path, case) for case in COVER for path in FAST_PATHS if path is not Path.TRITON]
PATH_CASES += [(path, case) for case in SLOW_COVER for path in SLOW_PATHS]
# Every value of (S, group, dims, B) once or more: rows are programs, and the interpreter runs a
# hundred a second.
INTERPRETED_COVER = (
    Case(1, 1, 64, 64, 3),
    Case(15, 6, 192, 128, 1),
    Case(33, 17, 60, 100, 1),
    Case(65, 16, 192, 128, 1),
    Case(100, 16, 60, 100, 1),
    Case(129, 16, 64, 64, 1),
)
PATH_CASES += [(Path.TRITON, case) for case in INTERPRETED_COVER if INTERPRETED]


def by_path(pairs: list[tuple[Path, Case]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("path", "case"), pairs, ids=lambda value: str(value))


@lru_cache(maxsize=2)
def selected_reference(
    case: Case, q_tokens: int
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, list[Tensor]]:
    """(q, k, v), blocks of the oracle's own selection, and the oracle's output and gradients."""
    tensors = qkv(case, q_tokens=q_tokens)
    q_start = case.tokens - q_tokens
    k_cmp = oracle.compress_mean(tensors[1], SMALL.cmp_block, SMALL.cmp_stride)
    blocks = oracle.select(tensors[0], k_cmp, config=SMALL, q_start=q_start)[0].int()
    o, grads = run(
        lambda *x: oracle.selected(*x, blocks, sel_block=16, q_start=q_start),
        tensors,
        dtype=torch.float64,
    )
    return tensors, blocks, o, grads


@by_path(PATH_CASES)
def test_selected(path: Path, case: Case) -> None:
    tensors, blocks, true_o, true_grads = selected_reference(case, case.tokens)
    o, grads = run(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, fa2="off"), tensors
    )
    assert_parity(o, true_o, "o")
    for name, got, want in zip(QKV, grads, true_grads, strict=True):
        assert_parity(got, want, f"d{name}")


@pytest.mark.parametrize("path", PATHS_HERE)
@pytest.mark.parametrize("q_tokens", here([1, 5, 37, 99], [1, 20]))
def test_selected_with_queries_at_the_end(path: Path, q_tokens: int) -> None:
    tensors, blocks, true_o, true_grads = selected_reference(Case(100, 3, 12, 20, 2), q_tokens)
    start = 100 - q_tokens
    o, grads = run(
        lambda *x: selected_attention(
            *x, blocks, sel_block=16, q_start=start, path=path, fa2="off"
        ),
        tensors,
    )
    for what, got, want in zip(
        ("o", "dq", "dk", "dv"), (o, *grads), (true_o, *true_grads), strict=True
    ):
        assert_parity(got, want, what)


@pytest.mark.parametrize("path", PATHS_HERE)
@pytest.mark.parametrize(
    "case",
    here(
        [Case(33, 6, 8, 12, 3), Case(100, 1, 16, 16, 2), Case(129, 16, 8, 8, 1)],
        [Case(33, 6, 8, 12, 1)],
    ),
    ids=str,
)
def test_selected_with_blocks_given_by_hand(path: Path, case: Case) -> None:
    """Arbitrary sets: non-local, without the current block, wholly in the future (masked), nothing
    but -1 (exact 0).
    """
    tensors, blocks = qkv(case), random_blocks(case, SMALL, seed=5)
    kept = oracle.kept_selected(tensors[0], tensors[1], blocks, sel_block=16)
    blind = ~kept.any(-1)
    assert blind.any() and (blocks == -1).all(-1).any(), "the case must have rows that see nothing"
    assert (blocks.long() * 16 > torch.arange(case.tokens)[None, :, None, None]).any(), (
        "and blocks of the future"
    )
    o, grads = run(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, fa2="off"), tensors
    )
    reference = run(
        lambda *x: oracle.selected(*x, blocks, sel_block=16), tensors, dtype=torch.float64
    )
    for what, got, want in zip(
        ("o", "dq", "dk", "dv"), (o, *grads), (reference[0], *reference[1]), strict=True
    ):
        assert_parity(got, want, what)
    heads = blind.repeat_interleave(case.group, 2)
    assert not o[heads].any() and not grads[0][heads].any(), (
        "rows that see nothing are exactly 0, their gradient too"
    )


@pytest.mark.parametrize("path", PATHS_HERE)
def test_selected_with_ragged_starts(path: Path) -> None:
    case = Case(100, 2, 8, 12, 3)
    tokens = here(20, 10)
    tensors, blocks = (
        qkv(case, q_tokens=tokens),
        random_blocks(case, SMALL, seed=6, q_tokens=tokens),
    )
    start = torch.tensor([0, 37, 80])
    assert_same_function(
        lambda *x: selected_attention(
            *x, blocks, sel_block=16, q_start=start, path=path, fa2="off"
        ),
        lambda *x: oracle.selected(*x, blocks, sel_block=16, q_start=start),
        tensors,
        QKV,
    )


@pytest.mark.parametrize("path", FP64_PATHS)
def test_selected_in_fp64_is_exact(path: Path) -> None:
    case = Case(65, 3, 10, 6, 2)
    tensors, blocks = qkv(case, dtype=torch.float64), random_blocks(case, SMALL, seed=7)
    assert_same_function(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, scale=0.7, fa2="off"),
        lambda *x: oracle.selected(*x, blocks, sel_block=16, scale=0.7),
        tensors,
        QKV,
        tolerance=1e-12,
    )


@pytest.mark.parametrize("path", BF16_PATHS)
def test_selected_in_bf16(path: Path) -> None:
    case = Case(33, 2, 16, 16, 1)
    tensors, blocks = qkv(case, dtype=torch.bfloat16), random_blocks(case, SMALL, seed=8)
    kept = oracle.kept_selected(tensors[0], tensors[1], blocks, sel_block=16)
    assert_bf16_rule(
        lambda *x: selected_attention(*x, blocks, sel_block=16, path=path, fa2="off"),
        lambda *x: oracle.selected(*x, blocks, sel_block=16),
        lambda *x: eager_attention(*x, kept),
        tensors,
        QKV,
    )


# The sliding branch.


@pytest.mark.parametrize("case", COVER, ids=str)
def test_sliding(case: Case) -> None:
    assert_same_function(
        lambda *x: sliding_attention(*x, window=24, fa2="off"),
        lambda *x: oracle.sliding(*x, window=24),
        qkv(case),
        QKV,
    )


@pytest.mark.parametrize("window", [1, 2, 23, 64, 99, 100, 101, 1000])
@pytest.mark.parametrize("q_tokens", [1, 30, 100])
def test_sliding_windows_and_late_queries(window: int, q_tokens: int) -> None:
    assert_same_function(
        lambda *x: sliding_attention(*x, window=window, q_start=100 - q_tokens),
        lambda *x: oracle.sliding(*x, window=window, q_start=100 - q_tokens),
        qkv(Case(100, 3, 8, 12, 2), q_tokens=q_tokens),
        QKV,
    )


def test_sliding_with_ragged_starts_and_keys_beyond_the_queries() -> None:
    start = torch.tensor([0, 37, 75])
    assert_same_function(
        lambda *x: sliding_attention(*x, window=24, q_start=start),
        lambda *x: oracle.sliding(*x, window=24, q_start=start),
        qkv(Case(100, 2, 8, 12, 3), q_tokens=20),
        QKV,
    )


def test_the_window_is_exactly_w_tokens() -> None:
    """v one-hot per key: the row's nonzero columns are the keys it saw."""
    q, k = torch.zeros(1, 60, 1, 4), torch.zeros(1, 60, 1, 4)
    seen = sliding_attention(q, k, torch.eye(60).view(1, 60, 1, 60), window=24)[0, :, 0] > 0
    for t in range(60):
        assert seen[t].nonzero().flatten().tolist() == list(range(max(0, t - 23), t + 1))


# The compressed branch.


@pytest.mark.parametrize("case", COVER, ids=str)
def test_compressed(case: Case) -> None:
    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(
            q, compress(k, config=SMALL), compress(v, config=SMALL), block=8, stride=4
        )[0]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle.compressed(
            q, oracle.compress_mean(k, 8, 4), oracle.compress_mean(v, 8, 4), block=8, stride=4
        )[0]

    assert_same_function(branch, reference, qkv(case), QKV)


@pytest.mark.parametrize(
    "case",
    [Case(1, 2, 8, 8, 1), Case(7, 2, 8, 8, 2), Case(8, 1, 8, 8, 1), Case(100, 6, 8, 12, 2)],
    ids=str,
)
@pytest.mark.parametrize("q_tokens", [None, 1])
def test_compressed_lse_and_blind_rows(case: Case, q_tokens: int | None) -> None:
    q, k, v = qkv(case, q_tokens=q_tokens)
    start = case.tokens - q.shape[1]
    k_cmp, v_cmp = oracle.compress_mean(k, 8, 4).float(), oracle.compress_mean(v, 8, 4).float()

    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, block=8, stride=4, q_start=start, scale=0.4)[0]

    o, lse = compressed_attention(q, k_cmp, v_cmp, block=8, stride=4, q_start=start, scale=0.4)
    _, true_lse = oracle.compressed(q, k_cmp, v_cmp, block=8, stride=4, q_start=start, scale=0.4)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert_lse(lse, true_lse)
    blind = torch.isneginf(true_lse)
    assert not o[blind].any(), "exactly 0"
    assert_same_function(
        branch,
        lambda *x: oracle.compressed(*x, block=8, stride=4, q_start=start, scale=0.4)[0],
        (q, k_cmp, v_cmp),
        QKV,
    )
    _, grads = run(branch, (q, k_cmp, v_cmp))
    assert not grads[0][blind].any() and all(torch.isfinite(g).all() for g in grads)


def test_compressed_with_ragged_starts() -> None:
    q, k, v = qkv(Case(100, 2, 8, 12, 3), q_tokens=20)
    start = torch.tensor([0, 37, 80])
    assert_same_function(
        lambda *x: compressed_attention(*x, block=8, stride=4, q_start=start)[0],
        lambda *x: oracle.compressed(*x, block=8, stride=4, q_start=start)[0],
        (q, oracle.compress_mean(k, 8, 4).float(), oracle.compress_mean(v, 8, 4).float()),
        QKV,
    )


@pytest.mark.parametrize("geometry", [(8, 4), (4, 4), (12, 4), (16, 4), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 8, 11, 12, 100, 129])
def test_compress_mean(geometry: tuple[int, int], tokens: int) -> None:
    block, stride = geometry
    config = NSAConfig(cmp_block=block, cmp_stride=stride, sel_block=stride * 4)
    x = randn(2, tokens, 3, 5, seed=1)
    got = compress(x, config=config)
    assert got.shape == (2, oracle.num_compressed(tokens, block, stride), 3, 5)
    assert_same_function(
        lambda x: compress(x, config=config),
        lambda x: oracle.compress_mean(x, block, stride),
        (x,),
        ("x",),
    )
    assert compress(x.bfloat16(), config=config).dtype == torch.bfloat16


# The choice of blocks.


@pytest.mark.parametrize("case", [c for c in COVER if c.batch == 1 or c.tokens <= 129], ids=str)
def test_selection(case: Case) -> None:
    q, k, _ = qkv(case)
    k_cmp = oracle.compress_mean(k, 8, 4).float()
    close = assert_blocks(
        select_blocks(q, k_cmp, config=SMALL), *oracle.select(q, k_cmp, config=SMALL)
    )
    assert close <= 0.01, (
        f"{close:.2%} of the rows are near-ties: the comparison would say too little"
    )
