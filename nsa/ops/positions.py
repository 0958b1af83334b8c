"""Absolute positions of the queries of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.ops.exporting import is_exporting


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """``values`` as int64 [N] on ``device``.

    The copy is queued, so that the host does not wait for the device's work.
    """
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def query_positions(q_start: int | Tensor, q_tokens: int, device: torch.device) -> Tensor:
    """Positions int64 [1, T] for an int ``q_start``, [B, T] for one position a row."""
    offsets = torch.arange(q_tokens, device=device)
    if isinstance(q_start, Tensor):
        return q_start.to(device=device, dtype=torch.int64)[:, None] + offsets
    return (offsets + q_start)[None]


def is_symbolic(number: float) -> bool:
    """Whether torch.compile traces a number that changes from call to call. An exported program has
    its own ways, and one graph.
    """
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    # half a second of imports, which only a compiler has done already
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(number)
