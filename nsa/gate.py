"""Branch gates.

``sigmoid`` is the paper's (one gate a head, from the layer input), ``softmax`` that of the first
implementation, ``none`` a plain sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa.config import BRANCHES


class SigmoidGate(nn.Module):
    """Independent gates [B, T, HQ, 3] in (0, 1) from x [B, T, M]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_heads * len(BRANCHES))

    def forward(self, x_BTM: Tensor, q_BTQD: Tensor) -> Tensor:
        return self.proj(x_BTM).unflatten(-1, (q_BTQD.shape[2], len(BRANCHES))).sigmoid()


class NoGate(nn.Module):
    """Gates of 1 [B, T, HQ, 3]: the branches are added up."""

    def forward(self, x_BTM: Tensor, q_BTQD: Tensor) -> Tensor:
        return q_BTQD.new_ones(()).expand(*q_BTQD.shape[:3], len(BRANCHES))


class SoftmaxGate(nn.Module):
    """One MLP per kv group on the group's mean query (before RoPE); softmax(logits / temperature)
    over the active branches.
    """

    off_N: Tensor

    def __init__(
        self, num_kv_heads: int, head_dim: int, *, temperature: float, branches: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.branches, self.all_on = branches, len(branches) == len(BRANCHES)
        self.register_buffer("off_N", torch.zeros(len(BRANCHES), dtype=torch.bool), False)
        self.up = nn.Parameter(torch.empty(num_kv_heads, head_dim, head_dim))
        self.down = nn.Parameter(torch.empty(num_kv_heads, head_dim, len(BRANCHES)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within head_dim ** -0.5, up first; and which branches are off, which no
        checkpoint stores.
        """
        bound = self.up.shape[1] ** -0.5
        nn.init.uniform_(self.up, -bound, bound)
        nn.init.uniform_(self.down, -bound, bound)
        for i, branch in enumerate(BRANCHES):
            self.off_N[i] = branch not in self.branches

    def forward(self, x_BTM: Tensor, q_BTQD: Tensor) -> Tensor:
        G = self.up.shape[0]
        mean_BTGD = q_BTQD.unflatten(2, (G, -1)).mean(3)
        hidden = nn.functional.silu(torch.einsum("btgd,gdh->btgh", mean_BTGD, self.up))
        logits = torch.einsum("btgh,ghn->btgn", hidden, self.down)
        if self.temperature != 1:
            logits = logits.float() / self.temperature
        if not self.all_on:
            logits = logits.masked_fill(self.off_N, -torch.inf)
        gates = logits.softmax(-1, dtype=torch.float32)[:, :, :, None]
        # expanded before it is cast, so that one copy does both
        return gates.expand(-1, -1, -1, q_BTQD.shape[2] // G, -1).to(q_BTQD.dtype).flatten(2, 3)
