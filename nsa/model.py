"""TinyLM and its dense twin: pre-norm decoder, RMSNorm, ungated SiLU MLP, untied head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.config import ModelConfig
from nsa.dense import DenseAttention


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.dim)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(model.dim)
        hidden = model.mlp_ratio * model.dim
        self.mlp = nn.Sequential(nn.Linear(model.dim, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, model.dim, bias=False))

    def forward(self, x_BTM: Tensor) -> Tensor:
        x_BTM = x_BTM + self.attention(self.attention_norm(x_BTM))
        return x_BTM + self.mlp(self.mlp_norm(x_BTM))


class _Decoder(nn.Module):
    def __init__(self, model: ModelConfig, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = model
        self.embedding = nn.Embedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(Block(model, attention()) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.dim)
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """ids int64 [B, T] -> logits [B, T, vocab_size]."""
        x = self.embedding(ids_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TinyLM(_Decoder):
    """Language model with NSA in every layer; ``path`` and ``fa2`` as in NSAAttention."""

    def __init__(self, model: ModelConfig, path: str = "auto", fa2: str = "auto") -> None:
        super().__init__(
            model,
            lambda: NSAAttention(
                model.dim, model.num_heads, model.num_kv_heads, model.head_dim, model.v_head_dim, model.nsa, path=path, fa2=fa2
            ),
        )


class DenseLM(_Decoder):
    """The same model with full causal attention; ``kind`` as in nsa.routing.DENSE_KINDS."""

    def __init__(self, model: ModelConfig, kind: str = "dense") -> None:
        super().__init__(model, lambda: DenseAttention(model, kind))
