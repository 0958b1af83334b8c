"""Where a rank's two chunks lie in a sequence, or in packed documents: shared by all layers of one
forward.

Rows are the tokens, or those of packed documents with room between them (`nsa.documents`), of the
whole sequence.

L tokens of a chunk, P ranks, N documents, l compressed block, d its stride, l' selection block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from nsa import checks
from nsa.config import NSAConfig
from nsa.documents import Documents, Packing
from nsa.ops.positions import to_device
from nsa.parallel.gather import ItemRows, Range, WantedItems, by_rank
from nsa.parallel.zigzag import Zigzag
from nsa.rope import angles, turns
from nsa.shared_positions import Layout


@dataclass(frozen=True, slots=True)
class Packs:
    """The way of a chunk's tokens to rows: ``queries``; ``win``, of the chunk behind its halo;
    ``cmp``, of the chunk before its halo, from the first compressed block on that begins in it.
    """

    queries: Packing
    win: Packing
    cmp: Packing


@dataclass(frozen=True, slots=True)
class Chunk:
    """``rows`` of its queries, the first row ``win_begin`` of the keys of their window, and the
    compressed ``blocks`` that begin in it. ``packs`` of packed documents.
    """

    rows: Range
    win_begin: int
    blocks: Range
    packs: Packs | None = None

    @property
    def num_blocks(self) -> int:
        return self.blocks[1] - self.blocks[0]

    @property
    def documents(self) -> Documents | None:
        return None if self.packs is None else self.packs.queries.documents


@dataclass(frozen=True, slots=True)
class ShardedLayout(Layout):
    """A Layout of a rank's tokens: ``chunks`` of them, the tokens ``behind`` each that its
    compressed blocks take, and of packed documents the rows of all tokens and blocks.

    Each chunk's compressed blocks have room for ``block_room`` of them.
    """

    chunks: tuple[Chunk, ...] = ()
    behind: int = 0
    block_room: int = 0
    token_rows: ItemRows | None = None
    block_rows: ItemRows | None = None

    @classmethod
    def of_shard(
        cls,
        x: Tensor,
        config: NSAConfig,
        head_dim: int,
        place: Zigzag,
        *,
        dtype: torch.dtype,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        **others: object,
    ) -> Self:
        """Of x [B, 2 L, ...], this rank's tokens; ``cu_seqlens`` of the whole sequence, read by the
        host. ValueError for chunks that do not begin at the border of a selection block, for
        cu_seqlens that does not fit, and for any of ``others``: those of `Layout.of` but None.
        """
        check_served(others)
        L = place.chunk_tokens(x.shape[1], config)
        position_T = place.positions(x.shape[1], x.device)

        def turned(position_T: Tensor) -> Tensor:
            base, scale = config.rope_base, config.rope_scale
            return turns(angles(position_T[None], head_dim, base=base, scale=scale), dtype)

        if cu_seqlens is None:
            per_chunk = L // config.cmp_stride
            chunks = tuple(
                Chunk(
                    (c * L, (c + 1) * L),
                    max(0, c * L - (config.window - 1)),
                    (c * per_chunk, (c + 1) * per_chunk),
                )
                for c in place.own
            )
            behind = config.cmp_block - config.cmp_stride
            return cls(turned(position_T), None, None, None, None, chunks, behind, per_chunk)
        borders = _Borders.of(cu_seqlens, x, place, config)
        packing = Packing.of(
            to_device(borders.cu_seqlens, x.device), place.num_chunks * L, config.sel_block
        )
        chunks = tuple(_packed(c, L, borders, packing, config) for c in place.own)
        end = max(chunk.rows[1] for chunk in chunks)
        blocks = [borders.blocks(c, config.cmp_stride) for c in range(place.num_chunks)]
        return cls(
            turned(packing.position_R[packing.read_T[position_T]]),
            None,
            packing.outside_T[position_T][None, :, None],
            None,
            None,
            chunks,
            config.cmp_block - 1,
            max(last - first for first, last in blocks),
            _rows_of(packing.row_T.view(place.num_chunks, L), end, place),
            _rows_of(_block_rows(blocks, x.device), -(-end // config.cmp_stride), place),
        )

    def keys(self) -> WantedItems:
        """The rows up to each chunk's last query."""
        return WantedItems(tuple((0, chunk.rows[1]) for chunk in self.chunks), self.token_rows)


