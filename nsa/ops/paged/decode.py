"""A decode step of one layer over pages, by kernels: what is new is stored, then attended to.

A tile of keys lies within a page, so that it costs one load of an int32. A step of more rows than
one captured is the same launch: positions and lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nsa.ops.paged.pages import KV, LayerPages

LEAST_PAGE, MOST_PAGE = 16, 128  # entries: a dot wants 16, and a tile of more takes too much memory


@dataclass(frozen=True, slots=True)
class PagesGeometry:
    """Of the config, and the logits' ``scale``; ``forced``: the numbers of initial and of local
    blocks.
    """

    block: int
    stride: int
    window: int
    num_selected: int
    forced: tuple[int, int]
    scale: float


def has_kernels_of(page: int) -> bool:
    """Whether pages of so many entries are tiles of the kernels."""
    return LEAST_PAGE <= page <= MOST_PAGE and page & (page - 1) == 0


def fits_one_tile(T: int, heads_per_group: int) -> bool:
    """Whether T queries of a kv head are few enough for the kernels."""
    from nsa.ops.decode import kernels

    return kernels.few_queries(T, heads_per_group)


def append(pages: LayerPages, kv_cmp: KV, kv_sel: KV, kv_win: KV) -> None:
    """Store T tokens a row, each kv [B, T, G, D], those alone that exist (start_B .. seq_lens)."""
    from nsa.ops.paged import append_kernels

    append_kernels.append(pages, kv_sel, kv_win, kv_cmp)


def append_means(pages: LayerPages, T: int, *, block: int, stride: int) -> None:
    """Store the means (Eq. 7) of the blocks that this step's T tokens complete; after `append`."""
    from nsa.ops.paged import append_kernels

    append_kernels.means(pages, T, block=block, stride=stride)


def attend(q: Tensor, pages: LayerPages, geometry: PagesGeometry) -> tuple[tuple[KV, ...], Tensor]:
    """((o, lse to base 2) of the compressed, the selected and the window branch, the chosen blocks
    int32 [B, T, G, N]) of q [B, T, HQ, D].
    """
    from nsa.ops.paged.choose_kernels import choose
    from nsa.ops.paged.interval_kernels import interval
    from nsa.ops.paged.selected_kernels import selected

    grid = {"block": geometry.block, "stride": geometry.stride}
    q = q if q.stride(-1) == 1 else q.contiguous()
    cmp = interval(q, pages.cmp, pages, **grid, width=None, scale=geometry.scale)
    blocks = choose(
        q,
        cmp[1],
        pages,
        **grid,
        num_selected=geometry.num_selected,
        forced=geometry.forced,
        scale=geometry.scale,
    )
    sel = selected(q, blocks, pages, scale=geometry.scale)
    win = interval(
        q, pages.win, pages, block=1, stride=1, width=geometry.window, scale=geometry.scale
    )
    return (cmp, sel, win), blocks
