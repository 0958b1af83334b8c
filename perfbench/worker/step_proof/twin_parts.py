"""The parts of the twin, each written out from its formula: norm, RoPE, gates, compression.

B batch, T tokens, H heads, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa.config import BRANCHES, ModelConfig, NSAConfig

Weights = Mapping[str, Tensor]
# What nn.RMSNorm adds where it is given nothing: the epsilon of the dtype that it computes in,
# which is fp32 for every dtype of a cell.
EPSILON = torch.finfo(torch.float32).eps


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.transpose(0, 1))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight, in fp32 or wider, rounded to x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def rope(x: Tensor, position: Tensor, nsa: NSAConfig) -> Tensor:
    """x [B, T, H, D] turned at ``position`` [T]: pairs (2i, 2i + 1), or (i, i + D / 2) for half.

    Angles are in fp32, as the norm wants them: at 65,536 tokens their own rounding shows in fp64.
    """
    if nsa.rope == "none":
        return x
    D, wide = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    pair = torch.arange(0, D, 2, device=x.device, dtype=torch.float32)
    angle = (position.float() * nsa.rope_scale)[:, None] * nsa.rope_base ** (-pair / D)
    cos, sin = (f(angle.to(wide))[:, None] for f in (torch.cos, torch.sin))
    if nsa.rope == "half":
        a, b = x.to(wide).split(D // 2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
    a, b = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def gates(x: Tensor, q: Tensor, w: Weights, model: ModelConfig) -> Tensor:
    """[B, T, HQ, 3], of the layer's input x or of q before RoPE."""
    nsa, groups = model.nsa, model.num_kv_heads
    if nsa.gate == "none":
        return torch.ones(*q.shape[:3], len(BRANCHES), dtype=q.dtype, device=q.device)
    if nsa.gate == "sigmoid":
        logits = linear(x, w["gate.proj.weight"]) + w["gate.proj.bias"]
        p: Tensor = torch.sigmoid(logits).unflatten(-1, (model.num_heads, len(BRANCHES)))
        return p

    mean = q.unflatten(2, (groups, -1)).mean(3)
    # a matrix for each kv head; broadcasting would copy them for each token
    hidden = silu(torch.einsum("btgi,gij->btgj", mean, w["gate.up"]))
    logits = torch.einsum("btgj,gjn->btgn", hidden, w["gate.down"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / nsa.gate_temperature
    off = torch.tensor([branch not in nsa.branches for branch in BRANCHES], device=x.device)
    p = logits.masked_fill(off, -torch.inf).softmax(-1).to(q.dtype)
    heads = model.num_heads // groups
    return p[:, :, :, None].expand(-1, -1, -1, heads, -1).flatten(2, 3)


def compressed(k: Tensor, v: Tensor, nsa: NSAConfig, phi: Weights) -> tuple[Tensor, Tensor]:
    """K and V [B, T, G, D] as [B, C, G, D], one a whole block of l tokens every d.

    K comes rotated already, or is rotated here, block i at position i * d.
    """
    k_cmp, v_cmp = (_phi(x, nsa, which, phi) for x, which in ((k, "phi_k"), (v, "phi_v")))
    if not nsa.rotates_before_compression:
        begin = torch.arange(k_cmp.shape[1], device=k.device) * nsa.cmp_stride
        k_cmp = rope(k_cmp, begin, nsa)
    return k_cmp, v_cmp


def _phi(x: Tensor, nsa: NSAConfig, which: str, phi: Weights) -> Tensor:
    if x.shape[1] < nsa.cmp_block:
        return x[:, :0]
    block = x.unfold(1, nsa.cmp_block, nsa.cmp_stride)  # [B, C, G, D, l]
    wide = torch.promote_types(x.dtype, torch.float32)
    if nsa.phi == "mean":
        return block.mean(-1, dtype=wide).to(x.dtype)
    tokens = block.transpose(3, 4)  # [B, C, G, l, D]
    if nsa.phi == "linear":
        return linear(tokens.flatten(3), phi[f"{which}.weight"])
    placed = (tokens.to(wide) + phi[f"{which}.position"].to(wide)).flatten(3)
    hidden = silu(linear(placed, phi[f"{which}.up"].to(wide)))
    return linear(hidden.to(x.dtype), phi[f"{which}.down"])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Softmax attention of q [B, T, HQ, D] over the kept keys of k [B, S, G, D]; ``keep`` boolean
    [B or 1, G or 1, T, S]. A row that keeps none is 0. Softmax in fp32 or wider.
    """
    grouped = q.unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("btghd,bsgd->bghts", grouped, k) * q.shape[-1] ** -0.5
    wide = logits.to(torch.promote_types(q.dtype, torch.float32))
    hidden = ~keep[:, :, None]
    p = wide.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("bghts,bsgd->btghd", p.to(q.dtype), v).flatten(2, 3)
