"""On CUDA: the needle of tests/nsa/test_needle.py in 65,536 tokens, all queries at once, on the
paths that hold no S x S mask.
"""

from __future__ import annotations

import pytest
import torch

from nsa import compress, nsa_attention, select_blocks, selected_attention
from nsa.routing import Path
from tests.needle import PAPER, Haystack, assert_found, chosen, haystack, of_head

DEVICE, TOKENS = "cuda", 65_536
GATES = (0.3, 0.5, 0.2)
NEEDLES = {0: 131, 1: 702}
REQUESTS = [("auto", "auto"), (Path.V2, "off"), (Path.V2, "on"), (Path.TRITON, "off")]


def run(stack: Haystack, path: str, fa2: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks, output of the selected branch, output of all three)."""
    with torch.no_grad():
        blocks = select_blocks(stack.q, compress(stack.k, config=PAPER), config=PAPER)
        o_sel = selected_attention(
            stack.q, *stack.kv, blocks, sel_block=PAPER.sel_block, path=path, fa2=fa2
        )
        gates = torch.tensor(GATES, device=DEVICE, dtype=stack.q.dtype).expand(
            *stack.q.shape[:3], 3
        )
        return (
            blocks,
            o_sel,
            nsa_attention(
                stack.q, stack.kv, stack.kv, stack.kv, gates, config=PAPER, path=path, fa2=fa2
            ),
        )


@pytest.mark.parametrize(("path", "fa2"), REQUESTS)
def test_every_query_from_the_needle_on_finds_it_and_none_before(path: str, fa2: str) -> None:
    stack = haystack(TOKENS, NEEDLES, seed=6, dtype=torch.bfloat16, device=DEVICE)
    blocks, o_sel, o = run(stack, path, fa2)
    for head, token in stack.positions.items():
        begins = stack.block(head) * PAPER.sel_block
        found = chosen(blocks, head, stack.block(head))[0]
        assert found[begins:].all() and not found[:begins].any()
        other = chosen(blocks, 1 - head, stack.block(head))[0]
        # Forced while current or the one before; afterwards nobody else wants it.
        assert not other[begins + 2 * PAPER.sel_block :].any()
        for output, gate in ((o_sel, 1.0), (o, GATES[1])):
            assert not of_head(output, head)[:, :token, :, -1].any()
            assert_found(of_head(output, head)[:, token:], gate=gate)


@pytest.mark.parametrize(("path", "fa2"), REQUESTS)
def test_without_the_needle_its_block_is_not_selected(path: str, fa2: str) -> None:
    stack = haystack(TOKENS, NEEDLES, seed=6, dtype=torch.bfloat16, device=DEVICE).without()
    blocks, o_sel, o = run(stack, path, fa2)
    for head in stack.positions:
        after = (stack.block(head) + 2) * PAPER.sel_block
        assert not chosen(blocks, head, stack.block(head))[0, after:].any()
    assert not o_sel[..., -1].any() and not o[..., -1].any()
