"""The independent judge: NSA in fp64, dense masks, explicit softmax, written from NSA.md alone.

Shapes are token-major: q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV]; everything is
computed and returned in fp64 and differentiable, except the selection. Nothing here imports the
package under test.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NEAR_TIE = 1e-5


def row_positions(
    q_start: int | Tensor, batch: int, tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Absolute position of every query row, int64 [B, T]."""
    first = torch.as_tensor(q_start, dtype=torch.int64, device=device).expand(batch)
    return first[:, None] + torch.arange(tokens, device=device)[None, :]


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """A logit z, scaled already, becomes c * tanh(z / c)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over ``visible`` bool [B, T, HKV, S]; a row that sees nothing is 0 with lse
    = -inf.

    ``sink`` [HQ]: exp(sink) joins the denominator of each head, and nothing the numerator; the lse
    is of the keys alone.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, tokens, q_heads, key_dim = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    factor = key_dim**-0.5 if scale is None else scale
    grouped = q.reshape(batch, tokens, kv_heads, group, key_dim)
    logits = soft_capped(torch.einsum("btghd,bsgd->btghs", grouped, k) * factor, softcap)
    seen = visible[:, :, :, None, :]
    logits = torch.where(seen, logits, -math.inf)
    if logits.shape[-1] == 0:
        shift = logits.new_zeros(*logits.shape[:-1], 1)
    else:
        top = logits.detach().amax(-1, keepdim=True)
        shift = torch.where(torch.isfinite(top), top, 0.0)
    weights = torch.exp(logits - shift)
    total = weights.sum(-1, keepdim=True)
    blind = total == 0
    denominator = total
    if sink is not None:
        denominator = total + torch.exp(sink.double().reshape(kv_heads, group, 1) - shift)
    o = torch.einsum("btghs,bsgd->btghd", weights / torch.where(blind, 1.0, denominator), v)
    lse = torch.where(blind, -math.inf, shift + torch.log(torch.where(blind, 1.0, total)))
    return o.reshape(batch, tokens, q_heads, v.shape[-1]), lse.reshape(batch, tokens, q_heads)


def causal(
    q: Tensor, k: Tensor, v: Tensor, *, q_start: int | Tensor = 0, scale: float | None = None
) -> Tensor:
    """Full causal attention."""
    position = row_positions(q_start, q.shape[0], q.shape[1], q.device)
    key = torch.arange(k.shape[1], device=q.device)
    visible = key[None, None, :] <= position[:, :, None]
    return masked_attention(q, k, v, _every_head(visible, k.shape[2]), scale)[0]


def _every_head(visible: Tensor, kv_heads: int) -> Tensor:
    batch, tokens, keys = visible.shape
    return visible[:, :, None, :].expand(batch, tokens, kv_heads, keys)


def num_compressed(tokens: int, block: int, stride: int) -> int:
    count = 0
    while count * stride + block <= tokens:
        count += 1
    return count


def compress_mean(x: Tensor, block: int, stride: int) -> Tensor:
    """Mean over tokens [i*d, i*d + l): [B, S, H, D] to [B, C, H, D]; a partial tail is no block."""
    x = x.double()
    count = num_compressed(x.shape[1], block, stride)
    if count == 0:
        return x[:, :0]
    return torch.stack(
        [x[:, i * stride : i * stride + block].sum(1) / block for i in range(count)], 1
    )


def kept_compressed(
    q: Tensor, k_cmp: Tensor, *, block: int, stride: int, q_start: int | Tensor = 0
) -> Tensor:
    """bool [B, T, HKV, C]: query t sees block i iff its last token i*d + l - 1 is at or before
    t.
    """
    position = row_positions(q_start, q.shape[0], q.shape[1], q.device)
    last_token = torch.arange(k_cmp.shape[1], device=q.device) * stride + block - 1
    return _every_head(last_token[None, None, :] <= position[:, :, None], k_cmp.shape[2])


def kept_selected(
    q: Tensor, k: Tensor, blocks: Tensor, *, sel_block: int, q_start: int | Tensor = 0
) -> Tensor:
    """bool [B, T, HKV, S]: tokens of the chosen blocks with position <= t."""
    position = row_positions(q_start, q.shape[0], q.shape[1], q.device)
    key = torch.arange(k.shape[1], device=q.device)
    chosen = torch.zeros(*blocks.shape[:3], k.shape[1], dtype=torch.bool, device=q.device)
    for slot in range(blocks.shape[-1]):
        chosen |= blocks[..., slot, None].long() == (key // sel_block)
    return chosen & (key <= position[:, :, None])[:, :, None, :]


def kept_window(q: Tensor, k: Tensor, *, window: int, q_start: int | Tensor = 0) -> Tensor:
    """bool [B, T, HKV, S]: keys t - w + 1 .. t."""
    position = row_positions(q_start, q.shape[0], q.shape[1], q.device)[:, :, None]
    key = torch.arange(k.shape[1], device=q.device)[None, None, :]
    return _every_head((key <= position) & (key >= position - window + 1), k.shape[2])


def compressed(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compressed branch: query t sees block i iff i*d + l - 1 <= t. Returns (o, lse)."""
    return masked_attention(
        q,
        k_cmp,
        v_cmp,
        kept_compressed(q, k_cmp, block=block, stride=stride, q_start=q_start),
        scale,
    )