def check_served(others: Mapping[str, object]) -> None:
    """ValueError for an argument of a layer that is not of whole sequences."""
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"got {' and '.join(given)} with context parallelism; wanted whole sequences of one"
            " length, or cu_seqlens of NSAAttention; call the layer without ContextParallel"
        )


@dataclass(frozen=True, slots=True)
class _Borders:
    """Of packed documents: ``bounds``, the rows where they begin, and ``chunks``, those where the
    chunks begin; each with one more, where the last ends.
    """

    cu_seqlens: list[int]
    bounds: list[int]
    chunks: list[int]

    @classmethod
    def of(
        cls, cu_seqlens: Tensor | Sequence[int], x: Tensor, place: Zigzag, config: NSAConfig
    ) -> Self:
        tokens = place.size * x.shape[1]
        cu = checks.cu_seqlens_tensor(cu_seqlens, torch.device("cpu")).cpu()
        whole = torch.empty(1).expand(x.shape[0], tokens)  # a shape, no memory
        checks.packed(cu, whole, whole, 0, read=True)
        if config.cmp_block - 1 > x.shape[1] // 2:
            raise ValueError(
                f"got cu_seqlens with chunks of {x.shape[1] // 2} tokens; wanted at least cmp_block"
                f" - 1 = {config.cmp_block - 1}, since documents begin anywhere; pad the sequence"
            )
        ends, size = cu.tolist(), config.sel_block
        rooms = (-(-(end - begin) // size) * size for begin, end in pairwise(ends))
        bounds = list(accumulate(rooms, initial=0))
        L = x.shape[1] // 2
        chunks = [_row(c * L, ends, bounds) for c in range(place.num_chunks + 1)]
        return cls(ends, bounds, chunks)

    def blocks(self, c: int, stride: int) -> Range:
        """The compressed blocks that begin in chunk c."""
        return -(-self.chunks[c] // stride), -(-self.chunks[c + 1] // stride)


def _row(token: int, ends: list[int], bounds: list[int]) -> int:
    if token >= ends[-1]:
        return bounds[-1]
    document = bisect_right(ends, token) - 1
    return bounds[document] + token - ends[document]


def _packed(c: int, L: int, borders: _Borders, packing: Packing, config: NSAConfig) -> Chunk:
    begin, end = borders.chunks[c], borders.chunks[c + 1]
    if begin == end:  # beyond the last document: rows of no token, so that it attends as others do
        end += config.sel_block
    document = borders.bounds[bisect_right(borders.bounds, begin) - 1]
    win_begin = max(document, begin - (config.window - 1))
    first, last = blocks = borders.blocks(c, config.cmp_stride)
    d, l = config.cmp_stride, config.cmp_block  # noqa: E741 (the paper's)
    from_cmp = first * d, (last - 1) * d + l if last > first else first * d
    tokens = packing.row_T.shape[0]
    own = c * L, (c + 1) * L
    packs = Packs(
        packing.part(own, (begin, end)),
        packing.part((max(0, own[0] - (config.window - 1)), own[1]), (win_begin, end)),
        packing.part((own[0], min(tokens, own[1] + l - 1)), from_cmp),
    )
    return Chunk((begin, end), win_begin, blocks, packs)


def _block_rows(blocks: list[Range], device: torch.device) -> Tensor:
    """The index of each chunk's compressed blocks, int64 [2P, block_room], beyond its own that of
    none.
    """
    first, last = (to_device(x, device)[:, None] for x in zip(*blocks, strict=True))
    slot = torch.arange(max(b - a for a, b in blocks), device=device)
    index = first + slot
    return index.masked_fill(index >= last, torch.iinfo(torch.int64).max)


def _rows_of(row: Tensor, number: int, place: Zigzag) -> ItemRows:
    """``row`` [2P, n] of each chunk's items; those from ``number`` on are of none."""
    return ItemRows(by_rank(row.flatten()[None].clamp(max=number), place.size)[:, 0], number)
