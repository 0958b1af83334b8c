"""The checks of `nsa.nsa_attention`, done once for calls that are alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from nsa import checks
from nsa.config import BRANCHES, NSAConfig
from nsa.remembered import ByShape

KV = tuple[Tensor, Tensor]
_CHECKED: ByShape[bool] = ByShape()  # calls that no check refused


def is_whole_sequence(
    q: Tensor,
    pairs: tuple[KV, KV, KV],
    gates: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor,
    scale: float | None,
    is_packed: bool,
    sinks: Tensor | None,
) -> bool:
    """Whether a call of `nsa_attention` is of whole sequences; ValueError for one that does not
    fit. What follows from shapes, dtypes, devices and numbers alone is checked once.
    """
    key: tuple[object, ...] | None = None
    # a tensor's contents may be checked; and what is no plain tensor may have no shape to compare
    if (
        type(q_start) is int
        and sinks is None
        and (scale is None or type(scale) is float)
        and not torch.compiler.is_compiling()
        and all(type(kv) is tuple and len(kv) == 2 for kv in pairs)
    ):
        tensors = (q, *pairs[0], *pairs[1], *pairs[2], gates)
        if all(type(x) in (Tensor, Parameter) for x in tensors):
            key = (q_start, scale, is_packed, *((x.shape, x.dtype, x.device) for x in tensors))
            if _CHECKED.get(key, config):
                return q_start == 0 and not is_packed
    checks.config(config)
    checks.scale(scale)
    for name, kv in zip(("kv_cmp", "kv_sel", "kv_win"), pairs, strict=True):
        checks.pair(name, kv)
        checks.qkv(q, *kv, q_start=q_start)
    checks.same_kv(dict(zip(BRANCHES, pairs, strict=True)))
    checks.gates(gates, q, BRANCHES)
    checks.sinks(sinks, q, config, BRANCHES)
    # the keys are cut at the last query
    whole = not is_packed and not isinstance(q_start, Tensor) and q_start == 0
    checks.fixed_selection(
        config,
        whole=whole,
        what="a packed batch or a chunk of a sequence (cu_seqlens, q_start)",
    )
    if key is not None:
        _CHECKED.put(True, key, config)
    return whole
