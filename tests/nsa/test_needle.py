"""Long context at the paper's geometry: the block that holds what a query wants is selected, and
attended. (64k: tests/gpu.)
"""

from __future__ import annotations

import pytest
import torch

from nsa import compress, nsa_attention, select_blocks, selected_attention
from nsa.routing import Path
from tests.cases import FAST_PATHS, PATHS_HERE, here
from tests.needle import PAPER, Haystack, assert_found, chosen, haystack, of_head

TOKENS = 4096
TAIL = slice(TOKENS - here(16, 4), TOKENS)  # the queries that look back
# beyond it the window would see the needle
LAST_HIDDEN = (TAIL.start - PAPER.window) // PAPER.sel_block - 1
GATES = (0.3, 0.5, 0.2)
# Anywhere but the initial block: neither forced nor in the window, so that the scores alone can
# find it.
DEPTHS = [
    1,
    1 + int(torch.randint(LAST_HIDDEN, (), generator=torch.Generator().manual_seed(8))),
    LAST_HIDDEN,
]
DEPTHS = here(DEPTHS, DEPTHS[1:2])
EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)


def select(stack: Haystack, q_start: int, kv_len: int = TOKENS) -> torch.Tensor:
    return select_blocks(
        stack.q, compress(stack.k, config=PAPER), config=PAPER, q_start=q_start, kv_len=kv_len
    )


def whole(stack: Haystack, q_start: int = 0, path: str = "auto") -> torch.Tensor:
    gates = torch.tensor(GATES).expand(*stack.q.shape[:3], 3)
    return nsa_attention(
        stack.q, stack.kv, stack.kv, stack.kv, gates, config=PAPER, q_start=q_start, path=path
    )


@EVERY_PATH
@pytest.mark.parametrize("block", DEPTHS)
def test_the_needle_is_selected_and_attended(path: Path, block: int) -> None:
    stack = haystack(TOKENS, {0: block, 1: block}, seed=block).queries(TAIL)
    blocks = select(stack, TAIL.start)
    assert all(chosen(blocks, head, block).all() for head in (0, 1))
    o_sel = selected_attention(
        stack.q, *stack.kv, blocks, sel_block=PAPER.sel_block, q_start=TAIL.start, path=path
    )
    assert_found(o_sel, gate=1.0)
    assert_found(whole(stack, TAIL.start, path), gate=GATES[1])


@EVERY_PATH
@pytest.mark.parametrize("block", DEPTHS)
def test_without_the_needle_its_block_is_not_selected(path: Path, block: int) -> None:
    stack = haystack(TOKENS, {0: block, 1: block}, seed=block).queries(TAIL).without()
    blocks = select(stack, TAIL.start)
    assert not any(chosen(blocks, head, block).any() for head in (0, 1))
    o_sel = selected_attention(
        stack.q, *stack.kv, blocks, sel_block=PAPER.sel_block, q_start=TAIL.start, path=path
    )
    assert not o_sel[..., -1].any() and not whole(stack, TAIL.start, path)[..., -1].any()
    assert o_sel.any(), "the rest is attended still"


@pytest.mark.parametrize("path", FAST_PATHS)
def test_each_kv_head_finds_its_own_needle(path: Path) -> None:
    needles = {0: 11, 1: 37}
    stack = haystack(TOKENS, needles, seed=3).queries(TAIL)
    blocks = select(stack, TAIL.start)
    for head, block in needles.items():
        assert chosen(blocks, head, block).all() and not chosen(blocks, 1 - head, block).any()
    o = whole(stack, TAIL.start, path)
    for head in needles:
        assert_found(of_head(o, head), gate=GATES[1])


@pytest.mark.parametrize("path", FAST_PATHS)
def test_a_needle_in_the_future_is_never_selected(path: Path) -> None:
    """Its key and its compressed blocks exist already, as after a whole prefill, and lie beyond the
    last query.
    """
    early = slice(2000, here(2016, 2004))
    stack = haystack(TOKENS, {0: 40, 1: 32}, seed=4).queries(early)
    blocks = select(stack, early.start)
    assert not chosen(blocks, 0, 40).any() and not chosen(blocks, 1, 32).any()
    o_sel = selected_attention(
        stack.q, *stack.kv, blocks, sel_block=PAPER.sel_block, q_start=early.start, path=path
    )
    assert not o_sel[..., -1].any() and not whole(stack, early.start, path)[..., -1].any()


def test_every_query_from_the_needle_on_finds_it_and_none_before() -> None:
    needles = {0: 29, 1: 29}
    stack = haystack(TOKENS, needles, seed=5)
    blocks = select(stack, 0)
    with torch.no_grad():
        o = whole(stack)
    for head, token in stack.positions.items():
        found = chosen(blocks, head, stack.block(head))[0]
        # the current block is a candidate before its needle comes
        begins = stack.block(head) * PAPER.sel_block
        assert found[begins:].all() and not found[:begins].any()
        assert not of_head(o, head)[:, :token, :, -1].any()
        assert_found(of_head(o, head)[:, token:], gate=GATES[1])
