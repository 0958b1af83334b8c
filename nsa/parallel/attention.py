"""NSAAttention over a rank's two chunks of a sequence.

A chunk is a call of `nsa.branches` like a chunk of a cache: its queries begin at the chunk's
start, its keys end with it. Of packed documents both are counted in rows (`nsa.documents`).

B batch, T tokens of this rank (two chunks of L), M model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa import checks
from nsa.attention import NSAAttention
from nsa.branches import Call, attend_view, reaching
from nsa.decode import KV, View
from nsa.ops.kernels import shares
from nsa.parallel.keys import ShardedKeys
from nsa.parallel.layout import Chunk, ShardedLayout, check_served
from nsa.parallel.rotation import rotated_parts
from nsa.parallel.zigzag import Zigzag
from nsa.rope import rotate
from nsa.routing import Route
from nsa.shared_positions import Layout


class ShardedAttention(NSAAttention):
    """An NSAAttention that `nsa.parallel.ContextParallel` wrapped: the same parameters under the
    same names, x [B, T, M] of this rank's tokens -> y [B, T, M].
    """

    place: Zigzag
    group: dist.ProcessGroup
    _kept: tuple[object, ShardedLayout] | None = None

    def forward(
        self,
        x_BTM: Tensor,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        layout: Layout | None = None,
        **others: object,
    ) -> Tensor:
        """As NSAAttention's, of this rank's shard of whole sequences. Every rank must call it, with
        the same shape.

        ``cu_seqlens`` is that of the whole sequence, the same on every rank; the host reads it.
        ``layout`` has read it already. Without either, the layer makes one and keeps it until x has
        another number of tokens, dtype or device: 4 bytes a token and head dim (8 for fp64), no
        gradients. ValueError for a cache, num_tokens or attention_mask, none of which is served,
        and for chunks that do not begin at the border of a selection block.
        """
        check_served(others)
        checks.states(x_BTM, self.dim, checks.plain_weight(self.q_proj))
        if not isinstance(layout, ShardedLayout):
            layout = self._own_layout(x_BTM, cu_seqlens)
        absent = layout.absent_BT1
        # contents of absent tokens, NaN included, must not reach a weight's gradient
        if absent is not None:
            x_BTM = x_BTM.masked_fill(absent, 0)
        q, k, v = self._project(x_BTM)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        routes = [self._route_of(q, chunk) for chunk in layout.chunks]
        kv_cmp, kv_sel, kv_win = zip(
            self._rotated_per_branch(k, layout.turns), self._per_branch(v, v), strict=True
        )
        keys = self._keys(kv_cmp, kv_sel, kv_win, layout)
        # hides the halos; in backward, what the ranks give back of them
        gates = self.gate(x_BTM, q)
        keys.compress(self._compress, routes)
        # hides compressed keys, and what is given back of those
        L = x_BTM.shape[1] // 2
        early, late = zip(
            rotated_parts(q, layout.turns, kind=self.config.rope, sizes=[L, L], dim=1),
            gates.chunk(2, 1),
            keys.views(),
            layout.chunks,
            routes,
            strict=True,
        )
        # the late chunk's compressed branch takes longer: it hides the keys of the selected one
        o_late = self._attend(*late, keys)
        o = torch.cat([self._attend(*early, keys), o_late], 1)
        if "cmp" not in self.config.branches and torch.is_grad_enabled():
            o = reaching(o, self.phi_k.parameters(), self.phi_v.parameters())
        y: Tensor = self.o_proj(o.flatten(2))
        return y if absent is None else y.masked_fill(absent, 0)

    def layout(self, x: Tensor, **options: Any) -> ShardedLayout:
        """The Layout of this rank's x [B, T, ...], for this layer and others of its config and head
        dim; ``options`` as in `ShardedLayout.of_shard`.
        """
        return ShardedLayout.of_shard(x, self.config, self.head_dim, self.place, **options)

    def _own_layout(self, x: Tensor, cu_seqlens: Tensor | Sequence[int] | None) -> ShardedLayout:
        """That of x alone, where neither a model's layers share one nor documents make it differ
        from call to call: the one of the last such call, if it fits.
        """
        if cu_seqlens is not None or type(x) is not Tensor or torch.compiler.is_compiling():
            return self.layout(x, dtype=x.dtype, cu_seqlens=cu_seqlens)
        key = (x.shape[1], x.dtype, x.device, self.config)
        if self._kept is None or self._kept[0] != key:
            # a training step could not use what inference mode made
            with torch.inference_mode(False), torch.no_grad():
                self._kept = key, self.layout(x, dtype=x.dtype)
        return self._kept[1]

    def _rotated_per_branch(self, k: Tensor, turns: Tensor) -> Sequence[Tensor]:
        """`_per_branch` of k, rotated where its branch wants it."""
        G, kind = self.num_kv_heads, self.config.rope
        if self.num_kv > 1 and self.config.rotates_before_compression:
            return rotated_parts(k, turns, kind=kind, sizes=[G] * self.num_kv, dim=2)
        k_rotated = rotate(k, turns, kind=kind)
        k_cmp = k_rotated if self.config.rotates_before_compression else k
        return self._per_branch(k_cmp, k_rotated)

    def _route_of(self, q: Tensor, chunk: Chunk) -> Route:
        begin, end = chunk.rows
        rows = q[:, :1].expand(-1, end - begin, -1, -1)  # a shape, no memory
        return self._route(rows, end, q_start=begin)

    def _keys(self, kv_cmp: KV, kv_sel: KV, kv_win: KV, layout: ShardedLayout) -> ShardedKeys:
        return ShardedKeys(
            kv_cmp,
            kv_sel,
            kv_win,
            config=self.config,
            place=self.place,
            group=self.group,
            layout=layout,
        )

    def _attend(
        self, q: Tensor, gates: Tensor, view: View, chunk: Chunk, route: Route, keys: ShardedKeys
    ) -> Tensor:
        packing = None if chunk.packs is None else chunk.packs.queries
        call = Call(
            route,
            self.config,
            self.head_dim**-0.5,
            documents=None if packing is None else packing.documents,
            present=None if packing is None else packing.present_R[None],
            nonnegative_gates=True,
            sinks=self.sinks,
            wait_for_selected=keys.wait,
        )
        if packing is not None:
            q, gates = packing.align(q), packing.align(gates)
        with shares.one_of(self.place.num_chunks):
            o = attend_view(q, gates, view, call)
        return o if packing is None else packing.restore(o)
