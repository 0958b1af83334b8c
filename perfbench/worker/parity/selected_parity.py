"""Proof of the selected branch alone: blocks of the cell's kind, and what the path makes of them,
against the oracle.

B batch, T tokens, G kv heads, N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nsa import oracle
from nsa.blocks import BlockGrid
from nsa.config import ModelConfig
from nsa.functional import selected_attention
from perfbench.worker.parity import layer
from perfbench.worker.parity.blocks import BlocksProof, is_malformed
from perfbench.worker.parity.comparison import Comparison, Tensors
from perfbench.worker.workloads import block_patterns


def blocks_of(kind: str, q: Tensor, model: ModelConfig, seed: int) -> Tensor:
    """Blocks int32 [B, T, G, N] of the ``kind``, made as a timed cell makes its own."""
    generator = torch.Generator(q.device).manual_seed(seed)
    return block_patterns.chosen(
        kind, q, config=model.nsa, num_kv_heads=model.num_kv_heads, generator=generator
    )


def check(
    model: ModelConfig,
    blocks: Tensor,
    path: str,
    fa2: str,
    inputs: Tensors,
    rows: Tensor,
    train: bool,
    compare: Comparison,
    compiled: bool = False,
) -> None:
    """Add to ``compare``: rows of ``blocks`` that break the contract, the output, and with
    ``train`` the gradients of q, k and v.

    ``inputs`` are q [B, T, HQ, D] and k_sel, v_sel [B, T, G, .]; ``rows`` the positions that are
    judged.
    """
    tokens, sel_block = inputs["q"].shape[1], model.nsa.sel_block
    on_rows = blocks[:, rows.to(blocks.device)].cpu()
    compare.add_blocks(BlocksProof(_broken(on_rows, model, rows, tokens), None, None, {}))

    def cell(t: Tensors) -> Tensor:
        return selected_attention(
            t["q"], t["k_sel"], t["v_sel"], blocks, sel_block=sel_block, path=path, fa2=fa2
        )

    def judged(attend: layer.Attend) -> Callable[[Tensors], Tensor]:
        keep = oracle.selected_mask(rows[None], on_rows, tokens, sel_block)
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    given = {name: inputs[name] for name in ("q", "k_sel", "v_sel")}
    compare.attention(
        layer.compiled_of(cell) if compiled else cell,
        judged,
        given,
        rows,
        list(given) if train else [],
    )


def _broken(on_rows: Tensor, model: ModelConfig, rows: Tensor, tokens: int) -> int:
    """Rows that do not have every forced block, every slot filled that can be, and the order and
    the range that are promised.
    """
    slots = model.nsa.num_selected_for(tokens)
    fixed = replace(model.nsa, num_selected=slots, adaptive_num_selected=False, selection="exact")
    if on_rows.shape[-1] != slots:
        return on_rows[..., 0].numel()
    return int(is_malformed(on_rows.long(), fixed, rows, BlockGrid.of(fixed).num_sel(tokens)).sum())
