"""Sliding branch: keys t - w + 1 .. t, exactly w of them.

No S x w copy: K and V are tiled by windows, twice their size.

B batch, T query tokens, S key tokens, Q query heads, G kv heads, D head dim, w window.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.documents import Documents
from nsa.ops import flash, sdpa
from nsa.ops.exporting import is_exporting
from nsa.ops.operator import define_formula, int_and_tensor, is_transformed

# A compiled region pads its tokens to tiles of one window; of a longer one it asks whether the
# tokens fill it: a layer of full attention has a window of 2^30.
LONG_WINDOW = 4096


def attend(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    q_start: int | Tensor,
    scale: float,
    fa2: str | None,
    documents: Documents | None = None,
) -> Tensor:
    """Returns o [B, T, HQ, DV]; ``fa2`` is the provider that serves it, None for SDPA over
    tiles.
    """
    at, q_starts = int_and_tensor(q_start)
    first, bounds = (None, None) if documents is None else (documents.first_BT, documents.bounds_N)
    run = _attend if is_transformed() else torch.ops.nsa.sliding
    o: Tensor = run(q_BTQD, k_BSGD, v_BSGD, q_starts, first, bounds, at, window, scale, fa2)
    return o


def _attend(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    q_starts: Tensor | None,
    first_BT: Tensor | None,
    bounds_N: Tensor | None,
    first_position: int,
    window: int,
    scale: float,
    fa2: str | None,
) -> Tensor:
    q_start = first_position if q_starts is None else q_starts
    if fa2 is not None and bounds_N is not None:
        q, k, v = q_BTQD[0], k_BSGD[0], v_BSGD[0]
        # the longest document may be all of it; its length is not read
        bounds, most, most_k = bounds_N, q.shape[0], k.shape[0]
        # queries may be the last of a row
        of_q = bounds if most == most_k else (bounds - first_position).clamp(min=0)
        return flash.varlen(
            fa2, q, k, v, of_q, bounds, most, most_k, scale=scale, window=(window - 1, 0)
        )[None]
    if fa2 is not None:
        assert isinstance(q_start, int)
        return _flash(
            q_BTQD, k_BSGD, v_BSGD, window=window, q_start=q_start, scale=scale, provider=fa2
        )
    T = q_BTQD.shape[1]
    # asked of a long window alone: another length than the window's would be another graph
    is_one_tile = window > LONG_WINDOW and window >= T
    is_whole = isinstance(q_start, int) and q_start == 0
    if torch.compiler.is_compiling() and is_whole and not is_one_tile:
        return _later_tiles(
            q_BTQD,
            k_BSGD[:, :T],
            v_BSGD[:, :T],
            window=window,
            scale=scale,
            first_BT=first_BT,
            empty=1,
        )
    if first_BT is not None and not is_whole:  # counted from the first query
        first_BT = first_BT - first_position
    before_k, new_k, known = _split(k_BSGD, q_start, T, window)
    before_v, new_v, _ = _split(v_BSGD, q_start, T, window)
    head = min(T, window)
    # split, not slices: its backward is one concatenation instead of zero-filled copies
    head_q, head_k, head_v = (x.split([head, T - head], 1)[0] for x in (q_BTQD, new_k, new_v))
    first = sdpa.grouped(
        head_q,
        torch.cat([before_k, head_k], 1),
        torch.cat([before_v, head_v], 1),
        _band(head, before_k.shape[1], window, q_BTQD.device)
        & known
        & _own_document(first_BT, slice(0, head), before_k.shape[1], head),
        scale=scale,
    )
    if head == T:
        return first
    return torch.cat(
        [
            first,
            _later_tiles(q_BTQD, new_k, new_v, window=window, scale=scale, first_BT=first_BT),
        ],
        1,
    )


def _band(rows: int, before: int, window: int, device: torch.device) -> Tensor:
    """Boolean [1, 1, rows, before + rows]: key j lies at j - before relative to row 0."""
    row = torch.arange(rows, device=device)[:, None]
    key = torch.arange(before + rows, device=device) - before
    return ((key <= row) & (key > row - window))[None, None]


def _split(
    x_BSGD: Tensor, q_start: int | Tensor, T: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens before the chunk that its window can reach, the chunk's own, and which of both
    exist [B or 1, 1, 1, L].
    """
    device = x_BSGD.device
    if isinstance(q_start, int):
        before = min(window - 1, q_start)
        known = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        _, near, new, _ = x_BSGD.split(
            [q_start - before, before, T, x_BSGD.shape[1] - q_start - T], 1
        )
        return near, new, known
    before = window - 1
    # a compiled region would be compiled again for another S
    if not torch.compiler.is_compiling() or window > LONG_WINDOW:
        before = min(before, x_BSGD.shape[1])
    position_BL = q_start.to(device)[:, None] + torch.arange(-before, T, device=device)
    index = position_BL.clamp(min=0)[:, :, None, None].expand(-1, -1, *x_BSGD.shape[2:])
    near = x_BSGD.gather(1, index)
    known = (position_BL >= 0)[:, None, None, : before + min(T, window)]
    return near[:, :before], near[:, before:], known


