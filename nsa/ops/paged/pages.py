"""Pages of keys and values, and the table that says which of them a row holds.

B batch, I or T entries of a row, N pages of a pool, P entries a page, M columns of a table, G kv
heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KV = tuple[Tensor, Tensor]
E4M3_MAX = 448.0  # the largest finite float8_e4m3fn; what is larger would become NaN


@dataclass(frozen=True, slots=True)
class Pages:
    """One group of pages: ``k`` [N, P, G, DK], ``v`` [N, P, G, DV] and ``table`` int32 [B, M].

    Entry i of row b is entry i mod P of page table[b, i div P]; -1: there is none. The last page of
    the pool is in no table: it takes what must not be kept. In float8_e4m3fn, ``scales`` fp32 [G]
    of k and v: an entry x of head g is kept as e = e4m3(clamp(x / s_g, -448, 448)), to nearest
    even, and read as s_g * e. Then |s_g * e - x| <= max(2^-4 |x|, 2^-10 s_g) where |x| <= 448 s_g:
    half a unit in the last of 3 mantissa bits, and half the least subnormal.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    scales: KV | None = None

    def put(self, position_BT: Tensor, exists_BT: Tensor, kv: KV) -> None:
        """Store kv [B, T, G, D] as entries ``position_BT`` of each row, where they exist."""
        page_BT = self._page(position_BT)
        P = self.k.shape[1]
        kept_BT = exists_BT & (page_BT >= 0)
        spare = (self.k.shape[0] - 1) * P
        at_BT = torch.where(kept_BT, page_BT * P + position_BT % P, spare)
        for pool, x in zip((self.k, self.v), self._encoded(kv), strict=True):
            _bytes(pool).flatten(0, 1)[at_BT] = _bytes(x)

    def take(self, position_BI: Tensor, exists_BI: Tensor, dtype: torch.dtype) -> KV:
        """Entries ``position_BI`` of each row, [B, I, G, D] in ``dtype``; 0 where none exists."""
        page_BI = self._page(position_BI)
        P = self.k.shape[1]
        kept_BI = exists_BI & (page_BI >= 0)
        at_BI = (page_BI.clamp(min=0) * P + position_BI % P).masked_fill(~kept_BI, 0)
        # what nobody wrote, or another row left, may be NaN
        absent = ~kept_BI[..., None, None]
        k, v = (
            _bytes(pool).flatten(0, 1)[at_BI].masked_fill(absent, 0).view(pool.dtype)
            for pool in (self.k, self.v)
        )
        return self._decoded((k, v), dtype)

    def rounded(self, kv: KV) -> KV:
        """What `take` would give of kv [B, T, G, D] once it is stored."""
        return kv if self.scales is None else self._decoded(self._encoded(kv), kv[0].dtype)

    def _page(self, position: Tensor) -> Tensor:
        """The page of each position; -1 of those beyond the table."""
        column, width = position // self.k.shape[1], self.table.shape[1]
        page = self.table.long().gather(1, column.clamp(0, width - 1))
        return page.masked_fill(column >= width, -1)

    def _encoded(self, kv: KV) -> KV:
        if self.scales is None:
            return kv
        k, v = (
            (x.float() / s[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            for x, s in zip(kv, self.scales, strict=True)
        )
        return k, v

    def _decoded(self, kv: KV, dtype: torch.dtype) -> KV:
        if self.scales is None:
            return kv
        k, v = ((x.float() * s[:, None]).to(dtype) for x, s in zip(kv, self.scales, strict=True))
        return k, v


@dataclass(frozen=True, slots=True)
class LayerPages:
    """What one layer keeps: compressed blocks, raw tokens, those of the selected branch and of the
    window.

    ``start_B`` int64 [B] and ``seq_lens`` int32 [B]: tokens of each row before this step's, and
    with them. ``max_tokens``: the most that a row may hold in this step, a number of the host.
    """

    cmp: Pages
    raw: Pages
    sel: Pages
    win: Pages
    start_B: Tensor
    seq_lens: Tensor
    max_tokens: int


def blocks_before(tokens: Tensor, block: int, stride: int) -> Tensor:
    """Compressed blocks that are whole within ``tokens``: `BlockGrid.num_cmp` on the device."""
    return ((tokens - block + stride) // stride).clamp(min=0)


def _bytes(x: Tensor) -> Tensor:
    """Few operators take float8: it is moved as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
