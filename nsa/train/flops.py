"""Work of a training step in closed form, and which share of a GPU's peak it took.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from nsa.blocks import BlockGrid
from nsa.config import ModelConfig, NSAConfig

# Dense bf16 products with fp32 sums, by the name that NVML and torch report. Sources: NVIDIA's
# datasheets and architecture white papers.
PEAK_BF16_FLOP_PER_S: Mapping[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
}
_PASSES = 3  # a forward, and in the backward two products for each of its own


def step_flops(model: ModelConfig, *, batch: int, tokens: int, attention: str) -> float:
    """FLOPs of the products of matrices of one training step, a multiply-add counted as two:
    ``batch`` sequences of ``tokens`` tokens, ``attention`` nsa or dense.

    A checkpointed layer's second forward is not counted: it is no work that training asks for.
    """
    return batch * documents_flops(model, [tokens], attention=attention)


def documents_flops(model: ModelConfig, lengths: Iterable[int], *, attention: str) -> float:
    """As `step_flops`, of one row that holds documents of ``lengths`` tokens, none of which sees
    another.
    """
    dense = attention == "dense"
    layers = [model.config_of(layer) for layer in range(model.num_layers)]
    per_token = model.dim * model.vocab_size
    per_token += sum(_layer_weights(model, config, dense=dense) for config in layers)
    per_pair = model.num_heads * (model.head_dim + model.value_dim)
    work = 0
    for length in lengths:
        pairs = sum(_pairs(config, length, dense) for config in layers)
        work += per_token * length + per_pair * pairs
    return float(_PASSES * 2 * work)


def mfu_pct(flops: float, seconds: float, peak: float | None) -> float | None:
    """Percent of ``peak`` FLOP/s that ``flops`` in ``seconds`` are; None where the peak of the card
    is not known.
    """
    return None if peak is None else 100.0 * flops / seconds / peak


def peak_of(device_name: str) -> float | None:
    """Peak of a card by its name; None for one that is not listed, never another card's."""
    return PEAK_BF16_FLOP_PER_S.get(device_name)


def _layer_weights(model: ModelConfig, config: NSAConfig, *, dense: bool) -> int:
    """Weights of one layer that each token is multiplied with."""
    copies = 1 if dense or config.share_kv else 3
    per_head = model.head_dim + model.value_dim
    attention = model.dim * per_head * (model.num_heads + copies * model.num_kv_heads)
    gate = 0
    if not dense and config.gate == "sigmoid":
        gate = model.dim * model.num_heads * 3
    elif not dense and config.gate == "softmax":
        gate = model.num_kv_heads * model.head_dim * (model.head_dim + 3)
    return attention + gate + 2 * model.mlp_ratio * model.dim**2


@lru_cache(maxsize=65_536)
def _pairs(config: NSAConfig, tokens: int, dense: bool) -> int:
    """(query, key) pairs of a query head and sequence, over the branches that are computed."""
    if dense:
        return tokens * (tokens + 1) // 2
    grid = replace(BlockGrid.of(config), num_selected=config.num_selected_for(tokens))
    pairs = grid.pairs(tokens)
    return sum(pairs[branch] for branch in config.branches)
