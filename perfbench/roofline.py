"""Closed-form work of one step and the floor that the hardware sets. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nsa.blocks import BlockGrid
from nsa.config import ModelConfig
from perfbench.records import ATTENTION, BACKWARD, SELECTED, Physics

BYTES_OF = {"bf16": 2, "fp16": 2, "fp32": 4}
IMPOSSIBLE_FLOP_FACTOR = 1.05


@dataclass(frozen=True, slots=True)
class Card:
    """Datasheet numbers of a card; an unknown card has none, never another card's.

    FLOP/s are dense, fp32 without TF32.
    """

    bytes_per_s: float
    l2_bytes: int
    half_flops_per_s: float  # bf16 and fp16, fp32 accumulation
    fp32_flops_per_s: float

    def flops_per_s(self, dtype: str) -> float:
        return self.fp32_flops_per_s if dtype == "fp32" else self.half_flops_per_s


# By the marketing name that NVML reports. Sources: NVIDIA's datasheets and architecture white
# papers.
CARDS: Mapping[str, Card] = {
    "NVIDIA A100-SXM4-40GB": Card(1.555e12, 40 << 20, 312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": Card(2.039e12, 40 << 20, 312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": Card(1.935e12, 40 << 20, 312e12, 19.5e12),
    "NVIDIA H100 80GB HBM3": Card(3.35e12, 50 << 20, 989.4e12, 66.9e12),
    "NVIDIA H100 PCIe": Card(2.0e12, 50 << 20, 756e12, 51.2e12),
    "NVIDIA H200": Card(4.8e12, 50 << 20, 989.4e12, 66.9e12),
    "NVIDIA L40S": Card(0.864e12, 96 << 20, 362e12, 91.6e12),
    "NVIDIA GeForce RTX 4090": Card(1.008e12, 72 << 20, 165.2e12, 82.6e12),
}


@lru_cache(maxsize=256)
def attention_pairs(model: ModelConfig, tokens: int, *, dense: bool) -> int:
    """(query, key) pairs per query head of one sequence, over the branches that are computed."""
    pairs = BlockGrid.of(model.nsa).pairs(tokens)
    return pairs["dense"] if dense else sum(pairs[branch] for branch in model.nsa.branches)


def selected_pairs(model: ModelConfig, tokens: int) -> int:
    """(query, key) pairs per query head of one sequence of the selected branch, whichever blocks:
    all kinds fill the same slots.
    """
    return _selected_grid(model, tokens).pairs(tokens)["sel"]


def filled_slots(model: ModelConfig, tokens: int) -> int:
    """Slots of one sequence and kv head that hold a block: min(num_selected, blocks up to the
    query's own) each query.
    """
    grid = _selected_grid(model, tokens)
    full_blocks, rest = divmod(tokens, grid.sel_block)
    return sum(
        grid.sel_block * min(grid.num_selected, j + 1) for j in range(full_blocks)
    ) + rest * min(grid.num_selected, full_blocks + 1)


@lru_cache(maxsize=64)
def _selected_grid(model: ModelConfig, tokens: int) -> BlockGrid:
    """The grid with as many slots as a call of ``tokens`` keys has."""
    return replace(BlockGrid.of(model.nsa), num_selected=model.nsa.num_selected_for(tokens))


def keys_of_query(model: ModelConfig, position: int, *, dense: bool = False) -> dict[str, int]:
    """Keys that the query at ``position`` reads a kv head, for each branch that is computed."""
    if dense:
        return {"dense": position + 1}
    grid = BlockGrid.of(model.nsa)
    keys = {
        "cmp": grid.visible_cmp(position),
        "sel": grid.keys_sel(position),
        "win": grid.keys_win(position),
    }
    return {branch: keys[branch] for branch in model.nsa.branches}


def linear_parameters(model: ModelConfig, *, dense: bool) -> int:
    """Weights that every token is multiplied with: projections, gate, MLP and head; not the
    embedding.
    """
    copies = 1 if dense or model.nsa.share_kv else 3
    per_head = model.head_dim + model.value_dim
    attention = model.dim * (model.num_heads * per_head + copies * model.num_kv_heads * per_head)
    gate = 0
    if not dense and model.nsa.gate == "sigmoid":
        gate = model.dim * model.num_heads * 3
    elif not dense:
        gate = model.num_kv_heads * model.head_dim * (model.head_dim + 3)
    mlp = 2 * model.mlp_ratio * model.dim**2
    return model.num_layers * (attention + gate + mlp) + model.dim * model.vocab_size


def step_flops(model: ModelConfig, *, workload: str, batch: int, tokens: int, dense: bool) -> float:
    """Multiply-adds counted as two.

    A training step is three forwards: one, and two products a weight in the backward.

    A decode step is one token for each sequence whose cache holds ``tokens``.
    """
    per_pair = 2 * model.num_heads * (model.head_dim + model.value_dim) * model.num_layers
    if workload in ATTENTION:
        return float(
            batch
            * per_pair
            / model.num_layers
            * attention_pairs(model, tokens, dense=dense)
            * (3 if workload in BACKWARD else 1)
        )
    if workload in SELECTED:
        return float(
            batch
            * per_pair
            / model.num_layers
            * selected_pairs(model, tokens)
            * (3 if workload in BACKWARD else 1)
        )
    if workload == "decode":
        return float(
            batch
            * (
                2 * linear_parameters(model, dense=dense)
                + per_pair * sum(keys_of_query(model, tokens, dense=dense).values())
            )
        )
    forward = batch * (
        2 * linear_parameters(model, dense=dense) * tokens
        + per_pair * attention_pairs(model, tokens, dense=dense)
    )
    return float(forward * (3 if workload in BACKWARD else 1))


def step_min_bytes(
    model: ModelConfig, *, workload: str, batch: int, tokens: int, dtype: str, dense: bool
) -> float:
    """Least traffic of a model's step: each weight read once and the logits written; training also
    writes weights and both Adam moments, which the loop keeps in fp32 with a master of each weight.

    A decode step reads the keys and values that its token attends to out of a cache that holds
    ``tokens``. Attention alone reads q, each branch's k and v, and gates once, and writes o; its
    backward reads o's gradient and writes those of the inputs. The selected branch alone has no
    gates, and reads the blocks (int32) once.
    """
    if workload in SELECTED:
        per_token = (model.num_heads + model.num_kv_heads) * (model.head_dim + model.value_dim)
        blocks_bytes = 4 * batch * model.num_kv_heads * filled_slots(model, tokens)
        return float(
            batch * tokens * per_token * (2 if workload in BACKWARD else 1) * BYTES_OF[dtype]
            + blocks_bytes
        )
    if workload in ATTENTION:
        copies, gates = (
            (1, 0)
            if dense
            else (len(model.nsa.branches), len(model.nsa.branches) * model.num_heads)
        )
        inputs = (
            model.num_heads * model.head_dim
            + copies * model.num_kv_heads * (model.head_dim + model.value_dim)
            + gates
        )
        numbers = batch * tokens * (inputs + model.num_heads * model.value_dim)
        return float(numbers * (2 if workload in BACKWARD else 1) * BYTES_OF[dtype])
    weights = linear_parameters(model, dense=dense) * BYTES_OF[dtype]
    if workload == "train":
        return float(6 * weights)  # weight, first and second moment: each read and written
    if workload == "train_loop":  # the same in fp32, and a narrower weight next to its master
        master = 6 * linear_parameters(model, dense=dense) * BYTES_OF["fp32"]
        return float(master + (0 if dtype == "fp32" else 2 * weights))
    if workload == "decode":
        keys = keys_of_query(model, tokens, dense=dense)
        # tokens of both branches need be read once
        if model.nsa.share_kv and {"sel", "win"} <= keys.keys():
            keys["sel"] = max(keys["sel"], keys.pop("win"))
        read = (
            batch
            * model.num_layers
            * model.num_kv_heads
            * sum(keys.values())
            * (model.head_dim + model.value_dim)
        )
        return float(weights + (read + batch * model.vocab_size) * BYTES_OF[dtype])
    return float(weights + batch * tokens * model.vocab_size * BYTES_OF[dtype])


def judge_step(
    *,
    flops: float,
    min_bytes: float,
    step_s: float,
    gemm_flops_per_s: float | None,
    dtype: str,
    device_name: str,
    is_gpu: bool,
) -> Physics:
    """Rates, floor and notes of a measured step."""
    card = CARDS.get(device_name)
    notes = []
    if card is None:
        notes.append(
            f"no datasheet entry for {device_name!r}: datasheet ceilings are null"
            if is_gpu
            else "CPU: datasheet ceilings are null"
        )
    floors = []
    if gemm_flops_per_s:
        floors.append(flops / gemm_flops_per_s)
    if card:
        floors.append(min_bytes / card.bytes_per_s)
    floor_s = max(floors, default=None)
    return Physics(
        flops=flops,
        min_bytes=min_bytes,
        flops_per_s=flops / step_s,
        bytes_per_s=min_bytes / step_s,
        gemm_flops_per_s=gemm_flops_per_s,
        datasheet_flops_per_s=card.flops_per_s(dtype) if card else None,
        datasheet_bytes_per_s=card.bytes_per_s if card else None,
        l2_bytes=card.l2_bytes if card else None,
        floor_s=floor_s,
        floor_fraction=None if floor_s is None else floor_s / step_s,
        notes=notes,
    )
