"""The dense twin of NSAAttention: the same dims, one K and V, full causal attention.

The baseline that NSA is compared with.
"""

from __future__ import annotations

from torch import Tensor, nn

from nsa import dispatch
from nsa.config import ModelConfig
from nsa.functional import capability_of
from nsa.rope import rotate
from nsa.routing import Problem, route_dense
from nsa.shared_positions import Layout


class DenseAttention(nn.Module):
    """Causal grouped-query attention with RoPE: x [B, T, M] -> y [B, T, M]. ``kind`` as in
    nsa.routing.DENSE_KINDS.
    """

    def __init__(self, model: ModelConfig, kind: str = "dense") -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self.q_proj = nn.Linear(model.dim, model.num_heads * model.head_dim, bias=False)
        self.k_proj = nn.Linear(model.dim, model.num_kv_heads * model.head_dim, bias=False)
        self.v_proj = nn.Linear(model.dim, model.num_kv_heads * model.value_dim, bias=False)
        self.o_proj = nn.Linear(model.num_heads * model.value_dim, model.dim, bias=False)

    def forward(self, x_BTM: Tensor, *, layout: Layout | None = None) -> Tensor:
        """``layout`` is the Layout of x, where layers share one."""
        model, (B, T, _) = self.model, x_BTM.shape
        q, k = (p(x_BTM).unflatten(-1, (-1, model.head_dim)) for p in (self.q_proj, self.k_proj))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, model.value_dim))
        if layout is None:
            layout = Layout.of(x_BTM, model.nsa, model.head_dim, dtype=x_BTM.dtype)
        q, k = (rotate(t, layout.turns, kind=model.nsa.rope) for t in (q, k))
        problem = Problem.of(model, batch=B, tokens=T, dtype=str(q.dtype).removeprefix("torch."))
        route = route_dense(self.kind, problem, capability_of(str(x_BTM.device)))
        return self.o_proj(dispatch.dense(route, q, k, v, scale=model.head_dim**-0.5).flatten(2))
