"""The reference: fp64, explicit softmax over explicit boolean masks, differentiable, unoptimised.

Imports torch alone.

It shares no code with what is tested against it. Layout as everywhere: q [B, T, HQ, DK], k
[B, S, G, DK], v [B, S, G, DV].
``positions`` int64 [B or 1, T] gives the query rows' positions; without it they are q_start,
q_start + 1, ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def row_positions(q: Tensor, q_start: int | Tensor, positions: Tensor | None) -> Tensor:
    if positions is not None:
        return positions.to(q.device)
    rows = torch.arange(q.shape[1], device=q.device)
    return (q_start[:, None].to(q.device) if isinstance(q_start, Tensor) else q_start) + rows[None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over the kept keys, ``keep`` boolean [B or 1, G or 1, T, S]; a row that keeps none is
    0 with lse = -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    B, T, HQ, DK = q.shape
    G = k.shape[2]
    scale = DK**-0.5 if scale is None else scale
    queries = q.reshape(B, T, G, HQ // G, DK)
    logits = torch.einsum("btghd,bsgd->bghts", queries, k) * scale
    keep = keep[:, :, None].expand(logits.shape)
    some = keep.any(-1, keepdim=True)
    logits = torch.where(keep, logits, -torch.inf)
    top = (
        torch.where(some, logits.amax(-1, keepdim=True), 0.0).detach()
        if k.shape[1]
        else torch.zeros_like(some, dtype=q.dtype)
    )
    weight = torch.where(keep, torch.exp(logits - top), 0.0)
    total = weight.sum(-1, keepdim=True)
    p = weight / torch.where(some, total, 1.0)
    o = torch.einsum("bghts,bsgd->btghd", p, v).reshape(B, T, HQ, v.shape[3])
    lse = torch.where(some, torch.log(torch.where(some, total, 1.0)) + top, -torch.inf)[..., 0]
    return o, lse.permute(0, 3, 1, 2).reshape(B, T, HQ)


def compressed_mask(position: Tensor, num_blocks: int, block: int, stride: int) -> Tensor:
    end = torch.arange(num_blocks, device=position.device) * stride + block
    return (end[None, None] <= position[:, :, None] + 1)[:, None]


def selected_mask(position: Tensor, blocks: Tensor, num_keys: int, sel_block: int) -> Tensor:
    key = torch.arange(num_keys, device=position.device)
    chosen = (blocks[..., None].long() == (key // sel_block)).any(3).permute(0, 2, 1, 3)
    return chosen & (key <= position[:, :, None])[:, None]


def sliding_mask(position: Tensor, num_keys: int, window: int) -> Tensor:
    distance = position[:, :, None] - torch.arange(num_keys, device=position.device)
    return ((distance >= 0) & (distance < window))[:, None]


def causal_mask(position: Tensor, num_keys: int) -> Tensor:
    return (torch.arange(num_keys, device=position.device) <= position[:, :, None])[:, None]


def compress_mean(x: Tensor, block: int, stride: int) -> Tensor:
    """Mean over tokens [i * stride, i * stride + block), whole blocks only: [B, C, G, D]."""
    return _windows(x.double(), block, stride).mean(2)


def _windows(x: Tensor, block: int, stride: int) -> Tensor:
    """Whole blocks of x [B, S, G, D]: [B, C, l, G, D]. One operator: slices in a loop would each
    have a gradient of S tokens.
    """
    if x.shape[1] < block:
        return x[:, :0, None].expand(-1, -1, block, -1, -1)
    return x.unfold(1, block, stride).permute(0, 1, 4, 2, 3)


def compressed(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the compressed blocks that end at or before the query."""
    keep = compressed_mask(row_positions(q, q_start, positions), k_cmp.shape[1], block, stride)
    return attention(q, k_cmp, v_cmp, keep, scale)


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention over the tokens of the chosen blocks at or before the query."""
    keep = selected_mask(row_positions(q, q_start, positions), blocks, k.shape[1], sel_block)
    return attention(q, k, v, keep, scale)[0]


def sliding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention over the last ``window`` keys, the query's own included."""
    return attention(
        q, k, v, sliding_mask(row_positions(q, q_start, positions), k.shape[1], window), scale
    )[0]


def causal(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, positions: Tensor | None = None
) -> Tensor:
    """Full causal attention: the dense twin's oracle."""
    return attention(q, k, v, causal_mask(row_positions(q, 0, positions), k.shape[1]), scale)[0]


