"""What a fused decode step takes.

B batch, Q query heads, G kv heads, D head dim, P = D / 2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Buffers(NamedTuple):
    """Of an NSACache that steps, contiguous [B, n, G, D or DV]: all tokens and compressed keys, a
    spare row behind each, the window's ring, and the ring of the last l raw tokens.
    """

    sel_k: Tensor
    sel_v: Tensor
    win_k: Tensor
    win_v: Tensor
    raw_k: Tensor
    raw_v: Tensor
    cmp_k: Tensor
    cmp_v: Tensor


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """Of NSAConfig: ``block`` and ``stride`` of compression, the rest by its name; ``scale`` of the
    logits.
    """

    block: int
    stride: int
    sel_block: int
    num_selected: int
    num_initial: int
    num_local: int
    scale: float
    temperature: float
    rope: str


class Projected(NamedTuple):
    """What the projections make of one token a row: q [B, 1, Q, D], k and v [B, 1, n, D or DV] with
    n = G or 3 G, contiguous; and where it stands: ``turns`` fp32 [B, 1, 1, P, 2], ``position``
    int64 [B]. ``gates`` [B, 1, Q, 3], or ``up`` [G, D, D] and ``down`` [G, D, 3] of a SoftmaxGate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    turns: Tensor
    position: Tensor
    gates: Tensor | None
    up: Tensor | None
    down: Tensor | None
