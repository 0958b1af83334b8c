"""Selected branch: one function, several prices. The registry is a literal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from nsa.ops.selected import masked, reference, triton, v1, v2
from nsa.routing import Path


class AttendFn(Protocol):
    """softmax over the tokens at or before the query in ``blocks`` int32 [B, T, G, N]: ascending,
    unique, -1 padded at the end.

    q [B, T, HQ, DK], k [B, S, G, DK], v [B, S, G, DV] -> o [B, T, HQ, DV] in q's dtype; a row
    without a key is exactly 0.
    ``fa2`` names the FA-2 provider that may serve the call, None for none. Keys in the future of a
    query get weight 0 and must be finite: 0 * NaN is NaN.
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
    ) -> Tensor: ...


PATHS: Mapping[Path, AttendFn] = {
    Path.REFERENCE: reference.attend,
    Path.V1: v1.attend,
    Path.V2: v2.attend,
    Path.MASKED: masked.attend,
    Path.TRITON: triton.attend,
}
