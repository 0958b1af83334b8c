"""The dense twin over a rank's two chunks of a sequence.

B batch, T tokens of this rank (two chunks of L), S tokens of the sequence, M model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa import dispatch
from nsa.dense import DenseAttention
from nsa.functional import capability_of
from nsa.parallel.gather import Gathering, OwnItems
from nsa.parallel.layout import ShardedLayout, check_served
from nsa.parallel.rotation import rotated_parts
from nsa.parallel.zigzag import Zigzag, halves
from nsa.rope import rotate
from nsa.routing import route_dense
from nsa.shared_positions import Layout


class ShardedDense(DenseAttention):
    """A DenseAttention that `nsa.parallel.ContextParallel` wrapped: the same parameters under the
    same names, x [B, T, M] of this rank's tokens -> y [B, T, M].

    Each rank holds K and V of all tokens: 2 P chunks of queries attend to what is before them.
    """

    place: Zigzag
    group: dist.ProcessGroup

    def forward(self, x_BTM: Tensor, *, layout: Layout | None = None, **others: object) -> Tensor:
        """As DenseAttention's, of this rank's shard of whole sequences. Every rank must call it,
        with the same shape. ValueError for a cache.
        """
        check_served(others)
        model = self.model
        if not isinstance(layout, ShardedLayout):
            layout = self.layout(x_BTM, dtype=x_BTM.dtype)
        k = self.k_proj(x_BTM).unflatten(-1, (-1, model.head_dim))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, model.value_dim))
        if self.config.qk_norm:
            k = self.k_norm(k)
        k = rotate(k, layout.turns, kind=self.config.rope)
        keys = Gathering(OwnItems(halves(k), halves(v)), [layout.keys()] * 2, self.group)
        q = self.q_proj(x_BTM).unflatten(-1, (-1, model.head_dim))
        if self.config.qk_norm:
            q = self.q_norm(q)
        sizes = [q.shape[1] // 2] * 2
        chunks = rotated_parts(q, layout.turns, kind=self.config.rope, sizes=sizes, dim=1)
        route = route_dense(self.kind, self._problem(chunks[0]), capability_of(str(q.device)))
        scale = model.head_dim**-0.5
        o = [
            dispatch.dense(route, chunk, *kv, scale=scale)
            for chunk, *kv in zip(chunks, *keys.wait(), strict=True)
        ]
        return self.o_proj(torch.cat(o, 1).flatten(2))

    def layout(self, x: Tensor, **options: Any) -> ShardedLayout:
        """As `nsa.parallel.attention.ShardedAttention.layout`, without cu_seqlens, which full
        causal attention does not serve.
        """
        check_served({"cu_seqlens": options.get("cu_seqlens")})
        return ShardedLayout.of_shard(x, self.config, self.model.head_dim, self.place, **options)
