"""Attention over what a cache holds, for a layer of one's own: plan, append, then this.

B batch, T tokens of the chunk, Q query heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import checks
from nsa.branches import Call, attend_view
from nsa.config import NSAConfig
from nsa.decode import PagedView, View
from nsa.functional import route_for
from nsa.routing import extras_of


def decode_attention(
    q: Tensor,
    gates: Tensor,
    view: View,
    *,
    config: NSAConfig,
    scale: float | None = None,
    path: str = "auto",
    fa2: str = "auto",
) -> Tensor:
    """The gated sum (Eq. 5) over what a cache holds: o [B, T, HQ, DV] in q's dtype, without
    gradient.

    ``view`` is what ``append`` of an NSACache, or of a layer of a PagedCache, returned of the
    chunk's K and V; q [B, T, HQ, DK] rotated and gates [B, T, HQ, 3] activated are the chunk's.
    ``scale`` of the logits is DK ** -0.5 by default. ValueError for tensors that disagree in shape,
    dtype or device, RouteError for a ``path`` or ``fa2`` that nothing serves.
    """
    checks.scale(scale)
    if isinstance(view, PagedView):
        k, v = view.new_win
        checks.qkv(q, k, v, q_start=0)
    else:
        k, v = view.sel
        checks.qkv(q, k, v, q_start=view.q_start)
    route = route_for(
        q,
        k.shape[2],
        v.shape[3],
        view.num_keys,
        branches=config.branches,
        q_start=view.q_start,
        path=path,
        fa2=fa2,
        config=config,
        extras=extras_of(config),
    )
    own_scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    with torch.no_grad():
        return attend_view(q, gates, view, Call(route, config, own_scale, nonnegative_gates=True))
