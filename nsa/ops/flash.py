"""FA-2: the flash_attn package where it is installed, else PyTorch's own build of it.

The only importer of either.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import Tensor


def varlen(
    provider: str,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attention of packed sequences, [N, HQ, D] over [M, HKV, D], cu_* int32 [sequences + 1];
    returns [N, HQ, D].

    ``window`` counts (left, right) neighbours, -1 without limit, aligned bottom-right: (w - 1, 0)
    attends exactly w keys.
    """
    if scale <= 0:  # as in nsa.ops.sdpa.causal
        q_NHD, scale = q_NHD * scale, 1.0
    if provider.startswith("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q_NHD, k_NGD, v_NGD, cu_q, cu_k, max_q, max_k, softmax_scale=scale, window_size=window
        )
    from torch.nn.attention.varlen import varlen_attn

    keywords = _torch_gqa_keywords() if q_NHD.shape[1] != k_NGD.shape[1] else {}
    o = varlen_attn(
        q_NHD, k_NGD, v_NGD, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window, **keywords
    )
    assert isinstance(o, Tensor)  # a tuple only where the lse is asked for
    return o


@lru_cache(maxsize=1)
def _torch_gqa_keywords() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer kv heads as they are, 2.13 only with enable_gqa
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
