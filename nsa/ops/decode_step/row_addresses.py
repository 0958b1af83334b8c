"""The address of a row of a buffer or of pages: all that differs between the two, so that one set
of kernels serves both. No kernel of its own.

PAGE is the entries of a page, 0 where rows lie one behind another, and then tables are None. Pages
have no rings: a token lies where its position says. Sums take the same order. Letters as in
`nsa.ops.decode_step.shapes`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_at(TABLE, st_b, b, g, num_rows, i, ok, inside, G: tl.constexpr, PAGE: tl.constexpr):
    """(where row ``i`` of (b, kv head g) lies, counted in heads; ``inside`` where it has a page).

    ``num_rows``: of a contiguous buffer. ``ok``: of pages, which i are in the table's width.
    """
    if PAGE:
        page = tl.load(TABLE + b * st_b + i // PAGE, mask=ok, other=-1)
        return (page.to(tl.int64) * PAGE + i % PAGE) * G + g, inside & (page >= 0)
    return (b * num_rows + i) * G + g, inside


@triton.jit
def slot_of(pos, ring, PAGE: tl.constexpr):
    """The row that takes token ``pos``: of ``ring`` rows, or of pages its own."""
    if PAGE:
        return pos
    return pos % ring


@triton.jit
def rows_back(pos, BEHIND: tl.constexpr, BL: tl.constexpr, PAGE: tl.constexpr):
    """(rows of the BEHIND tokens up to ``pos``, oldest first; which of BL those are, but for the
    last, which is not stored yet).
    """
    i = tl.arange(0, BL)
    if PAGE:
        return pos + 1 - BEHIND + i, i < BEHIND - 1
    return (pos + 1 + i) % BEHIND, i < BEHIND - 1
