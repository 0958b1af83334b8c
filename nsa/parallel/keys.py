"""What a rank's two chunks attend to, gathered from all ranks while the rank computes.

B batch, T tokens of this rank (two chunks of L), G kv heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.decode import KV, View
from nsa.documents import Documents
from nsa.ops.positions import to_device
from nsa.parallel.gather import Gathering, OwnItems, WantedItems
from nsa.parallel.halo import Chunks, for_blocks, for_window
from nsa.parallel.layout import Chunk, ShardedLayout
from nsa.parallel.zigzag import Zigzag, halves
from nsa.routing import Route

if TYPE_CHECKING:
    import torch.distributed as dist


class Compress(Protocol):
    """`NSAAttention._compress`."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        first_block: Tensor | None = None,
        documents: Documents | None = None,
        route: Route | None = None,
    ) -> KV: ...


class ShardedKeys:
    """K and V of this rank's tokens, each [B, T, G, D], on their way to every rank.

    Making it sends the halos; `compress` waits for them and sends compressed keys, then those of
    the selected branch, by far the most; `views` waits for the compressed ones, `wait` for the
    rest, which nobody needs before blocks are chosen. Between two of them a rank computes what
    needs none of it.
    """

    def __init__(
        self,
        kv_cmp: KV,
        kv_sel: KV,
        kv_win: KV,
        *,
        config: NSAConfig,
        place: Zigzag,
        group: dist.ProcessGroup,
        layout: ShardedLayout,
    ) -> None:
        self._cmp, self._sel, self._win = kv_cmp, kv_sel, kv_win
        self._config, self._group, self._layout = config, group, layout
        self._compresses = config.branches != ("win",)  # compressed keys serve the selection, too
        # what the ranks give back of these is by far the most, and awaited last
        self._own_sel = OwnItems(*map(halves, kv_sel)) if "sel" in config.branches else None
        shards: list[tuple[Chunks, WantedItems]] = []
        if self._compresses:
            shards += [for_blocks(x, layout.behind, place) for x in kv_cmp]
        if "win" in config.branches:
            shards += [for_window(x, config.window - 1, place) for x in kv_win]
        self._chunks = [chunks for chunks, _ in shards]
        own = OwnItems(*(chunks.edges for chunks in self._chunks))
        self._halos = Gathering(own, [wanted for _, wanted in shards], group)
        self._blocks: Gathering | None = None
        self._tokens: Gathering | None = None

    def compress(self, compress: Compress, routes: list[Route]) -> None:
        """Compresses the blocks that begin in each chunk, by the kernels of its Route."""
        found, chunks = self._halos.wait(), self._layout.chunks
        if self._compresses:
            k, v = (x.before(halo) for x, halo in zip(self._chunks[:2], found[:2], strict=True))
            made = [
                self._compressed((k_, v_), compress, chunk, route)
                for k_, v_, chunk, route in zip(k, v, chunks, routes, strict=True)
            ]
            grid = BlockGrid.of(self._config)
            ranges = tuple((0, grid.num_cmp(chunk.rows[1])) for chunk in chunks)
            wanted = WantedItems(ranges, self._layout.block_rows)
            own = OwnItems(*(torch.stack(blocks, 1) for blocks in zip(*made, strict=True)))
            self._blocks = Gathering(own, [wanted] * 2, self._group)
        if self._own_sel is not None:
            self._tokens = Gathering(self._own_sel, [self._layout.keys()] * 2, self._group)

    def views(self) -> list[View]:
        """A View of each chunk, whose ``sel`` is there after `wait`; of a branch that is off, the
        chunk's own tokens.
        """
        chunks, found = self._layout.chunks, self._halos.wait()[-2:]
        cmp, sel, win = ([x.chunk(2, 1) for x in kv] for kv in (self._cmp, self._sel, self._win))
        if "win" in self._config.branches:
            win = [
                tuple(
                    x if chunk.packs is None else chunk.packs.win.align(x)
                    for x, chunk in zip(own.behind(halo), chunks, strict=True)
                )
                for own, halo in zip(self._chunks[-2:], found, strict=True)
            ]
        if self._blocks is not None:
            cmp = self._blocks.promise()
        if self._tokens is not None:  # after those, so that in backward they are sent first
            sel = self._tokens.promise()
        if self._blocks is not None:
            self._blocks.wait()
        return [
            View(
                cmp=(cmp[0][i], cmp[1][i]),
                sel=(sel[0][i], sel[1][i]),
                win=(win[0][i], win[1][i]),
                q_start=chunk.rows[0],
                win_start=chunk.rows[0] - chunk.win_begin,
            )
            for i, chunk in enumerate(chunks)
        ]

    def wait(self) -> None:
        """For K and V of the selected branch."""
        if self._tokens is not None:
            self._tokens.wait()

    def _compressed(self, kv: KV, compress: Compress, chunk: Chunk, route: Route) -> list[Tensor]:
        """Of a chunk's tokens and those behind them; a block that does not end in a sequence, or
        that the chunk has not, is 0, and nobody sees it.
        """
        (k, v), documents = kv, None
        if chunk.packs is not None:
            k, v = (chunk.packs.cmp.align(x) for x in (k, v))
            documents = chunk.packs.cmp.documents
        first_block = None  # which the rotation of compressed keys alone asks for
        if not self._config.rotates_before_compression:
            first_block = to_device([chunk.blocks[0]] * k.shape[0], k.device)
        room = self._layout.block_room
        made = compress(k, v, first_block, documents, route=route)
        return [
            x if x.shape[1] == room else pad(x, (0, 0, 0, 0, 0, room - x.shape[1])) for x in made
        ]
