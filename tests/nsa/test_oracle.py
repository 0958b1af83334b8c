"""Tests of the reference: hand-computed cases, then the second oracle (nsa.oracle), written
independently.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig
from tests import oracle
from tests.cases import SMALL, Case, qkv, randn, random_blocks, run

CASES = (Case(1, 1, 4, 4, 1), Case(65, 3, 12, 8, 2), Case(100, 1, 8, 8, 1), Case(129, 6, 4, 10, 2))
Attend = Callable[..., Tensor]


def test_one_visible_key_returns_its_value() -> None:
    q, k, v = randn(1, 1, 2, 4, seed=0), randn(1, 1, 1, 4, seed=1), randn(1, 1, 1, 3, seed=2)
    want = v.double().expand(1, 1, 2, 3)
    torch.testing.assert_close(oracle.causal(q, k, v), want)
    torch.testing.assert_close(oracle.sliding(q, k, v, window=5), want)
    torch.testing.assert_close(
        oracle.selected(q, k, v, torch.zeros(1, 1, 1, 1), sel_block=16), want
    )


def test_two_keys_by_hand() -> None:
    q = torch.tensor([2.0, 0.0]).view(1, 1, 1, 2)
    k = torch.tensor([[math.log(3), 5.0], [0.0, -7.0]]).view(1, 2, 1, 2)
    v = torch.tensor([[1.0], [9.0]]).view(1, 2, 1, 1)
    # logits ln 3 and 0 under scale 1/2: weights 3/4 and 1/4.
    o, lse = oracle.compressed(q, k, v, block=1, stride=1, q_start=1, scale=0.5)
    assert o.item() == pytest.approx(0.75 * 1 + 0.25 * 9)
    assert lse.item() == pytest.approx(math.log(4))
    assert oracle.sliding(q, k, v, window=1, q_start=1).item() == 9.0


def test_compress_mean_by_hand() -> None:
    x = torch.arange(11.0).view(1, 11, 1, 1)
    assert oracle.compress_mean(x, 4, 2).flatten().tolist() == [1.5, 3.5, 5.5, 7.5]
    assert oracle.compress_mean(x[:, :3], 4, 2).shape == (1, 0, 1, 1)
    assert [oracle.num_compressed(s, 32, 16) for s in (0, 31, 32, 47, 48, 2048)] == [
        0,
        0,
        1,
        1,
        2,
        127,
    ]


def test_overlap_weights_of_the_paper() -> None:
    column = [oracle.shared_chunks(i, 2, 2, 4) for i in range(6, 13)]
    assert column == [0, 1, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_selected_and_a_wide_window_are_full_causal_attention(case: Case) -> None:
    q, k, v = qkv(case)
    want = oracle.causal(q, k, v)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(
            x.double().transpose(1, 2)
            for x in (q, k.repeat_interleave(case.group, 2), v.repeat_interleave(case.group, 2))
        ),
        attn_mask=torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril(),
    ).transpose(1, 2)
    torch.testing.assert_close(want, plain)
    every = torch.arange(-(-case.tokens // 16)).expand(case.batch, case.tokens, case.kv_heads, -1)
    torch.testing.assert_close(oracle.selected(q, k, v, every, sel_block=16), want)
    torch.testing.assert_close(oracle.sliding(q, k, v, window=case.tokens), want)
    torch.testing.assert_close(oracle.compressed(q, k, v, block=1, stride=1)[0], want)


def test_blind_rows_are_zero_with_finite_gradients() -> None:
    q, k, v = qkv(Case(12, 2, 4, 4, 1))

    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cmp, v_cmp = oracle.compress_mean(k, 8, 4), oracle.compress_mean(v, 8, 4)
        return oracle.compressed(q, k_cmp, v_cmp, block=8, stride=4)[0]

    o, grads = run(branch, (q, k, v), dtype=torch.float64)
    assert not o[:, :7].any() and o[:, 7:].all()
    assert not grads[0][:, :7].any() and all(torch.isfinite(g).all() for g in grads)
    _, lse = oracle.compressed(
        q, oracle.compress_mean(k, 8, 4), oracle.compress_mean(v, 8, 4), block=8, stride=4
    )
    assert torch.isneginf(lse[:, :7]).all() and torch.isfinite(lse[:, 7:]).all()


def test_selection_by_hand() -> None:
    """d = l = 2, l' = 4: block j owns compressed blocks 2j and 2j + 1; the key of compressed block
    5 is the only attractive one.
    """
    config = NSAConfig(
        cmp_block=2, cmp_stride=2, sel_block=4, num_selected=4, num_initial=1, num_local=2
    )
    k_cmp = torch.zeros(1, 12, 1, 2)
    k_cmp[0, 5] = 1.0
    q = torch.ones(1, 24, 1, 2)
    blocks, gap = oracle.select(q, k_cmp, config=config)
    rows = blocks[0, :, 0].tolist()
    assert rows[0] == [0, -1, -1, -1] and rows[11] == [0, 1, 2, -1] and rows[15] == [0, 1, 2, 3]
    assert rows[23] == [0, 2, 4, 5]
    assert rows[19] == [0, 2, 3, 4], "block 2 holds the attractive key"
    assert torch.isinf(gap[0, :16]).all()
    assert gap[0, 23, 0] > 0.1


def test_ties_choose_the_lowest_index_by_hand() -> None:
    blocks, gap = oracle.select(torch.zeros(1, 160, 1, 4), torch.ones(1, 39, 1, 4), config=SMALL)
    assert blocks[0, 159, 0].tolist() == [0, 1, 2, 8, 9]
    assert gap[0, 159, 0] == 0


@pytest.mark.parametrize("kind", ["interleaved", "half"])
def test_rope_keeps_norms_and_relative_positions(kind: str) -> None:
    q, k = randn(1, 9, 2, 8, seed=0), randn(1, 9, 2, 8, seed=1)
    at = torch.arange(9)
    torch.testing.assert_close(oracle.rope(q, at, kind=kind).norm(dim=-1), q.double().norm(dim=-1))
    torch.testing.assert_close(oracle.rope(q, torch.zeros(9), kind=kind), q.double())

    def logits(shift: int) -> Tensor:
        a, b = oracle.rope(q, at + shift, kind=kind), oracle.rope(k, at + shift, kind=kind)
        return torch.einsum("bthd,bshd->bhts", a, b)

    torch.testing.assert_close(logits(0), logits(1000))


def test_rope_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    c, s, c2, s2 = math.cos(2), math.sin(2), math.cos(0.02), math.sin(0.02)
    at = torch.tensor([2])
    assert oracle.rope(x, at).flatten().tolist() == pytest.approx(
        [c - 2 * s, s + 2 * c, 3 * c2 - 4 * s2, 3 * s2 + 4 * c2]
    )
    half = oracle.rope(x, at, kind="half").flatten().tolist()
    assert half == pytest.approx([c - 3 * s, 2 * c2 - 4 * s2, s + 3 * c, 2 * s2 + 4 * c2])


# The two oracles.


@pytest.fixture(scope="module")
def second() -> ModuleType:
    return importlib.import_module("nsa.oracle")


def agree(mine: Attend, theirs: Attend, tensors: tuple[Tensor, ...]) -> None:
    (o, grads), (other, other_grads) = (
        run(mine, tensors, dtype=torch.float64),
        run(theirs, tensors, dtype=torch.float64),
    )
    assert other.dtype == torch.float64
    torch.testing.assert_close(other, o, rtol=1e-11, atol=1e-11)
    for got, want in zip(other_grads, grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_both_oracles_agree(second: ModuleType, case: Case, late: bool) -> None:
    q, k, v = qkv(case, q_tokens=max(1, case.tokens // 2) if late else None)
    q_start = case.tokens - q.shape[1]
    blocks = random_blocks(case, SMALL, seed=3, q_tokens=q.shape[1])
    agree(
        *(
            lambda q, k, v, m=m: m.sliding(q, k, v, window=24, q_start=q_start)
            for m in (oracle, second)
        ),
        (q, k, v),
    )
    agree(
        *(
            lambda q, k, v, m=m: m.selected(q, k, v, blocks, sel_block=16, q_start=q_start)
            for m in (oracle, second)
        ),
        (q, k, v),
    )
    agree(*(lambda x, m=m: m.compress_mean(x, 8, 4) for m in (oracle, second)), (k,))
    k_cmp, v_cmp = oracle.compress_mean(k, 8, 4), oracle.compress_mean(v, 8, 4)
    agree(
        *(
            lambda *x, m=m: m.compressed(*x, block=8, stride=4, q_start=q_start)[0]
            for m in (oracle, second)
        ),
        (q, k_cmp, v_cmp),
    )
    lse, other = (
        m.compressed(q, k_cmp, v_cmp, block=8, stride=4, q_start=q_start, scale=0.3)[1]
        for m in (oracle, second)
    )
    torch.testing.assert_close(other, lse, rtol=1e-11, atol=1e-11)
    at = torch.arange(case.tokens)
    for kind in ("interleaved", "half"):
        agree(
            *(
                lambda x, m=m, kind=kind: m.rope(x, at, base=500.0, scale=0.5, kind=kind)
                for m in (oracle, second)
            ),
            (k,),
        )


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        NSAConfig(
            cmp_block=4, cmp_stride=4, sel_block=8, num_selected=4, num_initial=2, num_local=1
        ),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_oracles_select_the_same_blocks(
    second: ModuleType, case: Case, config: NSAConfig
) -> None:
    q, k, _ = qkv(case)
    k_cmp = oracle.compress_mean(k, config.cmp_block, config.cmp_stride)
    blocks, gap = oracle.select(q, k_cmp, config=config)
    other, other_gap = second.select(q, k_cmp, config=config)
    clear = gap > 1e-9
    assert torch.equal(other[clear], blocks[clear])
    competes = torch.isfinite(gap)
    assert torch.equal(torch.isfinite(other_gap), competes)
    torch.testing.assert_close(other_gap[competes], gap[competes], rtol=1e-6, atol=1e-9)


def test_both_oracles_take_ragged_starts(second: ModuleType) -> None:
    case = Case(100, 2, 8, 8, 3)
    q, k, v = qkv(case, q_tokens=20)
    start = torch.tensor([0, 37, 80])
    k_cmp, v_cmp = oracle.compress_mean(k, 8, 4), oracle.compress_mean(v, 8, 4)
    blocks, gap = oracle.select(q, k_cmp, config=SMALL, q_start=start, kv_len=100)
    other, _ = second.select(q, k_cmp, config=SMALL, q_start=start, kv_len=100)
    assert torch.equal(other[gap > 1e-9], blocks[gap > 1e-9])
    for m in (oracle, second):
        for b in range(3):
            one = slice(b, b + 1)
            alone = oracle.sliding(q[one], k[one], v[one], window=24, q_start=int(start[b]))
            torch.testing.assert_close(m.sliding(q, k, v, window=24, q_start=start)[one], alone)
            alone = oracle.compressed(
                q[one], k_cmp[one], v_cmp[one], block=8, stride=4, q_start=int(start[b])
            )[0]
            torch.testing.assert_close(
                m.compressed(q, k_cmp, v_cmp, block=8, stride=4, q_start=start)[0][one], alone
            )
            alone = oracle.selected(
                q[one], k[one], v[one], blocks[one], sel_block=16, q_start=int(start[b])
            )
            torch.testing.assert_close(
                m.selected(q, k, v, blocks, sel_block=16, q_start=start)[one], alone
            )


def test_whole_layer_is_the_gated_sum_of_its_branches() -> None:
    case = Case(100, 2, 8, 6, 1)
    q, k, v = qkv(case)
    gates = torch.rand(1, 100, 4, 3, generator=torch.Generator().manual_seed(4))
    only = [
        oracle.nsa(q, (k, v), (k, v), (k, v), torch.eye(3)[i].expand(1, 100, 4, 3), config=SMALL)
        for i in range(3)
    ]
    whole = oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=SMALL)
    torch.testing.assert_close(whole, sum(only[i] * gates[..., i, None].double() for i in range(3)))
    without = oracle.nsa(
        q, (k, v), (k, v), (k, v), gates, config=NSAConfig(8, 4, 16, 5, 24, branches=("cmp", "win"))
    )
    torch.testing.assert_close(without, sum(only[i] * gates[..., i, None].double() for i in (0, 2)))
