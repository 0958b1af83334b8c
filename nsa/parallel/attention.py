"""NSAAttention over a rank's two chunks of a sequence.

A chunk is a call of `nsa.branches` like a chunk of a cache: its queries begin at the chunk's
start, its keys end with it.

B batch, T tokens of this rank (two chunks of L), M model dim, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from nsa import checks
from nsa.attention import NSAAttention
from nsa.blocks import BlockGrid
from nsa.branches import Call, attend_view, reaching
from nsa.decode import KV, NSACache, View
from nsa.ops.positions import to_device
from nsa.parallel.gather import gather
from nsa.parallel.halo import with_tokens_before, with_tokens_behind
from nsa.parallel.zigzag import Zigzag
from nsa.rope import angles, rotate, turns
from nsa.routing import Route
from nsa.shared_positions import Layout


class ShardedAttention(NSAAttention):
    """An NSAAttention that `nsa.parallel.ContextParallel` wrapped: the same parameters under the
    same names, x [B, T, M] of this rank's tokens -> y [B, T, M].
    """

    place: Zigzag
    group: dist.ProcessGroup

    def forward(
        self,
        x_BTM: Tensor,
        *,
        cache: NSACache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        num_tokens: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """As NSAAttention's, of this rank's shard of whole sequences. Every rank must call it, with
        the same shape.

        ``layout`` is not read: positions are those of the whole sequence. ValueError for a cache,
        cu_seqlens, num_tokens or attention_mask, none of which is served, and for chunks that do
        not begin at the border of a selection block.
        """
        _check_served(
            cache=cache,
            cu_seqlens=cu_seqlens,
            num_tokens=num_tokens,
            attention_mask=attention_mask,
        )
        checks.states(x_BTM, self.dim, checks.plain_weight(self.q_proj))
        chunk_tokens = self.place.chunk_tokens(x_BTM.shape[1], self.config)
        q, k, v = self._project(x_BTM)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        gates = self.gate(x_BTM, q)
        by = self._turns(x_BTM)
        q, k_rotated = (rotate(t, by, kind=self.config.rope) for t in (q, k))
        k_cmp = k_rotated if self.config.rotates_before_compression else k
        kv_cmp, kv_sel, kv_win = zip(
            self._per_branch(k_cmp, k_rotated), self._per_branch(v, v), strict=True
        )
        ends = [(c + 1) * chunk_tokens for c in self.place.own]
        queries = q.chunk(2, 1)
        routes = [
            self._route(x, end, q_start=end - chunk_tokens)
            for x, end in zip(queries, ends, strict=True)
        ]
        views = self._views(kv_cmp, kv_sel, kv_win, ends, routes)
        o = torch.cat(
            [
                self._attend(*chunk)
                for chunk in zip(queries, gates.chunk(2, 1), views, routes, strict=True)
            ],
            1,
        )
        if "cmp" not in self.config.branches and torch.is_grad_enabled():
            o = reaching(o, self.phi_k.parameters(), self.phi_v.parameters())
        return self.o_proj(o.flatten(2))

    def _turns(self, x: Tensor) -> Tensor:
        config = self.config
        position = self.place.positions(x.shape[1], x.device)[None]
        theta = angles(position, self.head_dim, base=config.rope_base, scale=config.rope_scale)
        return turns(theta, x.dtype)

    def _views(
        self, kv_cmp: KV, kv_sel: KV, kv_win: KV, ends: list[int], routes: list[Route]
    ) -> list[View]:
        """What each own chunk attends to; ``ends`` are the positions behind its last token."""
        chunk_tokens = kv_sel[0].shape[1] // 2
        cmp = self._compressed(kv_cmp, ends, routes)
        sel = [gather(x, [(0, end) for end in ends], self.group) for x in kv_sel]
        win = [
            with_tokens_before(x, self.config.window - 1, self.place, self.group) for x in kv_win
        ]
        return [
            View(
                cmp=(cmp[0][i], cmp[1][i]),
                sel=(sel[0][i], sel[1][i]),
                win=(win[0][i], win[1][i]),
                q_start=end - chunk_tokens,
                win_start=win[0][i].shape[1] - chunk_tokens,
            )
            for i, end in enumerate(ends)
        ]

    def _compressed(self, kv: KV, ends: list[int], routes: list[Route]) -> list[tuple[Tensor, ...]]:
        """Compressed K and V of the tokens up to each of ``ends``: each rank compresses the blocks
        that begin in its chunks, by the kernels of their Route, and they are gathered.
        """
        config = self.config
        if config.branches == ("win",):
            return [x.chunk(2, 1) for x in kv]  # nobody reads them
        L, d = kv[0].shape[1] // 2, config.cmp_stride
        k, v = (with_tokens_behind(x, config.cmp_block - d, self.place, self.group) for x in kv)
        blocks: list[KV] = []
        for c, route, *tokens in zip(self.place.own, routes, k, v, strict=True):
            first_block = to_device([c * L // d] * tokens[0].shape[0], tokens[0].device)
            blocks.append(self._compress(tokens[0], tokens[1], first_block, route=route))
        grid = BlockGrid.of(config)
        ranges = [(0, grid.num_cmp(end)) for end in ends]
        return [
            gather(torch.cat([_padded(x, L // d) for x in chunks], 1), ranges, self.group)
            for chunks in zip(*blocks, strict=True)
        ]

    def _attend(self, q: Tensor, gates: Tensor, view: View, route: Route) -> Tensor:
        call = Call(
            route,
            self.config,
            self.head_dim**-0.5,
            nonnegative_gates=True,
            sinks=self.sinks,
        )
        return attend_view(q, gates, view, call)


def _padded(x_BCGD: Tensor, rows: int) -> Tensor:
    """The sequence's last chunk begins blocks that do not end: rows of 0, which no range reads."""
    return pad(x_BCGD, (0, 0, 0, 0, 0, rows - x_BCGD.shape[1]))


def _check_served(**arguments: object) -> None:
    if given := [name for name, value in arguments.items() if value is not None]:
        raise ValueError(
            f"got {' and '.join(given)} with context parallelism; wanted whole sequences of one"
            " length; call the layer without ContextParallel for them"
        )
