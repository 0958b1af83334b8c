"""The selected branch: one function, several implementations of different cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from nsa.ops.selected import masked, reference, triton, v1, v2
from nsa.routing import Path


class AttendFn(Protocol):
    """softmax over the tokens at or before the query in ``blocks`` int32 [B, T, G, N]: ascending,
    unique, -1 padded at the end.

    q [B, T, HQ, DK], k [B, S, G, DK], v [B, S, G, DV] -> (o [B, T, HQ, DV] in q's dtype, lse); a
    row without a key is exactly 0. lse is to base 2, fp32 [B, T, HQ], without gradient, where the
    path leaves one, else None; path triton returns what its gradient can share of the blocks' lists
    besides.
    ``fa2`` names the FA-2 provider that may serve the call, None for none. ``num_full_rows``: a
    promise that the first so many queries of each sequence chose every block up to their own, and
    that q_start is 0; a path may make nothing of it. Keys in the future of a query get weight 0 and
    must be finite: 0 * NaN is NaN.
    """

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...


PATHS: Mapping[Path, AttendFn] = {
    Path.REFERENCE: reference.attend,
    Path.V1: v1.attend,
    Path.V2: v2.attend,
    Path.MASKED: masked.attend,
    Path.TRITON: triton.attend,
}
