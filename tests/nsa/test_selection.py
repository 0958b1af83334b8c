"""Property 7 and the rules of Eq. 8 to 10: ties, forced slots, padding, visible-only softmax, no
gradient.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa.oracle
from nsa import select_blocks
from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.selection import block_scores
from tests import oracle
from tests.cases import SMALL, Case, assert_blocks, qkv, randn

PAPER = NSAConfig()
REGIONS = replace(SMALL, num_selected=6, selection="hierarchical")
NAN, HUGE = float("nan"), 3e38
# Blocks of four strides over blocks of two, and other forced counts than the paper's.
WIDE = NSAConfig(
    cmp_block=16, cmp_stride=4, sel_block=8, num_selected=6, num_initial=2, num_local=3
)


def small_keys(case: Case, *, seed: int = 0, q_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    q, k, _ = qkv(case, seed=seed, q_tokens=q_tokens)
    return q, oracle.compress_mean(k, 8, 4).float()


@pytest.mark.parametrize("config", [PAPER, SMALL, WIDE])
def test_one_hot_adds_its_overlap(config: NSAConfig) -> None:
    num_cmp, num_sel = 40, 10
    scores = block_scores(torch.eye(num_cmp), BlockGrid.of(config), num_sel)
    torch.testing.assert_close(
        scores,
        oracle.block_scores(torch.eye(num_cmp), config=config, num_sel=num_sel),
        rtol=0,
        atol=0,
    )


def test_one_hot_at_the_papers_geometry_by_hand() -> None:
    scores = block_scores(torch.eye(16), BlockGrid.of(PAPER), 4)
    for i in range(16):
        want = {i // 4: 2.0} if i % 4 != 3 else {i // 4: 1.0, i // 4 + 1: 1.0}
        assert {j: s for j, s in enumerate(scores[i].tolist()) if s} == {
            j: s for j, s in want.items() if j < 4
        }


def test_block_scores_batch_and_missing_tail() -> None:
    p = torch.rand(2, 3, 2, 23, generator=torch.Generator().manual_seed(0))
    want = oracle.block_scores(p.double(), config=SMALL, num_sel=7)
    torch.testing.assert_close(
        block_scores(p, BlockGrid.of(SMALL), 7).double(), want, rtol=1e-6, atol=1e-6
    )
    assert block_scores(p[..., :0], BlockGrid.of(SMALL), 1).shape == (2, 3, 2, 1)


@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize("config", [SMALL, WIDE])
def test_equal_scores_choose_the_lowest_index(heads: int, config: NSAConfig) -> None:
    """q = 0: p is uniform, so interior blocks tie exactly in every row; compare with exact rational
    scores.
    """
    tokens = 200
    num_cmp = oracle.num_compressed(tokens, config.cmp_block, config.cmp_stride)
    k_cmp = randn(1, num_cmp, 1, 8, seed=0)
    blocks = select_blocks(torch.zeros(1, tokens, heads, 8), k_cmp, config=config)
    chunks, ratio = config.cmp_block // config.cmp_stride, config.sel_block // config.cmp_stride
    for t in range(tokens):
        visible = oracle.num_compressed(t + 1, config.cmp_block, config.cmp_stride)
        exact = {
            j: sum(oracle.shared_chunks(i, j, chunks, ratio) for i in range(visible))
            for j in range(t // config.sel_block + 1)
        }
        forced = oracle.forced_blocks(t, config)
        ranked = sorted(exact.keys() - forced, key=lambda j: (-exact[j], j))
        want = sorted(forced | set(ranked[: config.num_selected - len(forced)]))
        assert [j for j in blocks[0, t, 0].tolist() if j >= 0] == want, f"row {t}"


def test_ties_of_large_scores() -> None:
    """Two blocks share all the mass: their scores tie above 0.5, where an index bias of 1e-8 would
    vanish in fp32.
    """
    k_cmp = torch.zeros(1, 63, 1, 4)
    k_cmp[0, [13, 25, 37], 0, 0] = 64.0
    blocks = select_blocks(torch.ones(1, 256, 4, 4), k_cmp, config=SMALL)[0, 255, 0].tolist()
    # Compressed blocks 13, 25, 37 lie inside selection blocks 3, 6, 9; forced are 0, 14, 15; two
    # slots are free.
    assert blocks == [0, 3, 6, 14, 15]


def test_underflowed_past_blocks_still_beat_the_future() -> None:
    """One logit of 1e4: every other visible block's p is exactly 0, and a future block must not win
    that tie.
    """
    k_cmp = torch.zeros(1, 63, 1, 4)
    k_cmp[0, 20, 0, 0] = 1e4
    blocks = select_blocks(torch.ones(1, 256, 2, 4), k_cmp, config=SMALL)
    block_of = torch.arange(256) // 16
    assert (blocks[0, :, 0] <= block_of[:, None]).all()
    # Forced are 0, 11, 12; compressed block 20 is inside block 5; the zeros tie, so block 1.
    assert blocks[0, 200, 0].tolist() == [0, 1, 5, 11, 12]


def test_forced_blocks_hold_against_saturated_scores() -> None:
    """All mass in blocks 3, 4 and 5: a magic score of 1.0 for forced blocks would lose to them."""
    k_cmp = torch.zeros(1, 63, 1, 4)
    k_cmp[0, 12:24, 0, 0] = 50.0
    blocks = select_blocks(torch.ones(1, 256, 16, 4), k_cmp, config=SMALL)[0, :, 0]
    for t in range(256):
        assert oracle.forced_blocks(t, SMALL) <= set(blocks[t].tolist())


@pytest.mark.parametrize("where", ["key", "query", "head", "overflow", "infinite"])
@pytest.mark.parametrize("config", [SMALL, WIDE, REGIONS])
def test_forced_blocks_keep_their_slots_whatever_the_scores_are(
    where: str, config: NSAConfig
) -> None:
    """FAULTS.md, numbers that are not finite in scores: NaN was sorted before the forced blocks.

    Scores that are no number count as 0, so that a row of them takes its lowest free blocks.
    """
    tokens = 400
    num_cmp = oracle.num_compressed(tokens, config.cmp_block, config.cmp_stride)
    dtype = torch.bfloat16 if where == "overflow" else torch.float32
    q, k_cmp = (randn(1, n, h, 8, seed=h, dtype=dtype) for n, h in ((tokens, 2), (num_cmp, 1)))
    if where == "key":
        k_cmp[0, 30] = NAN
    if where == "infinite":
        k_cmp[0, 30] = torch.inf
    if where in ("query", "head"):
        q[0, 200:, slice(None) if where == "query" else 1] = NAN
    if where == "overflow":
        q[0, 200:] = k_cmp[0, 30] = HUGE
    blocks = select_blocks(q, k_cmp, config=config)
    for t in range(tokens):
        row = [j for j in blocks[0, t, 0].tolist() if j >= 0]
        assert oracle.forced_blocks(t, config) <= set(row), (t, row)
        assert row == sorted(set(row)) and row[-1] <= t // config.sel_block, (t, row)
    # far from the next score: the fp64 oracle, which overflows nowhere, is asked about the others
    if where != "overflow" and config.selection == "exact":
        want = oracle.select(q, k_cmp, config=config)[0]
        hit = torch.arange(tokens) >= 200
        assert torch.equal(blocks[:, hit].long(), want[:, hit])
        ours = nsa.oracle.select(q, k_cmp, config=config)[0]
        assert torch.equal(ours[:, hit], want[:, hit])


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        WIDE,
        NSAConfig(8, 4, 16, 3, 24),
        NSAConfig(8, 4, 16, 4, 24, num_initial=0, num_local=1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 7, 8, 15, 16, 17, 80, 81, 100, 257])
def test_rows_are_ascending_unique_padded_and_causal(config: NSAConfig, tokens: int) -> None:
    q, k, _ = qkv(Case(tokens, 3, 8, 8, 2), seed=tokens)
    k_cmp = oracle.compress_mean(k, config.cmp_block, config.cmp_stride).float()
    blocks = select_blocks(q, k_cmp, config=config)
    assert blocks.shape == (2, tokens, 2, config.num_selected) and blocks.dtype == torch.int32
    for b, t, g in ((b, t, g) for b in range(2) for t in range(tokens) for g in range(2)):
        row = blocks[b, t, g].tolist()
        chosen = [j for j in row if j != -1]
        candidates = t // config.sel_block + 1
        assert row == chosen + [-1] * (config.num_selected - len(chosen)), "-1 only at the end"
        assert chosen == sorted(set(chosen)), "ascending, no duplicates"
        assert len(chosen) == min(config.num_selected, candidates), (
            "every slot is used while candidates last"
        )
        assert chosen[0] >= 0 and chosen[-1] == t // config.sel_block, (
            "the current block is the last one"
        )
        assert oracle.forced_blocks(t, config) <= set(chosen)


def test_num_selected_smaller_than_the_forced_blocks_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_selected=2"):
        NSAConfig(num_selected=2)
    NSAConfig(num_selected=3)


def test_fewer_blocks_than_slots_at_the_papers_geometry() -> None:
    """S = 100, l' = 64, n = 16: elsewhere 'selected index k out of range'."""
    q, k, _ = qkv(Case(100, 6, 64, 64, 1))
    blocks = select_blocks(q, oracle.compress_mean(k, 32, 16).float(), config=PAPER)
    assert (blocks[0, :64] == torch.tensor([0] + [-1] * 15)).all()
    assert (blocks[0, 64:] == torch.tensor([0, 1] + [-1] * 14)).all()


