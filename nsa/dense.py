"""The dense twin of NSAAttention: the same dims, one K and V, full causal attention.

The baseline that NSA is compared with.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from nsa import dispatch
from nsa.config import ModelConfig, NSAConfig
from nsa.functional import capability_of
from nsa.rope import rotate
from nsa.routing import Problem, extras_of, route_dense
from nsa.shared_positions import Layout


class DenseAttention(nn.Module):
    """Causal grouped-query attention with RoPE: x [B, T, M] -> y [B, T, M]. ``kind`` as in
    nsa.routing.DENSE_KINDS. RoPE and qk_norm are those of ``config``, by default the model's;
    RouteError in the forward where it has softcap or sinks.
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

    def forward(self, x_BTM: Tensor, *, layout: Layout | None = None) -> Tensor:
        """``layout`` is the Layout of x, where layers share one."""
        model, (B, T, _) = self.model, x_BTM.shape
        q, k = (p(x_BTM).unflatten(-1, (-1, model.head_dim)) for p in (self.q_proj, self.k_proj))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, model.value_dim))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if layout is None:
            layout = Layout.of(x_BTM, self.config, model.head_dim, dtype=x_BTM.dtype)
        q, k = (rotate(t, layout.turns, kind=self.config.rope) for t in (q, k))
        problem = replace(
            Problem.of(model, batch=B, tokens=T, dtype=str(q.dtype).removeprefix("torch.")),
            extras=extras_of(self.config),
        )
        route = route_dense(self.kind, problem, capability_of(str(x_BTM.device)))
        return self.o_proj(dispatch.dense(route, q, k, v, scale=model.head_dim**-0.5).flatten(2))
