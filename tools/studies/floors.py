"""The least time that attention alone can take on a card, forward and backward, branch by branch.

Pure: no torch, no clock.

A floor is of the arithmetic that the definition demands, at the rates that the card reaches; no
kernel's tiles, padding, launches or second reads are in it. Compression is not in it either: the
mean is traffic alone, and a learned phi's products are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from nsa.blocks import BlockGrid
from nsa.config import ModelConfig
from perfbench.records import SELECTED
from perfbench.roofline import BYTES_OF, CARDS, selected_pairs, step_min_bytes

# of one SM. CUDA C++ Programming Guide, throughput of native arithmetic: compute capability 8.0 to
# 9.0
EXP_PER_CLOCK = 16

# (SMs, clock in GHz) at which NVIDIA's datasheets state the matrix rates of
# perfbench.roofline.CARDS.
CLOCKS: Mapping[str, tuple[int, float]] = {
    "NVIDIA A100-SXM4-40GB": (108, 1.410),
    "NVIDIA A100-SXM4-80GB": (108, 1.410),
    "NVIDIA A100 80GB PCIe": (108, 1.410),
    "NVIDIA H100 80GB HBM3": (132, 1.830),
    "NVIDIA H100 PCIe": (114, 1.620),
    "NVIDIA H200": (132, 1.830),
    "NVIDIA L40S": (142, 2.520),
    "NVIDIA GeForce RTX 4090": (128, 2.520),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card can do each second: FLOP of matrix products, exponentials, and bytes to or from
    memory; measured, or the datasheet's.
    """

    flops_per_s: float
    exp_per_s: float
    bytes_per_s: float
    flops_measured: bool = False
    bytes_measured: bool = False

    @classmethod
    def of(
        cls,
        device_name: str,
        dtype: str,
        *,
        gemm_flops_per_s: float | None = None,
        copy_bytes_per_s: float | None = None,
    ) -> Self | None:
        """The rates of a card by NVML's name, None for one without a datasheet entry.

        ``gemm_flops_per_s`` and ``copy_bytes_per_s`` (each byte read and written counted as two),
        as a large product and a copy measured them on this card, replace the datasheet's, which no
        kernel reaches.
        """
        card = CARDS.get(device_name)
        if card is None:
            return None
        num_sms, clock_ghz = CLOCKS[device_name]
        return cls(
            flops_per_s=gemm_flops_per_s or card.flops_per_s(dtype),
            exp_per_s=num_sms * EXP_PER_CLOCK * clock_ghz * 1e9,
            bytes_per_s=copy_bytes_per_s or card.bytes_per_s,
            flops_measured=bool(gemm_flops_per_s),
            bytes_measured=bool(copy_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """Milliseconds of each part, one after another: ``parts_ms`` of arithmetic by its branch,
    ``traffic_ms`` of inputs and results.
    """

    parts_ms: Mapping[str, float]
    traffic_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.parts_ms.values()) + self.traffic_ms


def forward(
    model: ModelConfig, *, batch: int, tokens: int, dtype: str, dense: bool, rates: Rates
) -> Floor:
    """Parts ``cmp``, ``score``, ``sel`` and ``win``, those of branches that are off left away; of
    dense attention the part ``dense``.

    A pair of a query head and a key costs 2 (DK + DV) FLOP, for q.k and p v, and one exponential.
    The matrix units and the exponentials' unit work at the same time, so a part takes the longer of
    both. Scoring is a second pass over the compressed keys (Eq. 8 of arXiv 2502.11089), 2 DK FLOP
    and one exponential a pair, for queries that have more blocks than slots. Nothing overlaps with
    another part or with the traffic: a kernel that fuses parts may gain up to ``traffic_ms``, and
    one that makes some of its exponentials by polynomials on the other units may pass a part that
    is bound by them.
    """
    heads = batch * model.num_heads
    parts = {
        name: _part_ms(heads * count, _forward_flops(model), rates)
        for name, count in _pairs(model, tokens, dense).items()
    }
    if "sel" in parts:
        parts["score"] = _part_ms(heads * scored_pairs(model, tokens), 2 * model.head_dim, rates)
    return Floor(parts, _forward_traffic_ms(model, batch, tokens, dtype, dense, rates))


def backward(
    model: ModelConfig, *, batch: int, tokens: int, dtype: str, dense: bool, rates: Rates
) -> Floor:
    """As `forward`, of the backward alone: five products a pair, 2 (3 DK + 2 DV) FLOP, and the
    exponential once more.

    The products are q.k again, dO.v, and those that give dV, dQ and dK (Dao, arXiv 2307.08691,
    section 2.3.2). Scoring has no gradient. The traffic reads the inputs and dO, and writes the
    inputs' gradients.
    """
    heads = batch * model.num_heads
    parts = {
        name: _part_ms(heads * count, _backward_flops(model), rates)
        for name, count in _pairs(model, tokens, dense).items()
    }
    return Floor(parts, _backward_traffic_ms(model, batch, tokens, dtype, dense, rates))


def selected(
    model: ModelConfig, *, batch: int, tokens: int, dtype: str, rates: Rates
) -> tuple[Floor, Floor]:
    """(forward, backward) of the selected branch alone, by the rules of `forward` and `backward`;
    the one part is ``sel``.

    It holds for every kind of blocks, all of which read the same number of keys.
    """
    pairs = batch * model.num_heads * selected_pairs(model, tokens)
    moved = [
        step_min_bytes(model, workload=name, batch=batch, tokens=tokens, dtype=dtype, dense=False)
        for name in SELECTED[::-1]
    ]
    both_ms = 1e3 * moved[1] / rates.bytes_per_s
    forward_ms = 1e3 * moved[0] / rates.bytes_per_s
    o_ms = (
        1e3
        * batch
        * tokens
        * model.num_heads
        * model.value_dim
        * BYTES_OF[dtype]
        / rates.bytes_per_s
    )
    return (
        Floor({"sel": _part_ms(pairs, _forward_flops(model), rates)}, forward_ms),
        Floor({"sel": _part_ms(pairs, _backward_flops(model), rates)}, both_ms - o_ms),
    )


def scored_pairs(model: ModelConfig, tokens: int) -> int:
    """(query, compressed block) pairs per query head whose scores can change what is chosen.

    A query within the first num_selected * sel_block tokens has a slot for each of its blocks, so
    no score matters to it.
    """
    first = min(tokens, BlockGrid.of(model.nsa).everything_selected_tokens)
    return _grid_pairs(model, tokens)["cmp"] - _grid_pairs(model, first)["cmp"]


@lru_cache(maxsize=64)
def _grid_pairs(model: ModelConfig, tokens: int) -> Mapping[str, int]:
    return BlockGrid.of(model.nsa).pairs(tokens)


def _pairs(model: ModelConfig, tokens: int, dense: bool) -> dict[str, int]:
    """(query, key) pairs per query head and sequence, of the branches that are computed."""
    found = _grid_pairs(model, tokens)
    return {name: found[name] for name in (("dense",) if dense else model.nsa.branches)}


def _part_ms(pairs: int, flops_per_pair: int, rates: Rates) -> float:
    return 1e3 * max(pairs * flops_per_pair / rates.flops_per_s, pairs / rates.exp_per_s)


def _forward_flops(model: ModelConfig) -> int:
    return 2 * (model.head_dim + model.value_dim)


def _backward_flops(model: ModelConfig) -> int:
    return 2 * (3 * model.head_dim + 2 * model.value_dim)


def _forward_traffic_ms(
    model: ModelConfig, batch: int, tokens: int, dtype: str, dense: bool, rates: Rates
) -> float:
    """Inputs read once, the result written once."""
    moved_bytes = step_min_bytes(
        model, workload="attention_forward", batch=batch, tokens=tokens, dtype=dtype, dense=dense
    )
    return 1e3 * moved_bytes / rates.bytes_per_s


def _backward_traffic_ms(
    model: ModelConfig, batch: int, tokens: int, dtype: str, dense: bool, rates: Rates
) -> float:
    """Inputs and dO read once, the inputs' gradients written once: twice the forward's traffic,
    less one tensor of o's size.
    """
    o_bytes = batch * tokens * model.num_heads * model.value_dim * BYTES_OF[dtype]
    return (
        2 * _forward_traffic_ms(model, batch, tokens, dtype, dense, rates)
        - 1e3 * o_bytes / rates.bytes_per_s
    )
