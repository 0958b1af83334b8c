"""What a fused decode step takes.

Letters of this folder: B batch, Q query heads, G kv heads, H query heads per kv head, D head dim,
P = D / 2 pairs, l compressed block, d its stride, w rows of the window's ring, C compressed keys, J
blocks, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Buffers(NamedTuple):
    """Of an NSACache that steps, contiguous [B, n, G, D or DV]: all tokens and compressed keys, a
    spare row behind each, the window's ring, and the ring of the last l raw tokens. Of a cache in
    pages, with `StepPages`, the pools [N, P, G, D or DV], where raw tokens and compressed keys
    share one.
    """

    sel_k: Tensor
    sel_v: Tensor
    win_k: Tensor
    win_v: Tensor
    raw_k: Tensor
    raw_v: Tensor
    cmp_k: Tensor
    cmp_v: Tensor


class RowRoom(NamedTuple):
    """The most that a row may hold: tokens, those of its window, and compressed keys."""

    tokens: int
    window: int
    blocks: int


class StepPages(NamedTuple):
    """Where each row's pages are: tables int32 [B, M] by group, of one stride, -1 where there is no
    page; ``seq_lens`` int32 [B], the tokens of each row with this one, and ``last`` int64 [B], the
    position of the last. The most that a row may hold: tokens, those of its window, and compressed
    keys.
    """

    sel: Tensor
    win: Tensor
    raw: Tensor
    cmp: Tensor
    seq_lens: Tensor
    last: Tensor
    held: RowRoom

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.sel, self.win, self.raw, self.cmp


def held(buffers: Buffers, pages: StepPages | None) -> RowRoom:
    """Of each row."""
    if pages is not None:
        return pages.held
    sizes = (buffers.sel_k.shape[1] - 1, buffers.win_k.shape[1], buffers.cmp_k.shape[1] - 1)
    return RowRoom(*sizes)


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
