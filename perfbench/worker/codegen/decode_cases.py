"""The fused decode step, and the one over pages, on tensors of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.ops import decode_step, paged
from nsa.ops.decode_step import launches as step_launches
from nsa.ops.linear_step import kernels as linear
from perfbench.worker.codegen.builds import CodeShape

TOKENS = 1024
DIM = 768  # of m7c_125m


def stepping(shape: CodeShape, at: Callable[[str], None], *, in_pages: bool = False) -> None:
    """With gates of its own or given ones, one K and V or three, either RoPE."""
    G, H, DK, DV = shape.groups, shape.heads, shape.key_dim, shape.value_dim
    dtype = getattr(torch, shape.dtype)
    for batch, copies, rope in ((1, 3, "interleaved"), (300, 1, "half")):

        def zeros(*sizes: int, of: torch.dtype = dtype, batch: int = batch) -> Tensor:
            return torch.zeros(batch, *sizes, dtype=of)

        at(f"step.of{batch}")
        held = 65_536 if batch == 1 else TOKENS
        counts = (held + 1, 512, 32, held // 16)  # sel, win, raw, cmp
        rows = [zeros(n, G, d) for n in counts for d in (DK, DV)]
        gates = zeros(1, G * H, 3) if copies == 1 else None
        up, down = (torch.zeros(G, DK, n, dtype=dtype) for n in (DK, 3))
        projected = decode_step.Projected(
            zeros(1, G * H, DK),
            zeros(1, copies * G, DK),
            zeros(1, copies * G, DV),
            zeros(1, 1, DK // 2, 2, of=torch.float32),
            torch.zeros(batch, dtype=torch.int64),
            gates,
            None if copies == 1 else up,
            None if copies == 1 else down,
        )
        geometry = decode_step.StepGeometry(32, 16, 64, 16, 1, 2, 0.1, 1.0, rope)
        buffers = decode_step.Buffers(*rows)
        pages = None
        if in_pages:
            buffers, pages = _in_pages(shape, batch, held)
        q, made = step_launches.append(projected, buffers, geometry, pages)
        step_launches.attend(q, made, projected.position, buffers, geometry, pages)


def linear_layers(shape: CodeShape, at: Callable[[str], None]) -> None:
    """Those of a block, with what surrounds them."""
    dtype = getattr(torch, shape.dtype)
    for batch in (1, 64):
        at(f"linear.of{batch}")
        x, hidden = (torch.zeros(batch, 1, n, dtype=dtype) for n in (DIM, 4 * DIM))
        wide, narrow = (torch.zeros(n, m, dtype=dtype) for n, m in ((4 * DIM, DIM), (DIM, 4 * DIM)))
        norm: dict[str, Any] = {"norm": torch.zeros(DIM, dtype=dtype), "eps": 1e-7}
        plain: dict[str, Any] = {"norm": None, "eps": 0.0}
        linear.apply(x, [wide[:DIM], wide[:384], wide[:384]], silu=False, residual=None, **norm)
        linear.apply(x, [wide], silu=True, residual=None, **norm)
        linear.apply(hidden, [narrow], silu=False, residual=x, **plain)


def _in_pages(
    shape: CodeShape, batch: int, held: int
) -> tuple[decode_step.Buffers, decode_step.StepPages]:
    """Pools of a few pages of 64 tokens, for rows of ``held`` tokens."""
    dtype = getattr(torch, shape.dtype)
    k, v = (
        torch.zeros(3, 64, shape.groups, dim, dtype=dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    table = torch.zeros(batch, held // 64, dtype=torch.int32)
    last = torch.zeros(batch, dtype=torch.int64)
    room = decode_step.RowRoom(held, 512, held // 16 - 1)
    pages = decode_step.StepPages(table, table, table, table, last.int(), last, room)
    return decode_step.Buffers(k, v, k, v, k, v, k, v), pages


def over_pages(shape: CodeShape, at: Callable[[str], None], *, float8: bool = False) -> None:
    """Of few rows, pages of 64 tokens."""
    at("pages")
    G, H, DK, DV = shape.groups, shape.heads, shape.key_dim, shape.value_dim
    dtype, B, rows = getattr(torch, shape.dtype), 2, torch.zeros(2, dtype=torch.int32)

    def pages(kind: torch.dtype) -> paged.Pages:
        k, v = (torch.zeros(3, 64, G, dim, dtype=dtype).to(kind) for dim in (DK, DV))
        scales = (torch.ones(G), torch.ones(G)) if kind != dtype else None
        return paged.Pages(k, v, torch.zeros(B, TOKENS // 64, dtype=torch.int32), scales)

    kept = pages(torch.float8_e4m3fn if float8 else dtype)
    own = pages(dtype)
    layer = paged.LayerPages(own, own, kept, kept, rows.long(), rows, TOKENS)
    q = torch.zeros(B, 1, G * H, DK, dtype=dtype)
    kv = torch.zeros(B, 1, G, DK, dtype=dtype), torch.zeros(B, 1, G, DV, dtype=dtype)
    paged.append(layer, kv, kv, kv)
    paged.append_means(layer, 1, block=32, stride=16)
    paged.attend(q, layer, paged.PagesGeometry(32, 16, 512, 16, (1, 2), 0.1))