def _own_document(first_BT: Tensor | None, rows: slice, before: int, keys: int) -> Tensor | bool:
    """Boolean [1, 1, rows, before + keys] of a packed row: keys at or after the first of the row's
    document, all counted from the first query, before which there are some.
    """
    if first_BT is None:
        return True
    key = torch.arange(-before, keys, device=first_BT.device)
    return (key >= first_BT[:, rows, None])[:, None]


def _later_tiles(
    q_BTQD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    *,
    window: int,
    scale: float,
    first_BT: Tensor | None,
    empty: int = 0,
) -> Tensor:
    """Rows from ``window`` on: tile i of the queries over tiles i - 1 and i of the keys, all in one
    call.

    With one ``empty`` tile before and one behind, the rows are all that there are, and never fewer
    than two tiles of them: a length up to the window or twice the window would be another graph for
    torch.compile.
    """
    B, T = q_BTQD.shape[:2]
    if is_exporting() and B > 1:
        # a sequence at a time: of tiles of unknown number, no two dimensions may be made one
        one = partial(_later_tiles, window=window, scale=scale, first_BT=first_BT, empty=empty)
        each = zip(*(x.split(1) for x in (q_BTQD, k_BTGD, v_BTGD)), strict=True)
        return torch.cat([one(*tensors) for tensors in each])
    tiles = -(-T // window) + 2 * empty
    lead = empty * window
    pad = tiles * window - lead - T  # so that the length is a multiple in torch.export's eyes, too
    q, k, v = (_tiled(F.pad(x, (0, 0, 0, 0, lead, pad)), window) for x in (q_BTQD, k_BTGD, v_BTGD))
    pair_k, pair_v = (_rows_of_tiles(torch.cat([x[:, :-1], x[:, 1:]], 2)) for x in (k, v))
    # The tile before begins one key earlier than the window reaches; the band drops it.
    mask = _band(window, window, window, q_BTQD.device)
    if first_BT is not None or empty:
        tile, j = (torch.arange(n, device=mask.device) for n in (tiles - 1, 2 * window))
        key = (tile[:, None] * window + j - lead)[:, None, None]  # [tiles - 1, 1, 1, 2 w]
        if first_BT is None:
            mask = _rows_of_tiles((mask & (key >= 0))[None].expand(B, -1, -1, -1, -1))
        else:
            # [tiles - 1, w]
            first = F.pad(first_BT, (lead, pad)).unflatten(1, (-1, window))[0, 1:]
            mask = mask & (key >= first[:, None, :, None])
    o = sdpa.grouped(_rows_of_tiles(q[:, 1:]), pair_k, pair_v, mask, scale=scale)
    if is_exporting():
        row_T = torch.arange(T - window + lead, device=o.device)
        return o[row_T // window, row_T % window][None]
    return o.unflatten(0, (B, tiles - 1)).flatten(1, 2)[:, : T - window + lead]


def _tiled(x: Tensor, window: int) -> Tensor:
    """[B, N * window, ...] -> [B, N, window, ...], a view."""
    if is_exporting():  # knows N only of this one, whose backward is slower
        return x.unfold(1, window, window).movedim(-1, 2)
    return x.unflatten(1, (-1, window))


def _rows_of_tiles(x: Tensor) -> Tensor:
    """[B, N, ...] -> [B * N, ...]."""
    return x[0] if x.shape[0] == 1 else x.flatten(0, 1)


def _flash(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    q_start: int,
    scale: float,
    provider: str,
) -> Tensor:
    B, T = q_BTQD.shape[:2]
    before = min(window - 1, q_start)
    near_k, near_v = (x[:, q_start - before : q_start + T] for x in (k_BSGD, v_BSGD))
    L = before + T
    cu_q, cu_k = (torch.arange(B + 1, device=q_BTQD.device, dtype=torch.int32) * n for n in (T, L))
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q_BTQD, near_k, near_v))
    o = flash.varlen(provider, q, k, v, cu_q, cu_k, T, L, scale=scale, window=(window - 1, 0))
    return o.unflatten(0, (B, T))


define_formula(
    "sliding",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? first, Tensor? bounds, SymInt"
    " q_start, SymInt window, float scale, str? fa2) -> Tensor",
    _attend,
)
