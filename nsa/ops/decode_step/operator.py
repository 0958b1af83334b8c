"""The operator of ``nsa.ops.decode_step.launches``. No gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.decode_step.shapes import Buffers, Projected, RowRoom, StepGeometry, StepPages
from nsa.ops.operator import call, define_operator

_ROPES = ("none", "interleaved", "half")
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor turns, Tensor position, Tensor? gates, Tensor? up,"
    " Tensor? down, Tensor(a!)[] buffers, Tensor[] tables, SymInt[] geometry, float scale, float"
    " temperature) -> (Tensor, Tensor)"
)


def attend(
    x: Projected, buffers: Buffers, geometry: StepGeometry, pages: StepPages | None = None
) -> tuple[Tensor, Tensor]:
    """Store the token of each row in ``buffers``, and attend: (o [B, 1, Q, DV], the gated sum of
    the branches; blocks int32 [B, 1, G, N], those of the selected one). ``pages``: where the
    buffers are pools of pages.
    """
    g = geometry
    sizes = [g.block, g.stride, g.sel_block, g.num_selected, g.num_initial, g.num_local]
    sizes.append(_ROPES.index(g.rope))
    tables: list[Tensor] = []
    if pages is not None:
        tables = [*pages.tables, pages.seq_lens, pages.last]
        sizes += pages.held
    o, blocks = call("decode_step", *x, list(buffers), tables, sizes, g.scale, g.temperature)
    return o, blocks


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    from nsa.ops.decode_step import launches

    *projected, tensors, tables, sizes, scale, temperature = arguments
    grid, rope = sizes[:6], sizes[6]
    pages = None
    if tables:
        sel, win, raw, cmp, seq_lens, last = tables
        pages = StepPages(sel, win, raw, cmp, seq_lens, last, RowRoom(*sizes[7:]))
    x, buffers = Projected(*projected), Buffers(*tensors)
    geometry = StepGeometry(*(*grid, scale, temperature, _ROPES[rope]))
    q, gates = launches.append(x, buffers, geometry, pages)
    return launches.attend(q, gates, x.position, buffers, geometry, pages)


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, tensors, _, sizes, _, _ = rest
    buffers = Buffers(*tensors)
    o = q.new_empty(*q.shape[:3], buffers.sel_v.shape[3])
    return o, q.new_empty(*q.shape[:2], buffers.sel_k.shape[2], sizes[3], dtype=torch.int32)


define_operator("decode_step", _SCHEMA, _run, _fake)
