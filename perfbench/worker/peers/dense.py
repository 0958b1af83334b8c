"""Adapters of dense kernels from PyPI: full causal attention of q [B, T, HQ, D] over k, v [B, T, G,
D], grouped heads as nsa has them. Their packages are imported when they are first called.
"""

from __future__ import annotations

import importlib

from torch import Tensor


def fa4(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """FlashAttention-4 (`flash-attn-4`), whose kernels are compiled at the first call of a shape;
    its backward adds up dQ in no fixed order.
    """
    # by name: the import contracts keep flash_attn to nsa.ops.flash
    module = importlib.import_module("flash_attn.cute")
    given = module.flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    o: Tensor = given[0] if isinstance(given, tuple) else given
    return o


def fa3(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """FlashAttention-3's forward (`fa3-fwd`), which is built without a backward, without fp16 and
    without windows.
    """
    module = importlib.import_module("fa3_fwd_interface")
    o: Tensor = module.flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    return o
