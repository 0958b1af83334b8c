"""Attention by an explicit softmax over explicit logits, for what no fused kernel here computes: a
soft cap of the logits, sinks, the log-sum-exp.

Serves every branch on path reference. Memory is bounded by chunks of queries, which a backward
computes again.

B batch, T query tokens, S keys, Q query heads, G kv heads, H query heads per kv head, D head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.ops.derivatives import has_transforms
from nsa.ops.exporting import is_exporting
from nsa.ops.interval.compressed import visible_blocks
from nsa.ops.masks import token_mask
from nsa.ops.positions import query_positions
from nsa.ops.precision import without_autocast

CHUNK_BYTES = 1 << 28  # logits of one chunk of queries

_LOG = logging.getLogger(__name__)

# rows of the queries -> the keys that they see, bool [B or 1, G or 1, rows, S]
Keep = Callable[[slice], Tensor]


def attend(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    keep: Keep,
    *,
    scale: float,
    softcap: float | None,
    sink_Q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, Q, DV] in q's dtype, lse [B, T, Q], natural log, fp32 or wider, without gradient).

    A logit z, scaled, is softcap * tanh(z / softcap). ``sink_Q`` is each head's logit of one more
    key, whose value is 0; the lse is without it. A row that sees no key is exactly 0, its lse -inf.
    """
    B, T, Q, _ = q_BTQD.shape
    if not torch.compiler.is_compiling():
        _LOG.warning("Using slow explicit softmax: path=reference, %d rows", B * T * Q)
    rows = max(1, CHUNK_BYTES // max(1, B * Q * k_BSGD.shape[1] * 4))
    chunks = (
        [slice(0, T)]  # a loop over range would bind a compiled region to this T
        if is_exporting() or rows >= T
        else [slice(start, min(start + rows, T)) for start in range(0, T, rows)]
    )

    def part(chunk: slice) -> tuple[Tensor, Tensor]:
        return _attend(q_BTQD[:, chunk], k_BSGD, v_BSGD, keep(chunk), scale, softcap, sink_Q)

    if len(chunks) == 1:
        return part(chunks[0])
    # torch.func allows no hooks of saved tensors, which a checkpoint has
    if torch.is_grad_enabled() and not has_transforms():
        parts = [
            checkpoint(part, chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
    else:
        parts = [part(chunk) for chunk in chunks]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _attend(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    keep: Tensor,
    scale: float,
    softcap: float | None,
    sink_Q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (B, T, Q, _), (S, G, DV) = q_BTQD.shape, v_BSGD.shape[1:]
    wide = torch.promote_types(q_BTQD.dtype, torch.float32)
    if S == 0:
        lse = torch.full((B, T, Q), -torch.inf, dtype=wide, device=q_BTQD.device)
        return _zeros_in_graph(q_BTQD, k_BSGD, v_BSGD, sink_Q), lse
    with without_autocast(q_BTQD.device):  # which would multiply in bf16
        q_BGHTD = q_BTQD.to(wide).unflatten(2, (G, Q // G)).permute(0, 2, 3, 1, 4)
        k_BGSD, v_BGSD = (x.to(wide).transpose(1, 2) for x in (k_BSGD, v_BSGD))
        logits = q_BGHTD @ k_BGSD.mT[:, :, None] * scale
        logits = capped(logits, softcap).masked_fill(~keep[:, :, None], -torch.inf)
        top = logits.detach().amax(-1, keepdim=True)
        sink = None if sink_Q is None else sink_Q.to(wide).view(G, -1, 1, 1)
        if sink is not None:
            top = torch.maximum(top, sink.detach())
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = (logits - top).exp()
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink - top).exp()
        o = weights @ v_BGSD[:, :, None] / total.masked_fill(total == 0, 1.0)
        # not by `top`, which may be a sink that is far above every key
        lse = logits.detach().logsumexp(-1)
    o_BTQD = o.permute(0, 3, 1, 2, 4).reshape(B, T, Q, DV).to(q_BTQD.dtype)
    return o_BTQD, lse.permute(0, 3, 1, 2).reshape(B, T, Q)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``logits``, scaled already, with a soft cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _zeros_in_graph(*sources: Tensor | None) -> Tensor:
    """Zeros [B, T, Q, DV] of q, k, v and a sink, whose gradients are 0, not None."""
    q, _, v, _ = sources
    assert q is not None and v is not None
    zero = q[..., :0].sum(-1, keepdim=True)
    for x in sources:
        if x is not None:
            zero = zero + x.flatten()[:0].sum().to(q.dtype)
    return zero.expand(*q.shape[:3], v.shape[3])


def keep_compressed(
    q: Tensor,
    num_blocks: int,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor,
    first_BT: Tensor | None,
) -> Keep:
    """Compressed blocks that end at or before the query, of its own document."""
    visible_BTC = visible_blocks(
        q, num_blocks, block=block, stride=stride, q_start=q_start, first_BT=first_BT
    )
    return lambda rows: visible_BTC[:, None, rows]


def keep_selected(
    q: Tensor, num_keys: int, blocks: Tensor, *, sel_block: int, q_start: int | Tensor
) -> Keep:
    """Tokens at or before the query in its ``blocks`` int32 [B, T, G, N]."""
    position_BT = query_positions(q_start, q.shape[1], q.device)
    return lambda rows: token_mask(blocks[:, rows], num_keys, sel_block, position_BT[:, rows])


def keep_window(
    q: Tensor, num_keys: int, *, window: int, q_start: int | Tensor, first_BT: Tensor | None
) -> Keep:
    """The last ``window`` keys up to the query, of its own document."""
    position_BT1 = query_positions(q_start, q.shape[1], q.device)[..., None]

    def keep(rows: slice) -> Tensor:
        key_S, at = torch.arange(num_keys, device=q.device), position_BT1[:, rows]
        seen = (key_S <= at) & (key_S > at - window)
        if first_BT is not None:
            seen = seen & (key_S >= first_BT[:, rows, None])
        return seen[:, None]

    return keep
