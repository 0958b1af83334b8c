"""PyTorch's scaled_dot_product_attention in the project's layout; the only file that may pass
`is_causal`.

B batch, T query tokens, S key tokens, G kv heads, H query heads per kv head, D head dim.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.ops.exporting import is_exporting
from nsa.ops.positions import query_positions

MASK_ALIGNMENT = 16
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def grouped(
    q_BTQD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor, *, scale: float
) -> Tensor:
    """Attention under a boolean mask [B or 1, G or 1, T, S]; every row must allow a key.

    Returns [B, T, HQ, DV].

    A group's heads share the mask as an expanded view. `enable_gqa` with a mask falls to the
    unfused kernel on CUDA, and the memory-efficient one returns wrong numbers for expanded K and V
    of some lengths (PyTorch issue 191937), so those are copied per head there: O(S), where
    the mask is O(T S) already.
    """
    if is_exporting() and k_BSGD.shape[2] > 1:
        # a head at a time: of a batch of unknown size, no two dimensions may be made one
        G, H = k_BSGD.shape[2], q_BTQD.shape[2] // k_BSGD.shape[2]
        masks = [mask] * G if mask.shape[1] == 1 else mask.split(1, 1)
        parts = zip(q_BTQD.split(H, 2), k_BSGD.split(1, 2), v_BSGD.split(1, 2), masks, strict=True)
        return torch.cat([grouped(q, k, v, m, scale=scale) for q, k, v, m in parts], 2)
    # every size by name: of a -1, torch.export would have to prove that it divides
    B, T, num_heads, D = q_BTQD.shape
    S, G, DV = v_BSGD.shape[1:]
    H = num_heads // G
    q = q_BTQD.unflatten(2, (G, H)).permute(0, 2, 3, 1, 4).reshape(B * G, H, T, D)
    k, v = (
        x.transpose(1, 2).reshape(B * G, 1, S, x.shape[3]).expand(-1, H, -1, -1)
        for x in (k_BSGD, v_BSGD)
    )
    if q.is_cuda:
        # Its kernels want masks aligned to 16 bytes; PyTorch would pad every head's expanded mask
        # by itself.
        pad = -S % MASK_ALIGNMENT
        k, v, mask = (
            F.pad(k, (0, 0, 0, pad)).contiguous(),
            F.pad(v, (0, 0, 0, pad)).contiguous(),
            F.pad(mask, (0, pad)),
        )
        S += pad
    if mask.shape[0] != 1 or mask.shape[1] != 1:
        mask = mask.expand(B, G, T, S).reshape(B * G, 1, T, S)
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=_additive(mask, q).expand(B * G, H, T, S), scale=scale
    )
    return o.unflatten(0, (B, G)).permute(0, 3, 1, 2, 4).reshape(B, T, num_heads, DV)


def cached(
    q_BTQD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    q_start: int | Tensor,
    scale: float,
    kernel: str,
) -> Tensor:
    """Causal attention of T queries, the first at ``q_start`` (an int, or int64 [B]), over the keys
    of a cache; keys beyond the last query are not read, or masked. ``kernel`` sdpa lets PyTorch
    choose, flash demands FA-2. Returns [B, T, HQ, DV].

    SDPA's kernels under a mask split no keys: a program walks all keys of a kv head. The mask of
    several queries is [B or 1, T, S], in bool and in the dtype of q; of a batch and several kv
    heads a copy for each of both.
    """
    (B, T, num_heads, _), (S, G) = q_BTQD.shape, k_BSGD.shape[1:3]
    if scale <= 0:  # as in `causal`
        q_BTQD, scale = q_BTQD * scale, 1.0
    if kernel == "flash":
        q, k, v = (x.transpose(1, 2) for x in (q_BTQD, k_BSGD, v_BSGD))
        return _causal_of_last(q, k, v, scale=scale, kernel=kernel).transpose(1, 2)
    if T > 1:
        if isinstance(q_start, int) and q_start == 0:
            return causal(q_BTQD, k_BSGD, v_BSGD, scale=scale, kernel=kernel)
        key = torch.arange(S, device=q_BTQD.device)
        keep = key <= query_positions(q_start, T, q_BTQD.device)[..., None]
        return grouped(q_BTQD, k_BSGD, v_BSGD, keep[:, None], scale=scale)
    # One token: the group's heads are rows of one tile, so that K and V are read once.
    q_BGHD = q_BTQD.reshape(B, G, num_heads // G, -1)
    mask = None
    if isinstance(q_start, Tensor):
        keep_BS = torch.arange(S, device=q_BTQD.device) <= q_start[:, None]
        mask = _additive(keep_BS, q_BTQD)[:, None, None].expand(-1, G, num_heads // G, -1)
    o_BGHD = F.scaled_dot_product_attention(
        q_BGHD, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return o_BGHD.reshape(B, T, num_heads, -1)


def rows(
    q_RHD: Tensor, k_RLD: Tensor, v_RLD: Tensor, mask_RL: Tensor | None, *, scale: float
) -> Tensor:
    """One query position a row: its H heads over the row's own L keys. Returns [R, H, DV]."""
    mask = None if mask_RL is None else mask_RL[:, None, None]
    return F.scaled_dot_product_attention(
        q_RHD[:, None], k_RLD[:, None], v_RLD[:, None], attn_mask=mask, scale=scale
    )[:, 0]


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    # SDPA turns a boolean mask into this itself, but after expanding it: H copies, 1.6 GB a layer
    # at 1 x 8,192.
    return mask.new_zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def causal(q_BTQD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *, scale: float, kernel: str) -> Tensor:
    """Full causal attention of T queries, the last of S keys; ``kernel`` sdpa lets PyTorch choose,
    flash and cudnn demand. cudnn takes T = S alone.
    """
    # the fused kernels scale the masked scores, too: -inf times 0 or less is no mask
    if scale <= 0:
        q_BTQD, scale = q_BTQD * scale, 1.0
    q, k, v = (x.transpose(1, 2) for x in (q_BTQD, k_BSGD, v_BSGD))
    if q.shape[2] != k.shape[2]:
        return _causal_of_last(q, k, v, scale=scale, kernel=kernel).transpose(1, 2)
    chosen = sdpa_kernel(_BACKENDS[kernel]) if kernel in _BACKENDS else nullcontext()
    with chosen:  # T == S, so top-left and bottom-right alignment are one
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o.transpose(1, 2)


def _causal_of_last(
    q_BQTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, scale: float, kernel: str
) -> Tensor:
    if kernel == "flash":  # the operator under SDPA, whose own is_causal is aligned top-left
        o, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BQTD, k_BGSD, v_BGSD, 0.0, True, False, scale=scale
        )
        return o
    assert kernel == "sdpa", f"{kernel} is aligned top-left"
    from torch.nn.attention.bias import causal_lower_right  # seconds of imports

    bias = causal_lower_right(q_BQTD.shape[2], k_BGSD.shape[2])  # no mask where FA-2 serves it
    is_grouped = q_BQTD.shape[1] != k_BGSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BQTD, k_BGSD, v_BGSD, attn_mask=bias, scale=scale, enable_gqa=is_grouped
    )