def test_no_compressed_block_at_all() -> None:
    blocks = select_blocks(randn(2, 5, 4, 8, seed=0), torch.empty(2, 0, 2, 8), config=SMALL)
    assert (blocks == torch.tensor([0, -1, -1, -1, -1])).all()


def test_the_softmax_sees_visible_blocks_only() -> None:
    """Making future compressed keys attractive must move nothing, bit for bit."""
    q, k_cmp = small_keys(Case(200, 3, 8, 8, 2))
    before = select_blocks(q, k_cmp, config=SMALL)
    for t in (50, 99, 131, 199):
        changed = k_cmp.clone()
        changed[:, oracle.num_compressed(t + 1, 8, 4) :] = 1e4
        assert torch.equal(select_blocks(q, changed, config=SMALL)[:, : t + 1], before[:, : t + 1])


def test_indices_carry_no_gradient() -> None:
    q, k_cmp = (x.requires_grad_() for x in small_keys(Case(100, 2, 8, 8, 1)))
    blocks = select_blocks(q, k_cmp, config=SMALL)
    assert not blocks.requires_grad and blocks.grad_fn is None


def test_bf16_inputs_are_scored_in_fp32() -> None:
    """Rounding scores to bf16 would change the chosen set of most near-uniform rows."""
    q, k_cmp = small_keys(Case(200, 6, 16, 16, 1))
    q, k_cmp = (q * 0.2).bfloat16(), k_cmp.bfloat16()
    assert_blocks(select_blocks(q, k_cmp, config=SMALL), *oracle.select(q, k_cmp, config=SMALL))


