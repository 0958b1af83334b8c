"""NSA as a layer: the paper from top to bottom, without a branch on implementation.

B batch, T tokens, M model dim, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks
from nsa.cache import NSACache
from nsa.config import BRANCHES, NSAConfig, check_heads
from nsa.functional import attend_view, compress_kv, nsa_attention
from nsa.gate import SigmoidGate, SoftmaxGate
from nsa.ops.positions import query_positions, to_device
from nsa.packing import Packing
from nsa.phi import Phi
from nsa.rope import angles, rotate
from nsa.routing import Request


class NSAAttention(nn.Module):
    """Native sparse attention (arXiv 2502.11089): x [B, T, M] -> y [B, T, M], causal; training, prefill and decode.

    One query projection; K and V projected for each branch of its own, unless config.share_kv. ``path`` and ``fa2`` are
    requests as in ``nsa.routing``; ``auto`` takes the fastest that the device supports. Raises ValueError for heads that
    do not form whole groups, RouteError for a request that nothing serves.
    """

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None,
        config: NSAConfig = NSAConfig(), path: str = "auto", fa2: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim)
        Request(path, fa2)  # an unknown name fails here, not in the first forward
        self.config, self.path, self.fa2 = config, path, fa2
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim = num_heads, num_kv_heads, head_dim, v_head_dim
        self.num_kv = 1 if config.share_kv else len(BRANCHES)
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.num_kv * num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.num_kv * num_kv_heads * v_head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, dim, bias=False)
        self.phi_k, self.phi_v = Phi(config, head_dim), Phi(config, v_head_dim)
        if config.gate == "sigmoid":
            self.gate: nn.Module = SigmoidGate(dim, num_heads)
        else:
            self.gate = SoftmaxGate(num_kv_heads, head_dim, temperature=config.gate_temperature, branches=config.branches)

    def forward(
        self, x_BTM: Tensor, *, cache: NSACache | None = None, cu_seqlens: Tensor | None = None, num_tokens: Sequence[int] | None = None
    ) -> Tensor:
        """x [B, T, M] -> y [B, T, M]. At most one of ``cache`` and ``cu_seqlens``.

        With a ``cache`` the chunk goes on where it stands (decode is a chunk of 1), row b with its first ``num_tokens[b]``
        tokens only; the others' y is 0. ``cu_seqlens`` int [N + 1] packs N documents into B = 1; y beyond the last is 0.
        """
        absent = self._absent_rows(x_BTM, cache, cu_seqlens, num_tokens)
        if absent is not None:  # whatever lies there, NaN included, touches no weight's gradient
            x_BTM = x_BTM.masked_fill(absent, 0)
        q = self.q_proj(x_BTM).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x_BTM).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, self.v_head_dim))
        gates = self.gate(x_BTM, q)

        position = self._positions(x_BTM, cache, cu_seqlens)
        theta = angles(position, self.head_dim, base=self.config.rope_base, scale=self.config.rope_scale)
        q, k_rotated = rotate(q, theta, kind=self.config.rope), rotate(k, theta, kind=self.config.rope)
        k_cmp = k_rotated if self.config.rotates_before_compression else k

        kv_cmp, kv_sel, kv_win = zip(self._per_branch(k_cmp, k_rotated), self._per_branch(v, v), strict=True)
        phi_params = (self.phi_k.params(), self.phi_v.params())
        asked: dict[str, Any] = {"config": self.config, "path": self.path, "fa2": self.fa2}
        if cache is None:
            o = nsa_attention(q, kv_cmp, kv_sel, kv_win, gates, phi_params=phi_params, cu_seqlens=cu_seqlens, **asked)
        else:
            checks.no_gradient(q)
            compress = partial(compress_kv, config=self.config, phi_params=phi_params)
            view = cache.append(kv_cmp, kv_sel, kv_win, compress=compress, num_tokens=num_tokens)
            present = None if absent is None else ~absent[..., 0]
            o = attend_view(q, gates, view, present=present, keys_read=cache.keys_read, **asked)
        y = self.o_proj(o.flatten(2))
        return y if absent is None else y.masked_fill(absent, 0)

    def new_cache(self, batch: int, max_len: int, *, initial_len: int | None = None, dtype: torch.dtype | None = None) -> NSACache:
        """An empty NSACache of this layer's heads, dtype (or ``dtype``, under autocast) and device."""
        weight = self.k_proj.weight
        return NSACache.empty(
            self.config, batch, max_len, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.v_head_dim,
            initial_len=initial_len, dtype=dtype or weight.dtype, device=weight.device,
        )  # fmt: skip

    def _absent_rows(
        self, x_BTM: Tensor, cache: NSACache | None, cu_seqlens: Tensor | None, num_tokens: Sequence[int] | None
    ) -> Tensor | None:
        """Boolean [B or 1, T, 1] of rows that hold no token, None where every row does."""
        if cache is not None and cu_seqlens is not None:
            raise ValueError("got a cache and cu_seqlens; wanted at most one; fill a cache with rows of num_tokens, or pack without one")
        if num_tokens is not None and cache is None:
            raise ValueError("got num_tokens without a cache; wanted both; pack rows of different lengths with cu_seqlens instead")
        token = torch.arange(x_BTM.shape[1], device=x_BTM.device)
        if cu_seqlens is not None:
            checks.packed(cu_seqlens, x_BTM, x_BTM, 0, read=False)
            return (token >= cu_seqlens[-1])[None, :, None]
        if cache is None or num_tokens is None:
            return None
        return (token >= to_device(num_tokens, token.device)[:, None])[..., None]

    def _positions(self, x_BTM: Tensor, cache: NSACache | None, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is not None:
            return Packing.of(cu_seqlens, x_BTM.shape[1], self.config.sel_block).position_T[None]
        return query_positions(0 if cache is None else cache.q_start(x_BTM.device), x_BTM.shape[1], x_BTM.device)

    def _per_branch(self, cmp_BTND: Tensor, rest_BTND: Tensor) -> list[Tensor]:
        """Slices [B, T, G, D] for cmp, sel and win; the same one thrice where K and V are shared."""
        if self.num_kv == 1:
            return [cmp_BTND, rest_BTND, rest_BTND]
        # split, not slices: its backward is one concatenation instead of three zero-filled copies
        _, sel, win = rest_BTND.split(self.num_kv_heads, dim=2)
        return [cmp_BTND.split(self.num_kv_heads, dim=2)[0], sel, win]