@torch.no_grad()
def select(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: Any,
    q_start: int | Tensor = 0,
    kv_len: int | None = None,
    scale: float | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(blocks int64 [B, T, G, n] ascending, -1 padded; relative gap [B, T, G] between the last
    chosen score and the next).

    A score that is NaN counts as 0. The gap is inf where no block was left out, or where every
    chosen one was forced. ``config`` is an NSAConfig.
    """
    position = row_positions(q, q_start, positions)
    kv_len = int(position.max()) + 1 if kv_len is None else kv_len
    J = -(-kv_len // config.sel_block)
    scores = block_scores(q, k_cmp, position, config, J, scale)
    scores = torch.where(scores.isnan(), 0.0, scores)
    B, G, T, _ = scores.shape
    j = torch.arange(J, device=q.device)
    current = (position // config.sel_block)[:, None, :, None].expand(B, G, T, 1)
    candidate = j <= current
    chosen = ((j < config.num_initial) | (j > current - config.num_local)) & candidate
    free_slots = config.num_selected - chosen.sum(-1)
    last = torch.full((B, G, T), torch.inf, dtype=torch.float64, device=q.device)
    following = torch.full_like(last, torch.nan)
    for turn in range(config.num_selected + 1):
        rest = torch.where(candidate & ~chosen, scores, -torch.inf)
        best = rest.amax(-1)
        exists = best > -torch.inf
        lowest = torch.where(rest == best[..., None], j, J).amin(-1)
        taking = exists & (turn < free_slots)
        following = torch.where(exists & (turn == free_slots), best, following)
        last = torch.where(taking, best, last)
        chosen = chosen | (taking[..., None] & (j == lowest[..., None]))
    index = torch.where(chosen, j, J).sort(-1).values
    index = torch.cat([index, index.new_full((B, G, T, config.num_selected), J)], -1)[
        ..., : config.num_selected
    ]
    gap = torch.where(
        following.isnan() | last.isinf(), torch.inf, (last - following) / last.clamp(min=1e-300)
    )
    return torch.where(index == J, -1, index).permute(0, 2, 1, 3), gap.permute(0, 2, 1)


def block_scores(
    q: Tensor, k_cmp: Tensor, position: Tensor, config: Any, J: int, scale: float | None
) -> Tensor:
    """Group scores [B, G, T, J]: softmax over visible blocks, each counted by the sub-chunks it
    shares with block j.
    """
    q, k_cmp = q.double(), k_cmp.double()
    B, T, HQ, DK = q.shape
    C, G = k_cmp.shape[1:3]
    l, d = config.cmp_block, config.cmp_stride  # noqa: E741 (the paper's letters)
    sel = config.sel_block
    logits = torch.einsum("btghd,bcgd->bghtc", q.reshape(B, T, G, HQ // G, DK), k_cmp) * (
        DK**-0.5 if scale is None else scale
    )
    keep = compressed_mask(position, C, l, d)[:, :, None].expand(logits.shape)
    weight = (
        torch.where(
            keep, torch.exp(logits - torch.where(keep, logits, -1e300).amax(-1, keepdim=True)), 0.0
        )
        if C
        else logits
    )
    p = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
    shared = torch.zeros(C, J, dtype=torch.float64, device=q.device)
    for chunk in range(l // d):
        token = torch.arange(C, device=q.device) * d + chunk * d
        inside = token // sel < J
        shared[torch.arange(C, device=q.device)[inside], (token // sel)[inside]] += 1
    return torch.einsum("bghtc,cj->bgtj", p, shared)


def rope(x: Tensor, positions: Tensor, *, base: float, scale: float, kind: str) -> Tensor:
    """Rotate x [B, T, heads, D] at ``positions`` [T] or [B, T]: pairs (2i, 2i+1) for interleaved,
    (i, i + D/2) for half; none turns nothing.
    """
    x = x.double()
    if kind == "none":
        return x
    D = x.shape[-1]
    positions = positions if positions.ndim == 2 else positions[None]
    out = x.clone()
    for i in range(D // 2):
        angle = positions.double()[:, :, None] * scale * base ** (-2 * i / D)
        a, b = (2 * i, 2 * i + 1) if kind == "interleaved" else (i, i + D // 2)
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out


def compress_linear(x: Tensor, weight: Tensor, block: int, stride: int) -> Tensor:
    """weight [D, l * D] times each whole block, flattened token by token: [B, C, G, D]."""
    windows = _windows(x.double(), block, stride)
    return torch.einsum("bckgd,okd->bcgo", windows, weight.double().reshape(-1, block, x.shape[3]))


def compress_mlp(
    x: Tensor, position: Tensor, up: Tensor, down: Tensor, block: int, stride: int
) -> Tensor:
    """down [D, hidden] times SiLU of up [hidden, l * D] times each whole block plus position [l,
    D]: [B, C, G, D].
    """
    x, position, up, down = x.double(), position.double(), up.double(), down.double()
    placed = _windows(x, block, stride) + position[:, None, :]
    hidden = torch.einsum("bckgd,okd->bcgo", placed, up.reshape(-1, block, x.shape[3]))
    return torch.einsum("bcgh,dh->bcgd", hidden * torch.sigmoid(hidden), down)
