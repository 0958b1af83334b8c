"""Packed documents (cu_seqlens), laid out so that every document begins at a multiple of the
selection block.

Then the grids of compressed and selection blocks coincide with the document's own, block ids stay
global, and "no key of another document" is one lower bound a query. Costs at most l' - 1 rows a
document; nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a packed row lie; no query sees a key of another document.

    ``first_BT`` int64 [1, T]: position of the first token of each query's document, a multiple of
    the selection block.
    ``bounds_N`` int32 [N + 1]: where each document begins, and where the last ends. Of a part of
    the queries, as of a rank's, the bounds are those of all rows up to the last of them.
    """

    first_BT: Tensor
    bounds_N: Tensor

    def counted_from(self, row: int) -> Documents:
        """The same, of rows counted from ``row`` on; what begins before it begins there."""
        if row == 0:
            return self
        return Documents(*((x - row).clamp(min=0) for x in (self.first_BT, self.bounds_N)))

    def first_of(self, num_rows: int) -> Tensor:
        """``first_BT`` of the rows 0 .. num_rows - 1, int64 [1, num_rows]."""
        row = torch.arange(num_rows, device=self.bounds_N.device)
        document = torch.searchsorted(self.bounds_N[1:].long(), row, right=True)
        return self.bounds_N.long()[document][None]


@dataclass(frozen=True, slots=True)
class Packing:
    """The way from packed rows [1, T, ...] to aligned rows [1, P, ...] and back.

    ``row_T``: the aligned row of each token (tokens beyond cu_seqlens[-1] are in row P, which is
    cut off); ``read_T`` the same, but within the rows. ``inside_T``: before cu_seqlens[-1],
    ``outside_T`` not. ``position_R``: each aligned row's position in its own document.
    ``present_R``: rows that hold a token.
    """

    row_T: Tensor
    read_T: Tensor
    inside_T: Tensor
    outside_T: Tensor
    position_R: Tensor
    present_R: Tensor
    num_rows: int
    documents: Documents

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int, sel_block: int) -> Self:
        """``cu_seqlens`` int32 or int64 [N + 1], ascending from 0, on the tokens' device; documents
        may be empty.
        """
        cu = cu_seqlens.long()
        length_N = cu.diff()
        room_N = (length_N + sel_block - 1) // sel_block * sel_block
        bounds = torch.cat([cu.new_zeros(1), room_N.cumsum(0)])
        token = torch.arange(tokens, device=cu.device)
        document = torch.searchsorted(cu[1:], token, right=True).clamp(max=length_N.shape[0] - 1)
        inside = token < cu[-1]
        # An upper bound that depends on shapes alone, so that no length has to be read.
        P = -(-(tokens + length_N.shape[0] * (sel_block - 1)) // sel_block) * sel_block
        row = torch.where(inside, token + (bounds[:-1] - cu[:-1])[document], P)
        aligned = torch.arange(P, device=cu.device)
        # what is left at the end is one more document, of zeros
        first = bounds[torch.searchsorted(bounds[1:], aligned, right=True)]
        ends = torch.cat([bounds, bounds.new_full((1,), P)])
        present = torch.zeros(P + 1, dtype=torch.bool, device=cu.device).index_fill(0, row, True)[
            :P
        ]
        documents = Documents(first[None], ends.int())
        return cls(
            row, row.clamp(max=P - 1), inside, ~inside, aligned - first, present, P, documents
        )

    def part(self, tokens: tuple[int, int], rows: tuple[int, int]) -> Packing:
        """The way of these tokens (begin, end) to these rows, within ``num_rows``, and back; others
        of the tokens are left out.
        """
        begin, end = rows
        number = end - begin
        row_T = self.row_T[slice(*tokens)] - begin
        outside_T = (row_T < 0) | (row_T >= number)
        row_T = row_T.masked_fill(outside_T, number)
        return Packing(
            row_T,
            row_T.clamp(max=number - 1),
            ~outside_T,
            outside_T,
            self.position_R[begin:end],
            self.present_R[begin:end],
            number,
            Documents(
                self.documents.first_BT[:, begin:end], self.documents.bounds_N.clamp(max=end)
            ),
        )

    def align(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [1, P, ...]; rows of no token are 0, whatever lies beyond the last
        document.
        """
        rows = x.new_zeros(self.num_rows + 1, *x.shape[2:]).index_copy(0, self.row_T, x[0])
        return rows[None, : self.num_rows]

    def restore(self, x: Tensor) -> Tensor:
        """[1, P, ...] -> [1, T, ...]; tokens beyond the last document are exactly 0."""
        rows = x[0].index_select(0, self.read_T)
        return rows.masked_fill(self.outside_T.view(-1, *[1] * (rows.ndim - 1)), 0)[None]


def without_poison(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """(x with rows that hold a NaN or an infinity as 0, for each x [1, R, ...] of ``tensors``; bool
    [1, R]: which rows of any were such). No gradient reaches those rows.

    A kernel multiplies a key that a query must not see by 0, and 0 * NaN is NaN.
    """
    clean, found = [], None
    for x in tensors:
        with torch.no_grad():  # one pass over x, where isfinite would write as many flags
            largest = torch.linalg.vector_norm(x.detach(), torch.inf, dim=tuple(range(2, x.ndim)))
            bad = ~largest.isfinite()
        clean.append(x.masked_fill(bad.view(*bad.shape, *[1] * (x.ndim - 2)), 0))
        found = bad if found is None else found | bad
    assert found is not None
    return clean, found


def reached(
    documents: Documents,
    token_BS: Tensor,
    block_BC: Tensor | None,
    block: int,
    stride: int,
    *,
    q_start: int = 0,
) -> Tensor:
    """Bool [1, T]: queries of a document, the first of them in row ``q_start``, at or after one of
    its tokens in ``token_BS`` bool [1, S], or the end of one of its compressed blocks in
    ``block_BC`` bool [1, C]. S = q_start + T.
    """
    (T, S), first_BT = (documents.first_BT.shape[1], token_BS.shape[1]), documents.first_BT
    if block_BC is not None and block_BC.shape[1] > 0:
        begin_S = torch.arange(S, device=first_BT.device) - (block - 1)
        i_S = (begin_S // stride).clamp(0, block_BC.shape[1] - 1)
        first_BS = first_BT if T == S else documents.first_of(S)
        ends_here = (begin_S == i_S * stride) & (begin_S >= first_BS)  # within its document
        token_BS = token_BS | (block_BC.index_select(1, i_S) & ends_here)
    count_BS = torch.nn.functional.pad(token_BS.long().cumsum(1), (1, 0))
    return count_BS[:, q_start + 1 :] > count_BS.gather(1, first_BT)
