"""Workloads selected and selected_forward: the selected branch alone, on inputs and blocks of its
own.

B batch, T tokens, G kv heads, N slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nsa.config import ModelConfig
from nsa.functional import selected_attention
from perfbench.records import Cell
from perfbench.worker.workloads import block_patterns
from perfbench.worker.workloads.attention import NUM_INPUTS


class SelectedBranch(nn.Module):
    """`nsa.selected_attention` of q, k, v and the blocks that it is given; has no parameters."""

    names = ("q", "k", "v", "blocks")

    def __init__(self, model: ModelConfig, path: str, fa2: str) -> None:
        super().__init__()
        self.model, self.path, self.fa2 = model, path, fa2

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return selected_attention(
            q, k, v, blocks, sel_block=self.model.nsa.sel_block, path=self.path, fa2=self.fa2
        )


def inputs(
    model: ModelConfig, cell: Cell, *, dtype: torch.dtype, device: str, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Random q, k, v, and blocks of the cell's kind (`block_patterns.chosen`), then the output's
    gradient where the cell has a backward; for ever.

    With a backward q, k and v are leaves that want a gradient. ``seed`` decides all of it.
    """
    generator, backward = torch.Generator(device).manual_seed(seed), cell.has_backward

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(
            cell.batch, cell.seq_len, heads, width, dtype=dtype, device=device, generator=generator
        )

    def one() -> tuple[Tensor, ...]:
        q = normal(model.num_heads, model.head_dim)
        k, v = (normal(model.num_kv_heads, width) for width in (model.head_dim, model.value_dim))
        blocks = block_patterns.chosen(
            cell.selection,
            q,
            config=model.nsa,
            num_kv_heads=model.num_kv_heads,
            generator=generator,
        )
        leaves = [x.requires_grad_(backward) for x in (q, k, v)]
        return (*leaves, blocks, *((normal(model.num_heads, model.value_dim),) if backward else ()))

    return itertools.cycle([one() for _ in range(NUM_INPUTS)])
