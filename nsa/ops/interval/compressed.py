"""Compressed branch: every query over the compressed blocks that end at or before it.

B batch, T query tokens, C compressed blocks, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.documents import Documents
from nsa.ops import sdpa
from nsa.ops.operator import define_formula, int_and_tensor, is_transformed
from nsa.ops.positions import query_positions
from nsa.ops.precision import without_autocast


def attend(
    q_BTQD: Tensor,
    k_BCGD: Tensor,
    v_BCGD: Tensor,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor,
    scale: float,
    documents: Documents | None = None,
) -> Tensor:
    """Returns o [B, T, HQ, DV]; a row that sees no block is exactly 0, and so are its gradients."""
    at, q_starts = int_and_tensor(q_start)
    first_BT = None if documents is None else documents.first_BT
    run = _attend if is_transformed() else torch.ops.nsa.compressed_sdpa
    o: Tensor = run(q_BTQD, k_BCGD, v_BCGD, q_starts, first_BT, at, block, stride, scale)
    return o


def _attend(
    q_BTQD: Tensor,
    k_BCGD: Tensor,
    v_BCGD: Tensor,
    q_starts: Tensor | None,
    first_BT: Tensor | None,
    q_start: int,
    block: int,
    stride: int,
    scale: float,
) -> Tensor:
    if k_BCGD.shape[1] == 0:
        return _zeros_in_graph(q_BTQD, k_BCGD, v_BCGD)
    visible_BTC = visible_blocks(
        q_BTQD,
        k_BCGD.shape[1],
        block=block,
        stride=stride,
        q_start=q_start if q_starts is None else q_starts,
        first_BT=first_BT,
    )
    blind_BT = ~visible_BTC.any(-1)
    # A blind row is given every block, so that its softmax is finite, and its output is then
    # dropped.
    mask = (visible_BTC | blind_BT[..., None])[:, None]
    o = sdpa.grouped(q_BTQD, k_BCGD, v_BCGD, mask, scale=scale)
    return o.masked_fill(blind_BT[..., None, None], 0.0)


@torch.no_grad()
def log_sum_exp(
    q_BTQD: Tensor, k_BCGD: Tensor, *, block: int, stride: int, q_start: int | Tensor, scale: float
) -> Tensor:
    """lse [B, T, HQ], natural log, fp32 or wider; -inf where no block is visible.

    Carries no gradient.
    """
    wide = torch.promote_types(q_BTQD.dtype, torch.float32)
    B, T, num_heads, _ = q_BTQD.shape
    C, G = k_BCGD.shape[1:3]
    visible = visible_blocks(q_BTQD, C, block=block, stride=stride, q_start=q_start)
    q = q_BTQD.to(wide).unflatten(2, (G, num_heads // G))
    with without_autocast(q.device):  # which would multiply in bf16
        logits = torch.einsum("btghd,bcgd->btghc", q, k_BCGD.to(wide)) * scale
    return (
        logits.masked_fill(~visible[:, :, None, None], -torch.inf)
        .logsumexp(-1)
        .reshape(B, T, num_heads)
    )


def visible_blocks(
    q_BTQD: Tensor,
    num_blocks: int,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor,
    first_BT: Tensor | None = None,
) -> Tensor:
    """Boolean [1 or B, T, C]: block i ends at i * stride + block - 1, and the query sees it from
    there on, in its own document, which begins at ``first_BT``.
    """
    first_token_C = torch.arange(num_blocks, device=q_BTQD.device) * stride
    visible_BTC = (
        first_token_C + block - 1
        <= query_positions(q_start, q_BTQD.shape[1], q_BTQD.device)[..., None]
    )
    return visible_BTC if first_BT is None else visible_BTC & (first_token_C >= first_BT[..., None])


def _zeros_in_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Sums over nothing: exactly 0, with a gradient of exactly 0 for every input.
    zero_BTQ1 = q[..., :0].sum(-1, keepdim=True) + k.sum() + v.sum()
    return zero_BTQ1.expand(*q.shape[:-1], v.shape[-1])


define_formula(
    "compressed_sdpa",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? first, SymInt q_start, SymInt block,"
    " SymInt stride, float scale) -> Tensor",
    _attend,
)
