"""Path `v1`: token ranges built in Python, rows bucketed by length in blocks, one attention call a
bucket.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops import sdpa
from nsa.ops.derivatives import check_readable
from nsa.ops.operator import define_formula, int_and_tensor, is_transformed

Range = tuple[int, int]


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
    """See ``nsa.ops.selected.AttendFn``. Copies every row's keys, and syncs to read ``blocks``."""
    del fa2, num_full_rows
    check_readable("v1", blocks, q_start)
    at, q_starts = int_and_tensor(q_start)
    run = _attend if is_transformed() else torch.ops.nsa.selected_v1
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
    S = k.shape[1]
    starts = [q_start] * B if q_starts is None else q_starts.tolist()
    buckets: dict[int, list[_Row]] = defaultdict(list)
    for row, row_blocks in enumerate(blocks.flatten(0, 2).tolist()):
        b, t, g = row // (T * G), row // G % T, row % G
        ranges = _merge(row_blocks, sel_block, min(starts[b] + t + 1, S))
        tokens = [(b * S + s) * G + g for start, stop in ranges for s in range(start, stop)]
        buckets[-(-len(tokens) // sel_block) * sel_block].append(_Row(row, tokens))
    return _attend_buckets(q, k, v, buckets, G, scale)


class _Row(NamedTuple):
    row: int
    tokens: list[int]  # indices into K of all batch rows and kv heads, flattened


def _merge(blocks: list[int], sel_block: int, limit: int) -> list[Range]:
    """Half-open token ranges of ascending blocks below ``limit``, neighbours joined."""
    ranges: list[Range] = []
    for j in blocks:
        start, stop = j * sel_block, min((j + 1) * sel_block, limit)
        if j < 0 or start >= stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, buckets: dict[int, list[_Row]], G: int, scale: float
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    # Gathering from a wide copy makes autograd add up the many rows' dK and dV in fp32.
    k_ND, v_ND = (x.to(wide).reshape(-1, x.shape[-1]) for x in (k, v))
    q_RHD = q.unflatten(2, (G, -1)).flatten(0, 2)
    order: list[int] = []
    outputs: list[Tensor] = []
    for width, bucket in sorted(buckets.items()):
        rows = [row for row, _ in bucket]
        order += rows
        q_bucket = q_RHD[torch.tensor(rows, device=q.device)]
        if width == 0:
            outputs.append(q_bucket[..., :0].sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]))
            continue
        tokens, visible = _pad(bucket, width, q.device)
        outputs.append(
            sdpa.rows(
                q_bucket, k_ND[tokens].to(k.dtype), v_ND[tokens].to(v.dtype), visible, scale=scale
            )
        )
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(outputs)[back.to(q.device)].reshape(*q.shape[:3], v.shape[-1])


def _pad(bucket: list[_Row], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens int64 [rows, width], visible bool [rows, width]); a filler repeats the row's first
    token, unseen.
    """
    tokens = torch.tensor([row + row[:1] * (width - len(row)) for _, row in bucket], device=device)
    lengths = torch.tensor([len(row) for _, row in bucket], device=device)
    return tokens, torch.arange(width, device=device) < lengths[:, None]


define_formula(
    "selected_v1",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts, SymInt q_start, SymInt"
    " sel_block, float scale) -> Tensor",
    _attend,
)
