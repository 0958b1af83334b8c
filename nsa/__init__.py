"""Native Sparse Attention (arXiv 2502.11089) in PyTorch.

Names load on first use, so that `nsa.config` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.attention import NSAAttention
    from nsa.compression import compress
    from nsa.config import ModelConfig, NSAConfig
    from nsa.decode import ChunkGraph, DecodeGraph, NSACache
    from nsa.functional import (
        compressed_attention,
        nsa_attention,
        select_blocks,
        selected_attention,
        sliding_attention,
    )
    from nsa.model import TinyLM
    from nsa.routing import RouteError

_HOMES = {
    "ChunkGraph": "decode",
    "DecodeGraph": "decode",
    "ModelConfig": "config",
    "NSAAttention": "attention",
    "NSACache": "decode",
    "NSAConfig": "config",
    "RouteError": "routing",
    "TinyLM": "model",
    "compress": "compression",
    "compressed_attention": "functional",
    "nsa_attention": "functional",
    "select_blocks": "functional",
    "selected_attention": "functional",
    "sliding_attention": "functional",
}
__all__ = [
    "ChunkGraph",
    "DecodeGraph",
    "ModelConfig",
    "NSAAttention",
    "NSACache",
    "NSAConfig",
    "RouteError",
    "TinyLM",
    "compress",
    "compressed_attention",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"nsa.{_HOMES[name]}"), name)
