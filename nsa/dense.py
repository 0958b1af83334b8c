"""The dense twin of NSAAttention: the same dims, one K and V, full causal attention.

The baseline that NSA is compared with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks, dispatch
from nsa.config import ModelConfig, NSAConfig
from nsa.decode import KV, DenseCache, DenseStep, check_dense_cache
from nsa.functional import capability_of
from nsa.ops.precision import autocast_dtype
from nsa.rope import rotate
from nsa.routing import Problem, Route, extras_of, route_dense, route_dense_cached
from nsa.shared_positions import Layout


def attend_cached(
    route: Route, q: Tensor, kv: KV, cache: DenseCache, step: DenseStep | None, *, scale: float
) -> Tensor:
    """Append k [B, T, G, D] and v [B, T, G, DV] to ``cache``, and attend to all that it then holds:
    q [B, T, HQ, D] -> o [B, T, HQ, DV]. ``step`` as in `DenseCache.append`.
    """
    if route.branch("dense").kernel != "fa3":
        view = cache.append(kv, step=step)
        return dispatch.dense_cached(route, q, view.kv, q_start=view.q_start, scale=scale)
    view = cache.append(kv, step=step, stored=False)
    buffers = cache.kv[0], cache.kv[1]
    return dispatch.dense_cached(route, q, buffers, q_start=view.store_at, scale=scale, new=kv)


class DenseAttention(nn.Module):
    """Causal grouped-query attention with RoPE: x [B, T, M] -> y [B, T, M]. ``kind`` as in
    nsa.routing.DENSE_KINDS, with a cache CACHED_DENSE_KINDS. RoPE and qk_norm are those of
    ``config``, by default the model's; RouteError in the forward where it has softcap or sinks.
    """

    def __init__(
        self, model: ModelConfig, kind: str = "dense", *, config: NSAConfig | None = None
    ) -> None:
        super().__init__()
        self.model, self.kind, self.config = model, kind, config or model.nsa
        self.q_proj = nn.Linear(model.dim, model.num_heads * model.head_dim, bias=False)
        self.k_proj = nn.Linear(model.dim, model.num_kv_heads * model.head_dim, bias=False)
        self.v_proj = nn.Linear(model.dim, model.num_kv_heads * model.value_dim, bias=False)
        self.o_proj = nn.Linear(model.num_heads * model.value_dim, model.dim, bias=False)
        if self.config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(model.head_dim), nn.RMSNorm(model.head_dim)

    def forward(
        self, x_BTM: Tensor, *, cache: DenseCache | None = None, layout: Layout | None = None
    ) -> Tensor:
        """With a ``cache`` the chunk continues each row's sequence, without gradients; decode is a
        chunk of 1. ``layout`` is the Layout of the same arguments, where layers share one.
        ValueError for a cache of another kind, batch, dtype or device, or one given while gradients
        are recorded.
        """
        model = self.model
        if cache is not None:
            check_dense_cache(cache)
        q, k = (p(x_BTM).unflatten(-1, (-1, model.head_dim)) for p in (self.q_proj, self.k_proj))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, model.value_dim))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if layout is None:
            layout = self.layout(x_BTM, dtype=x_BTM.dtype, cache=cache)
        q, k = (rotate(t, layout.turns, kind=self.config.rope) for t in (q, k))
        scale = model.head_dim**-0.5
        if cache is None:
            route = route_dense(self.kind, self._problem(q), capability_of(str(q.device)))
            return self.o_proj(dispatch.dense(route, q, k, v, scale=scale).flatten(2))
        checks.no_gradient(q, k, v)
        step = layout.step if isinstance(layout.step, DenseStep) else None
        route = self._route_cached(q, cache)
        return self.o_proj(attend_cached(route, q, (k, v), cache, step, scale=scale).flatten(2))

    def layout(self, x: Tensor, **options: Any) -> Layout:
        """The Layout of x [B, T, ...], for this layer and others of its config and head dim;
        ``options`` as in `Layout.of`.
        """
        return Layout.of(x, self.config, self.model.head_dim, **options)

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        initial_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> DenseCache:
        """An empty DenseCache of this layer's heads, dtype (autocast's where it is on; or
        ``dtype``) and device.
        """
        weight = checks.plain_weight(self.k_proj)
        own_dtype, device = (
            checks.compute_kind(self) if weight is None else (weight.dtype, weight.device)
        )
        return DenseCache.empty(
            batch,
            max_len,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            v_head_dim=self.model.value_dim,
            initial_len=initial_len,
            dtype=dtype or autocast_dtype(device) or own_dtype,
            device=device,
        )

    def _problem(self, q: Tensor) -> Problem:
        problem = Problem.of(
            self.model,
            batch=q.shape[0],
            tokens=q.shape[1],
            dtype=str(q.dtype).removeprefix("torch."),
        )
        return replace(problem, extras=extras_of(self.config))

    def _route_cached(self, q: Tensor, cache: DenseCache) -> Route:
        problem = replace(self._problem(q), ragged=cache.steps is not None, whole=False)
        return route_dense_cached(self.kind, problem, capability_of(str(q.device)))
