"""Path `reference`: one row at a time, explicit softmax in fp32.

The first implementation's `_sdpa_over_ranges`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from nsa.ops.derivatives import check_readable
from nsa.ops.operator import define_formula, int_and_tensor, is_transformed

_LOG = logging.getLogger(__name__)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    fa2: str | None,
    num_full_rows: int = 0,
) -> tuple[Tensor, None]:
    """See ``nsa.ops.selected.AttendFn``. B * G * T Python iterations, each with host syncs."""
    del fa2, num_full_rows
    check_readable("reference", blocks, q_start)
    _LOG.warning("Using slow _sdpa_over_ranges: path=reference, %d rows", blocks[..., 0].numel())
    at, q_starts = int_and_tensor(q_start)
    run = _attend if is_transformed() else torch.ops.nsa.selected_reference
    o: Tensor = run(q, k, v, blocks, q_starts, at, sel_block, scale)
    return o, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    scale: float,
) -> Tensor:
    B, T, G, _ = blocks.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q32, k32, v32 = (x.to(wide) for x in (q, k, v))
    starts = [q_start] * B if q_starts is None else q_starts.tolist()
    heads = q.shape[2] // G
    rows = [
        _row(
            q32[b, t, g * heads : (g + 1) * heads],
            k32[b, :, g],
            v32[b, :, g],
            blocks[b, t, g].tolist(),
            starts[b] + t,
            sel_block,
            scale,
        )
        for b in range(B)
        for t in range(T)
        for g in range(G)
    ]
    return torch.stack(rows).reshape(B, T, q.shape[2], v.shape[3]).to(q.dtype)


def _row(
    q_HD: Tensor,
    k_SD: Tensor,
    v_SD: Tensor,
    blocks: list[int],
    position: int,
    sel_block: int,
    scale: float,
) -> Tensor:
    ranges = [
        (j * sel_block, min((j + 1) * sel_block, position + 1, k_SD.shape[0]))
        for j in blocks
        if 0 <= j * sel_block <= position
    ]
    if not ranges:
        return q_HD[:, :0].sum(-1, keepdim=True).expand(-1, v_SD.shape[1])
    keys, values = (torch.cat([x[start:stop] for start, stop in ranges]) for x in (k_SD, v_SD))
    logits_HL = q_HD @ keys.T * scale
    weights_HL = (logits_HL - logits_HL.amax(-1, keepdim=True)).exp()
    return weights_HL @ values / weights_HL.sum(-1, keepdim=True)


define_formula(
    "selected_reference",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts, SymInt q_start, SymInt"
    " sel_block, float scale) -> Tensor",
    _attend,
)
