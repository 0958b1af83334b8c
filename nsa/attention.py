"""NSA as a layer: the paper from top to bottom, without a branch on implementation.

B batch, T tokens, M model dim, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from nsa.config import BRANCHES, NSAConfig, check_heads
from nsa.functional import nsa_attention
from nsa.gate import SigmoidGate, SoftmaxGate
from nsa.ops.positions import query_positions
from nsa.rope import angles, rotate
from nsa.routing import Request


class NSAAttention(nn.Module):
    """Native sparse attention (arXiv 2502.11089): x [B, T, M] -> y [B, T, M], causal, training and prefill.

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
        if config.gate == "sigmoid":
            self.gate: nn.Module = SigmoidGate(dim, num_heads)
        else:
            self.gate = SoftmaxGate(num_kv_heads, head_dim, temperature=config.gate_temperature, branches=config.branches)

    def forward(self, x_BTM: Tensor) -> Tensor:
        q = self.q_proj(x_BTM).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x_BTM).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x_BTM).unflatten(-1, (-1, self.v_head_dim))
        gates = self.gate(x_BTM, q)

        position = query_positions(0, x_BTM.shape[1], x_BTM.device)
        theta = angles(position, self.head_dim, base=self.config.rope_base, scale=self.config.rope_scale)
        q, k_rotated = rotate(q, theta, kind=self.config.rope), rotate(k, theta, kind=self.config.rope)
        k_cmp = k_rotated if self.config.rotates_before_compression else k

        kv_cmp, kv_sel, kv_win = zip(self._per_branch(k_cmp, k_rotated), self._per_branch(v, v), strict=True)
        o = nsa_attention(q, kv_cmp, kv_sel, kv_win, gates, config=self.config, path=self.path, fa2=self.fa2)
        return self.o_proj(o.flatten(2))

    def _per_branch(self, cmp_BTND: Tensor, rest_BTND: Tensor) -> list[Tensor]:
        """Slices [B, T, G, D] for cmp, sel and win; the same one thrice where K and V are shared."""
        if self.num_kv == 1:
            return [cmp_BTND, rest_BTND, rest_BTND]
        # split, not slices: its backward is one concatenation instead of three zero-filled copies
        _, sel, win = rest_BTND.split(self.num_kv_heads, dim=2)
        return [cmp_BTND.split(self.num_kv_heads, dim=2)[0], sel, win]
