"""What the pages of a PagedCache are: of which K and V, how many, and their memory.

L layers, G kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.decode.paged.rows import COMPRESSED, TOKENS, WINDOW


@dataclass(frozen=True, slots=True)
class PageShape:
    """K and V of one entry [G, D], as a PagedCache keeps them.

    ``scales``: None, or fp32 [G] or [L, G] for K and for V: selected and window K and V are kept in
    float8_e4m3fn, as `nsa.ops.paged.Pages` has it; compressed ones and raw tokens never are, so
    that blocks are chosen as without it.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    scales: tuple[Tensor, Tensor] | None = None


def default_pages(grid: BlockGrid, max_batch: int, max_len: int, rollback: int) -> dict[str, int]:
    """Pages of each pool that ``max_batch`` full rows take which share nothing."""
    page = grid.sel_block

    def recent(reads: int) -> int:
        """Of what a step reads, and what a long chunk leaves for the next."""
        return min(-(-max_len // page), 2 * (-(-(reads + rollback) // page) + 1))

    compressed = max(1, -(-grid.num_cmp(max_len) // page))
    return {
        TOKENS: max_batch * -(-max_len // page),
        WINDOW: max_batch * recent(grid.window - 1),
        COMPRESSED: max_batch * (compressed + recent(grid.cmp_block - 1)),
    }


def zeros(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, name: str
) -> list[Tensor]:
    """Where memory ends, torch.OutOfMemoryError says what the pool ``name`` takes."""
    # few operators take float8, zeros of which are bytes of 0
    made = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
    try:
        return [torch.zeros(size, dtype=made, device=device).view(dtype) for size in sizes]
    except (RuntimeError, TypeError) as error:  # the latter of a size beyond int64
        needed = sum(math.prod(size) for size in sizes) * dtype.itemsize
        raise torch.OutOfMemoryError(  # on a CPU, too, where PyTorch's is a RuntimeError
            f"got no memory on {device} for {needed:,} bytes of {sizes[0][1]:,} pages of {name};"
            " wanted room for them; lower num_pages, which rows share, max_batch or max_len"
        ) from error


def checked_scales(x: Tensor, layers: int, heads: int) -> Tensor:
    """fp32 [L, G]."""
    if not isinstance(x, Tensor) or x.shape not in ((heads,), (layers, heads)):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"got scales {got}; wanted ({heads},) or ({layers}, {heads}): one a kv head, or a layer"
            " and kv head; ones keep what lies below 448 in size"
        )
    if not bool((x > 0).all()) or not bool(x.isfinite().all()):
        raise ValueError(
            "got scales that are not finite and above 0; wanted such; take the largest size of a"
            " head's K or V, divided by 448"
        )
    return x.detach().float().expand(layers, heads).contiguous()