def shared_chunks(cmp_index: int, sel_index: int, cmp_chunks: int, sel_chunks: int) -> int:
    """Stride-sized sub-chunks that a compressed block and a selection block have in common, counted
    as sets.
    """
    return len(
        set(range(cmp_index, cmp_index + cmp_chunks))
        & set(range(sel_index * sel_chunks, (sel_index + 1) * sel_chunks))
    )


def group_probability(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: Any,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """p_cmp over the visible blocks only, summed over each group's heads in order: fp64 [B, T, HKV,
    C]. ``sink`` [HQ] of the compressed branch takes its own part of each head's.
    """
    q, k_cmp = q.detach().double(), k_cmp.detach().double()
    batch, tokens, q_heads, key_dim = q.shape
    kv_heads, group = k_cmp.shape[2], q_heads // k_cmp.shape[2]
    factor = key_dim**-0.5 if scale is None else scale
    seen = kept_compressed(
        q, k_cmp, block=config.cmp_block, stride=config.cmp_stride, q_start=q_start
    )
    total = q.new_zeros(batch, tokens, kv_heads, k_cmp.shape[1])
    if k_cmp.shape[1] == 0:
        return total
    for head in range(group):
        heads = q.reshape(batch, tokens, kv_heads, group, key_dim)[:, :, :, head]
        logits = torch.einsum("btgd,bcgd->btgc", heads, k_cmp) * factor
        logits = soft_capped(logits, config.softcap)
        top = torch.where(seen, logits, -math.inf).amax(-1, keepdim=True)
        weights = torch.where(
            seen, torch.exp(logits - torch.where(torch.isfinite(top), top, 0.0)), 0.0
        )
        norm = weights.sum(-1, keepdim=True)
        if sink is not None:
            own = sink.detach().double().reshape(kv_heads, group, 1)[:, head]
            norm = norm + torch.exp(own - torch.where(torch.isfinite(top), top, 0.0))
        total = total + weights / torch.where(norm == 0, 1.0, norm)
    return total


def block_scores(p: Tensor, *, config: Any, num_sel: int) -> Tensor:
    """Eq. 9: [..., C] to [..., J], each block summing its overlapped compressed blocks in ascending
    order.
    """
    cmp_chunks, sel_chunks = (
        config.cmp_block // config.cmp_stride,
        config.sel_block // config.cmp_stride,
    )
    columns = []
    for j in range(num_sel):
        column = torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
        for i in range(
            max(0, j * sel_chunks - cmp_chunks + 1), min(p.shape[-1], (j + 1) * sel_chunks)
        ):
            column = column + p[..., i] * shared_chunks(i, j, cmp_chunks, sel_chunks)
        columns.append(column)
    return torch.stack(columns, -1)


def forced_blocks(position: int, config: Any) -> set[int]:
    current = position // config.sel_block
    wanted = set(range(config.num_initial)) | set(
        range(current - config.num_local + 1, current + 1)
    )
    return {j for j in wanted if 0 <= j <= current}


def _choose(
    scores: list[float], position: int, num_sel: int, config: Any
) -> tuple[list[int], float]:
    """(ascending blocks without padding, relative gap between the last block taken and the first
    one left out).
    """
    forced = forced_blocks(position, config)
    candidates = [j for j in range(num_sel) if j * config.sel_block <= position and j not in forced]
    ranked = sorted(candidates, key=lambda j: (-scores[j], j))
    free = config.num_selected - len(forced)
    taken, left = ranked[:free], ranked[free:]
    if not taken or not left:
        return sorted(forced | set(taken)), math.inf
    last, first = scores[taken[-1]], scores[left[0]]
    return sorted(forced | set(taken)), (last - first) / last if last > 0 else 0.0


def select(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: Any,
    q_start: int | Tensor = 0,
    kv_len: int | Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks int64 [B, T, HKV, n] (ascending, -1 padded) and the relative gap fp64 [B, T, HKV]
    (inf: no competition).
    """
    batch, tokens, kv_heads = q.shape[0], q.shape[1], k_cmp.shape[2]
    position = row_positions(q_start, batch, tokens).tolist()
    lengths = (
        torch.as_tensor(torch.as_tensor(q_start).cpu() + tokens if kv_len is None else kv_len)
        .cpu()
        .expand(batch)
        .tolist()
    )
    num_sel = max(-(-length // config.sel_block) for length in lengths)
    p = group_probability(q, k_cmp, config=config, q_start=q_start, scale=scale, sink=sink)
    exact = block_scores(p, config=config, num_sel=num_sel)
    scores = torch.where(
        exact.isnan(), 0.0, exact
    ).tolist()  # NSA.md: what is no number counts as 0
    blocks = torch.full((batch, tokens, kv_heads, config.num_selected), -1, dtype=torch.int64)
    gap = torch.full((batch, tokens, kv_heads), math.inf, dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            for g in range(kv_heads):
                existing = -(-lengths[b] // config.sel_block)
                chosen, gap[b, t, g] = _choose(scores[b][t][g], position[b][t], existing, config)
                blocks[b, t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return blocks.to(q.device), gap.to(q.device)


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
) -> Tensor:
    """Selected branch: softmax over the union of the chosen blocks' tokens with position <= t."""
    return masked_attention(
        q, k, v, kept_selected(q, k, blocks, sel_block=sel_block, q_start=q_start), scale
    )[0]


def sliding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
) -> Tensor:
    """Sliding branch: keys t - w + 1 .. t."""
    return masked_attention(q, k, v, kept_window(q, k, window=window, q_start=q_start), scale)[0]


def rope(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10_000.0,
    scale: float = 1.0,
    kind: str = "interleaved",
) -> Tensor:
    """Rotate pair i of the last dim of x [B, T, H, D] by position * scale * base**(-2 i / D);
    positions [T] or [B, T].
    """
    x = x.double()
    dim = x.shape[-1]
    even, odd = {
        "interleaved": (list(range(0, dim, 2)), list(range(1, dim, 2))),
        "half": (list(range(dim // 2)), list(range(dim // 2, dim))),
    }[kind]
    pair = torch.arange(dim // 2, dtype=torch.float64, device=x.device)
    angle = (
        positions.double()[..., None]
        * scale
        * torch.pow(torch.tensor(base, dtype=torch.float64), -2 * pair / dim)
    )
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x[..., even], x[..., odd]
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    order = torch.tensor(even + odd, device=x.device).argsort()
    return rotated[..., order]


def nsa(
    q: Tensor,
    kv_cmp: tuple[Tensor, Tensor],
    kv_sel: tuple[Tensor, Tensor],
    kv_win: tuple[Tensor, Tensor],
    gates: Tensor,
    **options: Any,
) -> Tensor:
    """One whole layer's attention (phi = mean, keys rotated already); gates [B, T, HQ, 3] in the
    order cmp, sel, win. ``options`` as of `nsa_with_lse`.
    """
    return nsa_with_lse(q, kv_cmp, kv_sel, kv_win, gates, **options)[0]


def nsa_with_lse(
    q: Tensor,
    kv_cmp: tuple[Tensor, Tensor],
    kv_sel: tuple[Tensor, Tensor],
    kv_win: tuple[Tensor, Tensor],
    gates: Tensor,
    *,
    config: Any,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    blocks: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(`nsa`, lse [B, T, HQ, 3] of each branch over its keys, -inf of one that is off).

    ``blocks`` replaces the oracle's own selection, for comparisons where near-ties chose another
    set. ``sinks`` [HQ, 3]: each head's logit of value 0 in each branch.
    """
    k_cmp, v_cmp = (compress_mean(x, config.cmp_block, config.cmp_stride) for x in kv_cmp)
    own = [None] * 3 if sinks is None else list(sinks.unbind(-1))
    if blocks is None:
        blocks, _ = select(
            q,
            k_cmp,
            config=config,
            q_start=q_start,
            kv_len=kv_sel[0].shape[1],
            scale=scale,
            sink=own[0],
        )
    kept = (
        kept_compressed(
            q, k_cmp, block=config.cmp_block, stride=config.cmp_stride, q_start=q_start
        ),
        kept_selected(q, kv_sel[0], blocks, sel_block=config.sel_block, q_start=q_start),
        kept_window(q, kv_win[0], window=config.window, q_start=q_start),
    )
    gates = gates.double()
    o: Tensor | float = 0.0
    lses = []
    for index, (branch, kv) in enumerate(
        zip(("cmp", "sel", "win"), ((k_cmp, v_cmp), kv_sel, kv_win), strict=True)
    ):
        of_branch, lse = masked_attention(
            q, *kv, kept[index], scale, softcap=config.softcap, sink=own[index]
        )
        is_on = branch in config.branches
        o = o + gates[..., index, None] * of_branch if is_on else o
        lses.append(lse if is_on else torch.full_like(lse, -math.inf))
    assert isinstance(o, Tensor)
    return o, torch.stack(lses, -1)


def _linear_of_block(tokens: Tensor, weight: Tensor) -> Tensor:
    """Token by token: tokens [B, l, H, D] under weight [F, l * D], whose column token * D + d meets
    feature d of that token.
    """
    dim = tokens.shape[3]
    total = tokens.new_zeros(tokens.shape[0], tokens.shape[2], weight.shape[0])
    for token in range(tokens.shape[1]):
        total = total + tokens[:, token] @ weight[:, token * dim : (token + 1) * dim].T
    return total


def compress_linear(x: Tensor, weight: Tensor, block: int, stride: int) -> Tensor:
    """phi = linear: each flattened l x D block to D by weight [D, l * D]; no bias."""
    x, weight = x.double(), weight.double()
    count = num_compressed(x.shape[1], block, stride)
    if count == 0:
        return x[:, :0]
    compressed_x = x.new_zeros(x.shape[0], count, x.shape[2], weight.shape[0])
    for i in range(count):
        compressed_x[:, i] = _linear_of_block(x[:, i * stride : i * stride + block], weight)
    return compressed_x


def compress_mlp(
    x: Tensor, position: Tensor, up: Tensor, down: Tensor, block: int, stride: int
) -> Tensor:
    """phi = mlp: position encoding [l, D] added to a block's tokens, up [hidden, l * D], z / (1 +
    e^-z), down [D, hidden].
    """
    x, position, up, down = x.double(), position.double(), up.double(), down.double()
    count = num_compressed(x.shape[1], block, stride)
    if count == 0:
        return x[:, :0]
    compressed_x = x.new_zeros(x.shape[0], count, x.shape[2], down.shape[0])
    for i in range(count):
        tokens = torch.stack(
            [x[:, i * stride + token] + position[token] for token in range(block)], 1
        )
        z = _linear_of_block(tokens, up)
        compressed_x[:, i] = (z / (1 + torch.exp(-z))) @ down.T
    return compressed_x
