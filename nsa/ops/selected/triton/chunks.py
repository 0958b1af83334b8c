"""How many rows a chunk has, which bounds the memory of the parts; so the sizes of a call's lists.

Letters as in `nsa.ops.selected.triton.entries`; D and DV head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.kernels.common import cdiv
from nsa.ops.selected.triton.block_lists import Grid

# of one chunk's parts, or PARTS_OF_Q times the queries' own bytes where that is more
PART_BYTES = 512 << 20
PARTS_OF_Q = 2


def grid_of(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int) -> Grid:
    """Sizes of the lists of a call, forward and backward; symbolic sizes make no guard."""
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    row_bytes = N * HQ * max(D, DV) * q.element_size()
    most = torch.sym_max(PART_BYTES, PARTS_OF_Q * q.numel() * q.element_size()) // row_bytes
    step = torch.sym_max(1, torch.sym_min(B * T, most))
    # as many chunks, of one size: the fourth of 65,536 rows would have one row, others 21,845
    step = cdiv(B * T, cdiv(B * T, step))
    return Grid(B, T, G, N, cdiv(S, sel_block), step)
