"""Absolute positions of the queries of a call."""

from __future__ import annotations

import torch
from torch import Tensor


def query_positions(q_start: int | Tensor, q_tokens: int, device: torch.device) -> Tensor:
    """Positions int64 [1, T] for an int ``q_start``, [B, T] for one position a row."""
    offsets = torch.arange(q_tokens, device=device)
    if isinstance(q_start, Tensor):
        return q_start.to(device=device, dtype=torch.int64)[:, None] + offsets
    return (offsets + q_start)[None]
