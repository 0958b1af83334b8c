"""Which blocks each query attends to (arXiv 2502.11089, Eq. 8 to 12). Runs under no_grad, in fp32 or wider.

B batch, T query tokens, G kv heads, H query heads per kv head, C compressed blocks, J selection blocks, N selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.ops.positions import query_positions

SCORE_CHUNK_BYTES = 1 << 28  # logits of one chunk of queries


@torch.no_grad()
def choose(q: Tensor, k_cmp: Tensor, *, config: NSAConfig, q_start: int | Tensor, kv_len: int, scale: float) -> Tensor:
    """Blocks int32 [B, T, G, N], ascending, unique, -1 padded at the end. See ``nsa.select_blocks``."""
    grid = BlockGrid.of(config)
    J = grid.num_sel(kv_len)
    position_BT = query_positions(q_start, q.shape[1], q.device)
    if config.num_selected >= J:  # every candidate fits: no score can change the set
        return _all_candidates(q, k_cmp.shape[2], J, position_BT, config)
    with torch.autocast(q.device.type, enabled=False):  # which would score in bf16
        chunks = [_choose_chunk(q[:, rows], k_cmp, position_BT[:, rows], J, config, grid, scale) for rows in _query_slices(q, k_cmp)]
    return torch.cat(chunks, 1)


def block_scores(p: Tensor, grid: BlockGrid, num_sel: int) -> Tensor:
    """Eq. 9: p [..., C] over compressed blocks -> scores [..., J], each weighted by the sub-chunks that it shares."""
    stride = grid.sel_block // grid.cmp_stride
    first, last = grid.overlap[0][0], grid.overlap[-1][0]
    needed = (num_sel - 1) * stride + last + 1
    padded = torch.nn.functional.pad(p, (-first, max(0, needed - p.shape[-1])))
    scores = p.new_zeros(*p.shape[:-1], num_sel)
    for offset, weight in grid.overlap:
        start = offset - first
        scores += weight * padded[..., start : start + (num_sel - 1) * stride + 1 : stride]
    return scores


def _query_slices(q: Tensor, k_cmp: Tensor) -> list[slice]:
    B, T, num_heads, _ = q.shape
    row_bytes = max(1, B * num_heads * k_cmp.shape[1] * 4)
    rows = max(1, SCORE_CHUNK_BYTES // row_bytes)
    return [slice(start, start + rows) for start in range(0, T, rows)]


def _choose_chunk(q: Tensor, k_cmp: Tensor, position_BT: Tensor, J: int, config: NSAConfig, grid: BlockGrid, scale: float) -> Tensor:
    p_BGTC = _group_probabilities(q, k_cmp, position_BT, config, scale)
    scores_BGTJ = block_scores(p_BGTC, grid, J)
    j = torch.arange(J, device=q.device)
    current_BT1 = (position_BT // config.sel_block)[..., None]
    forced_BTJ = ((j < config.num_initial) | (j > current_BT1 - config.num_local)) & (j <= current_BT1)
    # +inf and -inf are outside the range of scores, so no real score can tie with a forced or an absent block.
    ranked = scores_BGTJ.masked_fill(forced_BTJ[:, None], torch.inf).masked_fill((j > current_BT1)[:, None], -torch.inf)
    # A stable sort keeps equal scores in order of their index, which topk does not promise.
    order = ranked.sort(dim=-1, descending=True, stable=True)
    N = config.num_selected
    chosen = torch.where(order.values[..., :N] == -torch.inf, J, order.indices[..., :N]).sort(-1).values
    return chosen.masked_fill(chosen == J, -1).transpose(1, 2).int()


def _group_probabilities(q: Tensor, k_cmp: Tensor, position_BT: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """Eq. 8 and 10: softmax over the visible blocks, summed over the heads of a group. [B, G, T, C]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    C, G = k_cmp.shape[1:3]
    q_BGHTD = q.to(wide).unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4)
    k_BGDC = k_cmp.to(wide).permute(0, 2, 3, 1)
    logits = torch.matmul(q_BGHTD, k_BGDC[:, :, None]) * scale
    last_token_C = torch.arange(C, device=q.device) * config.cmp_stride + config.cmp_block - 1
    hidden_BTC = last_token_C > position_BT[..., None]
    p = logits.masked_fill_(hidden_BTC[:, None, None], -torch.inf).softmax(-1)
    # A row that sees no block has no probabilities: its scores are 0, and its candidates are all forced or few.
    return p.sum(2).masked_fill(hidden_BTC.all(-1)[:, None, :, None], 0.0)


def _all_candidates(q: Tensor, G: int, J: int, position_BT: Tensor, config: NSAConfig) -> Tensor:
    B, T = q.shape[:2]
    j = torch.arange(config.num_selected, device=q.device)
    absent_BTN = (j > (position_BT // config.sel_block)[..., None]) | (j >= J)
    blocks = j.expand(absent_BTN.shape).masked_fill(absent_BTN, -1).int()
    return blocks[:, :, None].expand(B, T, G, -1).contiguous()
