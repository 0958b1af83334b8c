"""Which queries chose a block: entries (row, kv head, slot) sorted by block, by one stable sort of
16-bit keys where they suffice.

B batch, T queries, G kv heads, N slots, J blocks a kv head, E entries. Rows (b, t) are taken a
chunk at a time, which is a key's highest digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv
from nsa.ops.kernels.launch import launch


@triton.jit
def nsa_selected_keys(
    BLOCKS,
    KEY,
    E,
    T,
    rows_per_chunk,
    J,
    num_lists,
    full,
    G: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """The list that each entry belongs to: (chunk, b, g, block).

    An empty slot, or one of a sequence's first ``full`` rows, is in its chunk's last list, which is
    not read.
    """
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    block = tl.load(BLOCKS + e, mask=e < E, other=-1)
    row = (e // (G * N)).to(tl.int32)
    g = (e // N % G).to(tl.int32)
    listed = (block >= 0) & (block < J) & (row % T >= full)
    of_chunk = tl.where(listed, (row // T * G + g) * J + block, num_lists)
    tl.store(
        KEY + e,
        (row // rows_per_chunk * (num_lists + 1) + of_chunk).to(KEY.dtype.element_ty),
        mask=e < E,
    )


@dataclass(frozen=True, slots=True)
class Lists:
    """Entries sorted by list, a list of queries for each (chunk, b, kv head, block); within a list
    in order of rows.
    """

    key_E: Tensor
    order_E: Tensor
    rows_per_chunk: int
    num_lists: int  # of a chunk, without the one of empty slots

    @classmethod
    def of(cls, blocks: Tensor, J: int, rows_per_chunk: int, *, full: int) -> Lists:
        """The lists of every row but each sequence's first ``full``."""
        B, T, G, N = blocks.shape
        num_lists = B * G * J
        num_chunks = cdiv(B * T, rows_per_chunk)
        # a radix sort passes over half as many digits of 16 bits
        dtype = torch.int16 if num_chunks * (num_lists + 1) < 2**15 else torch.int32
        key_E = torch.empty(blocks.numel(), dtype=dtype, device=blocks.device)
        launch(
            nsa_selected_keys,
            (cdiv(key_E.numel(), 1024),),
            blocks,
            key_E,
            key_E.numel(),
            T,
            rows_per_chunk,
            J,
            num_lists,
            full,
            G,
            N,
            1024,
        )
        return cls(*torch.sort(key_E, stable=True), rows_per_chunk, num_lists)

    def bounds(self, num_rows: int) -> Tensor:
        """First entry of every list, int32, and one past the last."""
        count = cdiv(num_rows, self.rows_per_chunk) * (self.num_lists + 1)
        lists = torch.arange(count + 1, dtype=self.key_E.dtype, device=self.key_E.device)
        return torch.searchsorted(self.key_E, lists, out_int32=True)