@pytest.mark.parametrize("cuts", [(50,), (1, 17, 81, 129), tuple(range(1, 200, 13))])
def test_chunks_select_what_the_whole_selects(cuts: tuple[int, ...]) -> None:
    q, k_cmp = small_keys(Case(200, 3, 8, 8, 2))
    _, gap = oracle.select(q, k_cmp, config=SMALL)
    whole = select_blocks(q, k_cmp, config=SMALL)
    parts = []
    for first, last in zip((0, *cuts), (*cuts, 200), strict=True):
        visible = k_cmp[:, : oracle.num_compressed(last, 8, 4)]
        parts.append(select_blocks(q[:, first:last], visible, config=SMALL, q_start=first))
    assert_blocks(torch.cat(parts, 1), whole.long(), gap)


def test_kv_len_may_exceed_the_queries() -> None:
    q, k_cmp = small_keys(Case(200, 3, 8, 8, 2))
    whole = select_blocks(q, k_cmp, config=SMALL)
    part = select_blocks(q[:, 40:90], k_cmp, config=SMALL, q_start=40, kv_len=200)
    want, gap = oracle.select(q[:, 40:90], k_cmp, config=SMALL, q_start=40, kv_len=200)
    assert_blocks(part, want, gap)
    assert_blocks(part, whole[:, 40:90].long(), gap)


def test_rows_of_different_lengths() -> None:
    q, k_cmp = small_keys(Case(200, 2, 8, 8, 3), q_tokens=30)
    start = torch.tensor([0, 77, 170])
    want, gap = oracle.select(q, k_cmp, config=SMALL, q_start=start, kv_len=200)
    assert_blocks(select_blocks(q, k_cmp, config=SMALL, q_start=start, kv_len=200), want, gap)


def test_selection_is_repeatable_and_batch_rows_are_independent() -> None:
    q, k_cmp = small_keys(Case(200, 3, 8, 8, 3))
    first = select_blocks(q, k_cmp, config=SMALL)
    assert torch.equal(first, select_blocks(q, k_cmp, config=SMALL))
    _, gap = oracle.select(q, k_cmp, config=SMALL)
    order = torch.tensor([2, 0, 1])
    assert_blocks(
        select_blocks(q[order], k_cmp[order], config=SMALL), first[order].long(), gap[order]
    )


def test_the_oracles_own_gap_is_measured_where_blocks_compete() -> None:
    q, k_cmp = small_keys(Case(200, 3, 8, 8, 1))
    _, gap = oracle.select(q, k_cmp, config=SMALL)
    assert torch.isinf(gap[0, :80]).all() and torch.isfinite(gap[0, 81:]).all()
    assert float((gap[0, 81:] > 1e-5).double().mean()) > 0.99
